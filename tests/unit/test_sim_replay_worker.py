"""The replay's worker: when prompts are computed and answers end, by the timing model, and what each finds."""

from collections.abc import Sequence

import pytest

from prefixmesh.ids import Fingerprint
from prefixmesh.sim.kernel import Simulation
from prefixmesh.sim.replay_cache import BlockCache, Change
from prefixmesh.sim.replay_job import Job
from prefixmesh.sim.replay_worker import ReplayWorker
from prefixmesh.sim.timing import TimingModel
from prefixmesh.sim.workload import WorkloadRequest

BLOCK, CHUNK = 10, 100
TIMING = TimingModel(step_ms=5.0, prefill_ms_per_token=0.1, decode_ms_per_sequence=1.0)


class Scene:
    """One worker, and what it tells."""

    def __init__(
        self, timing: TimingModel = TIMING, *, blocks: int = 1000, host: int = 0, at_once: bool = False
    ) -> None:
        self.sim = Simulation(0)
        self.told: list[str] = []
        self.worker = ReplayWorker(
            self.sim,
            0,
            BlockCache(blocks, host),
            timing,
            self,
            block_size=BLOCK,
            chunk_tokens=CHUNK,
            at_once=at_once,
        )
        self._jobs = 0

    def ask(self, names: Sequence[int], output: int = 1, *, rest: int = 0, answer: Sequence[int] = ()) -> Job:
        request = WorkloadRequest(
            arrival_ms=0, input_length=BLOCK * len(names) + rest, output_length=output, block_ids=tuple(names)
        )
        self._jobs += 1
        left = [*names, *answer] if answer else []
        job = Job(self._jobs, request, list(map(Fingerprint, names)), list(map(Fingerprint, left)))
        job.arrived_at = self.sim.now
        self.worker.take(job)
        return job

    def run(self) -> None:
        self.sim.run_until_idle()
        worker = self.worker
        assert (worker.in_flight, worker.waiting_tokens, worker.waiting_squares) == (0, 0, 0)
        assert worker.running_tokens == pytest.approx(0.0, abs=1e-6)

    def begun(self, job: Job) -> None:
        self.told.append(f"begun {job.number}")

    def first_token(self, job: Job) -> None:
        self.told.append(f"first {job.number}")

    def ended(self, job: Job) -> None:
        self.told.append(f"ended {job.number}")

    def changed(self, worker: int, changes: Sequence[Change]) -> None:
        self.told.append(f"{sum(len(change.came) for change in changes)} blocks")


def waited_ms(job: Job) -> float:
    return 1e3 * (job.first_token_at - job.arrived_at)


def test_prompt_takes_its_chunks_and_their_steps() -> None:
    scene = Scene()
    job = scene.ask(range(25))
    scene.run()
    assert waited_ms(job) == pytest.approx(250 * 0.1 + 3 * 5.0)
    assert job.ended_at == job.first_token_at
    assert scene.told == ["begun 1", "25 blocks", "first 1", "ended 1"]


def test_answer_takes_a_step_a_token_after_the_first() -> None:
    scene = Scene()
    job = scene.ask(range(10), output=11)
    scene.run()
    assert 1e3 * (job.ended_at - job.first_token_at) == pytest.approx(10 * (5.0 + 1.0))


def test_request_without_an_answer_ends_with_its_prompt() -> None:
    scene = Scene()
    job = scene.ask(range(10), output=0)
    scene.run()
    assert job.ended_at == job.first_token_at > 0


def test_prompts_are_computed_in_turn_and_share_what_those_before_them_left() -> None:
    scene = Scene()
    first, second = scene.ask(range(20)), scene.ask([*range(20), 30])
    assert scene.worker.held([Fingerprint(name) for name in range(20)]) == (20, 20)
    assert scene.worker.waiting_tokens == pytest.approx(200 + 10)
    assert scene.worker.waiting_squares == pytest.approx(200**2 + 210**2 - 200**2)
    scene.run()
    assert (first.cached_tokens, second.cached_tokens) == (0, 200)
    assert waited_ms(second) - waited_ms(first) == pytest.approx(1.0 + 5.0)


