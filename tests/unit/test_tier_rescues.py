"""A host that is full through the whole core: nothing is copied that would push out what the device has not, and what must go is saved."""

from prefixmesh.worker.engine_rates import EngineRates
from prefixmesh.worker.tiers.backups_in_flight import LATE_COPY_S
from prefixmesh.worker.tiers.load_back_rates import LoadBackRates
from tests.support.tier_bench import TierBench

LENGTH = 8


def prompt(number: int) -> list[int]:
    return [number * LENGTH + place for place in range(LENGTH)]


def full(**options: object) -> TierBench:
    """Two prompts are on the device, the first of them on the host as well, and both tiers are full."""
    bench = TierBench(device_pages=2 * LENGTH, host_pages=LENGTH, **options)  # type: ignore[arg-type]
    bench.serve("first", prompt(0))
    bench.serve("second", prompt(1))
    assert bench.host.free_pages == 0
    return bench


def offloads(bench: TierBench) -> int:
    return sum(job.kind == "offload" for job in bench.mover.started)


def test_what_comes_when_the_host_is_full_is_neither_copied_nor_counted_as_dropped() -> None:
    bench = full()
    counts = bench.keeper.counts()
    assert (counts.backed_up_tokens, counts.dropped_tokens) == (LENGTH, 0)
    bench.check_at_rest()


def saving(**options: object) -> TierBench:
    """The second prompt is being saved, the third waits on the device for nobody, and a fourth has come."""
    bench = full(**options)
    bench.mover.holds = {"offload"}
    began = offloads(bench)
    bench.serve("third", prompt(2))  # takes the place of the first, which has its copy
    bench.submit("fourth", prompt(3))
    bench.step(3)
    assert offloads(bench) == began + 1
    assert not bench.is_announced("fourth")
    return bench


def let_go(bench: TierBench) -> None:
    bench.mover.holds = set()
    bench.mover.finish()
    bench.run()
    bench.check_at_rest()


def test_an_admission_waits_for_what_is_being_saved_and_finds_its_pages_free() -> None:
    bench = saving()
    evicted = bench.scheduler.kv.evicted_pages
    bench.mover.finish()
    bench.until(lambda: bench.is_announced("fourth"), limit=3)
    assert bench.scheduler.kv.evicted_pages == evicted
    let_go(bench)


def test_who_waits_is_admitted_after_a_moment_though_the_copy_never_comes() -> None:
    bench = saving()
    bench.now += LATE_COPY_S
    bench.until(lambda: bench.is_announced("fourth"), limit=3)
    assert bench.core.stats().tiers.copies_in_flight == 1
    let_go(bench)


def test_who_decodes_goes_on_while_another_waits_and_who_waits_is_asked_again_in_time() -> None:
    bench = TierBench(device_pages=4 * LENGTH, host_pages=LENGTH)
    for number in range(3):
        bench.serve(f"r{number}", prompt(number))
    bench.serve("again", prompt(0))
    bench.mover.holds = {"offload"}
    bench.submit("decoding", prompt(3)[:3], 12)
    bench.submit("waiting", [*prompt(4), 1, 2])
    bench.until(lambda: len(bench.output("decoding")) == 4, limit=10)
    assert bench.mover.jobs
    assert not bench.is_announced("waiting")
    bench.now += LATE_COPY_S
    bench.step(2)
    assert bench.is_announced("waiting")
    assert len(bench.output("decoding")) < 12
    let_go(bench)


def test_some_pages_are_given_up_ahead_of_those_who_decode() -> None:
    bench = full()
    bench.serve("third", prompt(2))
    assert offloads(bench) == 2
    assert bench.allocator.free_pages > 0


def test_what_cannot_be_saved_is_not_tried_again_and_again() -> None:
    bench = saving()
    bench.mover.fail(next(iter(bench.mover.jobs)))
    bench.step()
    assert bench.is_announced("fourth"), "it waits for another that goes in its place"
    let_go(bench)


def test_what_is_computed_again_as_fast_is_not_waited_for() -> None:
    bench = full(rates=EngineRates(prefill_tokens_per_s=1e9))
    bench.serve("third", prompt(2))
    began = offloads(bench)
    bench.serve("fourth", prompt(3))
    assert offloads(bench) == began


def test_selectively_what_was_asked_for_once_is_not_saved() -> None:
    bench = TierBench(device_pages=2 * LENGTH, host_pages=LENGTH, write_policy="write_through_selective")
    for number in range(4):
        bench.serve(f"r{number}", prompt(number))
    assert offloads(bench) == 0


def test_rates_that_keep_everything_from_being_saved_are_tried_again() -> None:
    """Nothing is copied while the host is full but by rescues: a moment's slowness must not end them for ever."""
    rates = LoadBackRates(token_bytes=1.0, ms_per_token=0.1)
    for _ in range(20):
        rates.offloaded(1000, 10.0)
        rates.restored(1000, 10.0)
    assert rates.offload_ms(1000) > 5000.0
    for moment in range(300):
        rates.save_refused(float(moment))
        rates.save_refused(float(moment))  # the same look: many nodes are refused at once
        assert moment > 100 or rates.offload_ms(1000) > 200.0
    assert rates.offload_ms(1000) + rates.restore_ms(1000) < 250.0
