"""Room for what is still to be generated: what learning gains over a constant, and who gives way when it was too little."""

import random
from dataclasses import dataclass

from tests.support.fake_model import expected_output
from tests.support.scheduling import Bench

CONSTANT = 32
"""Tokens of room for each, whatever answers are like: what learning is compared with."""


@dataclass
class Run:
    preemptions: int = 0
    steps: int = 0
    most_running: int = 0
    computed: int = 0


def serve(decode_room: int | None, *, pool: int, requests: int, answer: int, max_tokens: int) -> Run:
    """Answers of ``answer`` tokens, ended by an abort as a stop string's are; always more waiting than fit."""
    bench = Bench(total_pages=pool, decode_room=decode_room, max_running=64, max_queued=1000)
    scheduler = bench.scheduler  # driven without a model, which would read every token in every step
    run = Run()
    rng = random.Random(5)
    for i in range(requests):
        bench.submit(f"r{i}", [rng.randrange(50) for _ in range(10)], max_tokens=max_tokens)
    while scheduler.has_work:
        step = scheduler.next_step(0.0)
        run.steps += 1
        run.most_running = max(run.most_running, len(scheduler.running))
        if step is not None:
            run.computed += len(step.plan.token_ids)
            scheduler.complete(step, [1] * len(step.sampled), 0.0)
        for request in scheduler.running:
            if request.output_tokens >= answer:
                scheduler.abort(request.request_id, 0.0)
    scheduler.check_invariants()
    run.preemptions = scheduler.preemptions
    return run


def test_long_answers_are_preempted_less_than_with_a_constant() -> None:
    """Every answer is twelve times the constant: what is learnt from the first few serves the others."""
    workload = {"pool": 2000, "requests": 40, "answer": 380, "max_tokens": 400}
    constant, learnt = serve(CONSTANT, **workload), serve(None, **workload)
    assert constant.preemptions > 20, "the workload must preempt to mean anything"
    assert learnt.preemptions < constant.preemptions / 4
    assert learnt.computed < constant.computed
    assert learnt.steps < constant.steps * 1.3, "and the pool is not left idle for it"


def test_limits_far_above_what_answers_need_do_not_keep_the_pool_idle() -> None:
    """Answers of 10 tokens with a limit of 900: with room for the limits, or half of them, one or two would run."""
    run = serve(None, pool=1000, requests=120, answer=10, max_tokens=900)
    assert run.most_running > 30
    assert run.preemptions < 6


def test_an_estimate_that_was_too_short_is_made_anew_and_nothing_is_lost() -> None:
    """After many short answers some are long: they get their pages, by preemption if need be, and are whole."""
    bench = Bench(total_pages=120, decode_room=None, max_running=16, max_queued=100)
    for i in range(20):
        stop = expected_output([i, 1], 3)[-1]
        bench.submit(f"short{i}", [i, 1], max_tokens=60, stop_token_ids=(stop,))
    bench.run()
    assert bench.scheduler.estimate.total_tokens(0, 1000) < 25
    for i in range(6):
        bench.submit(f"long{i}", [i, 2], max_tokens=60)
    bench.run()
    for i in range(6):
        assert bench.output(f"long{i}") == expected_output([i, 2], 60)


def test_a_request_alone_needs_no_room_but_its_own() -> None:
    """The whole pool for one prompt: nobody is there to grow into it."""
    bench = Bench(total_pages=40, decode_room=None)
    bench.submit("r", [1] * 30, max_tokens=10)
    bench.run()
    assert bench.output("r") == expected_output([1] * 30, 10)


def test_what_others_hold_too_is_not_lost_by_a_preemption() -> None:
    """Of two with a long prompt in common, the one with the short tail gives way, not the stranger that computed less than
    either but would lose all of it."""
    bench = Bench(total_pages=54, decode_room=0, chunk=64, hold_min=8)
    shared = [7] * 20
    bench.submit("one", [*shared, 1, 2], max_tokens=20)
    bench.submit("other", [*shared, *range(8, 14)], max_tokens=20)
    bench.submit("stranger", [3] * 12, max_tokens=20)
    bench.step()
    while len(bench.scheduler.running) < 3:
        bench.step()
    assert {bench.cached(name) for name in ("one", "other")} == {0, 20}
    loss = {r.request_id: bench.scheduler.kv.held_alone(r).computed_tokens for r in bench.scheduler.running}
    assert loss["one"] < loss["other"] < loss["stranger"] < 20
    while len(bench.scheduler.running) == 3:
        bench.step()
    assert {r.request_id for r in bench.scheduler.running} == {"other", "stranger"}
    bench.run()
    assert bench.output("one") == expected_output([*shared, 1, 2], 20)


def test_a_prompt_that_was_just_let_in_gives_way_before_anyone_loses_work() -> None:
    """It has computed next to nothing and sits on pages for all of it."""
    bench = Bench(total_pages=46, decode_room=0, chunk=2)
    bench.submit("decodes", [1] * 10, max_tokens=30)
    for _ in range(6):
        bench.step()
    bench.submit("prompt", [2] * 28, max_tokens=1)
    while "prompt" not in [r.request_id for r in bench.scheduler.running]:
        bench.step()
    while len(bench.scheduler.running) == 2:
        bench.step()
    assert [r.request_id for r in bench.scheduler.running] == ["decodes"]
    bench.run()
    assert bench.output("decodes") == expected_output([1] * 10, 30)
    assert bench.output("prompt") == expected_output([2] * 28, 1)