def test_last_token_is_always_computed() -> None:
    scene = Scene()
    scene.ask(range(10))
    again = scene.ask(range(10))
    scene.run()
    assert (again.cached_tokens, again.uncached_tokens) == (99, 1)


def test_rest_that_has_a_name_is_found_by_its_tokens() -> None:
    scene = Scene()
    request = WorkloadRequest(arrival_ms=0, input_length=13, output_length=1, block_ids=(1, 2))
    jobs = [Job(number, request, [Fingerprint(1), Fingerprint(2)], []) for number in range(2)]
    for job in jobs:
        scene.worker.take(job)
    scene.run()
    assert [job.cached_tokens for job in jobs] == [0, 12]


def test_rest_that_has_a_name_takes_room_beside_the_block_that_its_answer_fills() -> None:
    """Two of 13 tokens, whose answers fill the second block, in a cache for both: 3 blocks each, and no room for a third."""
    scene = Scene(blocks=6)
    cache = scene.worker.cache
    for number in (10, 20, 30):
        request = WorkloadRequest(
            arrival_ms=0, input_length=13, output_length=8, block_ids=(number, number + 1)
        )
        whole, rest, filled = (Fingerprint(number + n) for n in range(3))
        scene.worker.take(Job(number, request, [whole, rest], [whole, filled]))
    least = cache.free_blocks
    while scene.sim.step():
        least = min(least, cache.free_blocks)
        assert cache.used_blocks <= cache.total_blocks
    assert least == 0
    assert len(cache) == 6


def test_steps_are_longer_while_others_decode_and_for_them_while_one_prefills() -> None:
    scene = Scene()
    decoding = scene.ask(range(10), output=21)
    prefilling = scene.ask(range(20, 40), output=1)
    scene.run()
    both_ms = 2 * (5.0 + 10.0 + 1.0)
    assert 1e3 * (prefilling.first_token_at - decoding.first_token_at) == pytest.approx(both_ms)
    assert 1e3 * (decoding.ended_at - decoding.first_token_at) == pytest.approx(both_ms + 18 * 6.0)


def test_kv_that_grows_makes_steps_longer() -> None:
    scene = Scene(TimingModel(step_ms=1.0, prefill_ms_per_token=0.1, decode_ms_per_kv_token=0.01))
    job = scene.ask(range(10), output=101)
    other = scene.ask(range(20, 30), output=51)
    scene.run()
    assert 1e3 * (other.ended_at - other.first_token_at) / 50 > 1.0 + 200 * 0.01
    assert 1e3 * (job.ended_at - job.first_token_at) / 100 > 1.0 + 100 * 0.01


def test_answer_is_found_by_the_next_turn() -> None:
    scene = Scene()
    scene.ask(range(10), output=21, answer=[50, 51])
    scene.run()
    following = scene.ask([*range(10), 50, 51, 60])
    scene.run()
    assert following.cached_tokens == 120


def test_answer_of_one_token_is_found_too_where_it_fills_a_block() -> None:
    scene = Scene()
    scene.ask([1], output=1, rest=9, answer=[50])
    scene.run()
    following = scene.ask([1, 50], rest=1)
    scene.run()
    assert following.cached_tokens == 20


def test_host_blocks_are_loaded_where_that_is_quicker_than_computing() -> None:
    quick = TimingModel(step_ms=0.0, prefill_ms_per_token=0.1, load_back_ms_per_token=0.02)
    slow = TimingModel(step_ms=0.0, prefill_ms_per_token=0.1, load_back_ms_per_token=0.1)
    for timing, found, took_ms in ((quick, (0, 40), 40 * 0.02 + 10 * 0.1), (slow, (0, 0), 50 * 0.1)):
        scene = Scene(timing, blocks=5, host=100)
        scene.ask(range(4))
        scene.ask(range(20, 25))
        scene.run()
        job = scene.ask([*range(4), 99])
        scene.run()
        assert (job.device_tokens, job.host_tokens) == found
        assert waited_ms(job) == pytest.approx(took_ms)


def test_at_once_means_that_who_is_sent_later_finds_what_was_sent_before_in_whole() -> None:
    scene = Scene(at_once=True)
    scene.ask(range(10))
    again = scene.ask(range(10))
    assert again.cached_tokens == 100
    scene.run()


def test_work_is_that_of_all_that_was_sent() -> None:
    scene = Scene()
    scene.ask(range(10), output=5)
    scene.ask(range(10), output=5)
    scene.run()
    # The first token of an answer comes with its prompt's last.
    assert scene.worker.work_ms == pytest.approx(101 * 0.1 + 2 * 4 * 1.0)
    assert scene.worker.prompt_tokens == 200


def test_whoever_has_not_ended_is_active_and_what_several_share_is_in_use_once() -> None:
    scene = Scene(blocks=40)
    scene.ask(range(10), output=21)
    scene.sim.run_for(0.018)
    scene.ask(range(10), output=21)
    scene.ask(range(20, 30), output=21)
    worker = scene.worker
    # One decodes its second token, two wait.
    assert worker.queued == 2
    assert worker.active_tokens == pytest.approx(300.5)
    assert worker.kv_use == 12 / 40
    scene.sim.run_for(0.02)
    assert (worker.queued, worker.kv_use) == (0, (12 + 2 + 12) / 40)
    scene.run()
    assert worker.active_tokens == pytest.approx(0.0, abs=1e-6)
    assert worker.kv_use == 0.0


def test_where_nothing_takes_room_use_is_what_it_would_take() -> None:
    scene = Scene(blocks=40, at_once=True)
    scene.ask(range(10))
    scene.sim.run_for(0.001)
    assert scene.worker.kv_use == 10 / 40
    scene.run()


def test_short_prompts_share_a_step_as_far_as_a_chunk_goes() -> None:
    scene = Scene()
    jobs = [scene.ask([n, n + 1, n + 2, n + 3]) for n in (10, 20, 30)]
    scene.run()
    # The first came to an idle worker; of the next two 80 tokens go into one step.
    assert [waited_ms(job) for job in jobs] == pytest.approx([9.0, 22.0, 22.0])


def test_prompt_is_cut_where_the_chunk_ends_and_goes_on_in_the_next_step() -> None:
    scene = Scene()
    scene.ask([1])
    first, second = scene.ask(range(10, 17)), scene.ask(range(20, 27))
    scene.run()
    assert waited_ms(first) == pytest.approx(6.0 + 15.0)
    assert waited_ms(second) == pytest.approx(6.0 + 15.0 + 9.0)


def test_who_comes_while_others_decode_begins_with_the_next_step() -> None:
    scene = Scene()
    decoding = scene.ask([1], output=100)
    late: list[Job] = []
    scene.sim.call_at(1e-3 * (6.0 + 2.5 * 6.0), lambda: late.append(scene.ask([2])))
    scene.run()
    (job,) = late
    assert waited_ms(job) == pytest.approx(3.0 + 5.0 + 1.0 + 1.0)
    assert 1e3 * (decoding.ended_at - decoding.first_token_at) == pytest.approx(99 * 6.0 + 1.0)


def test_room_is_kept_for_all_of_an_answer_but_its_last_token() -> None:
    scene = Scene(blocks=4)
    first, second = scene.ask([1], output=21), scene.ask([2], output=1)
    assert scene.worker.cache.used_blocks == 3
    third = scene.ask([3], output=21)
    scene.run()
    assert first.first_token_at < second.first_token_at < first.ended_at < third.first_token_at
    assert scene.worker.cache.used_blocks == 0
