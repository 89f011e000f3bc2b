"""Whole fleets in simulated time under mixed faults, whose system prompts are public: no answer is another tenant's, whatever breaks.

The fake model's answers depend on the caller's namespace and on the KV that was read, so that a tail which is read by somebody else, or
gone on with elsewhere under another key, gives another answer than is expected.
"""

import pytest

from prefixmesh.cache.namespace import public_namespace
from prefixmesh.router.pins.wishes import PinVersion
from prefixmesh.sim.fault_fleet import VOCAB
from prefixmesh.sim.fault_run import FaultRun
from prefixmesh.sim.fault_traffic import SYSTEMS, system_prompt
from prefixmesh.tokens import pack
from prefixmesh.worker.scheduler import Scheduler

FEW = range(3)
MANY = range(20)
LARGEST_PAGE = 16


def check(seeds: range, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every seed holds, and many of its requests lived behind a public prefix."""
    placed = 0
    real = Scheduler.submit

    def submit(scheduler: Scheduler, *arguments: object) -> None:
        nonlocal placed
        real(scheduler, *arguments)  # type: ignore[arg-type]
        placed += any(request.boundary_tokens > 0 for request in list(scheduler._requests.values())[-1:])

    monkeypatch.setattr(Scheduler, "submit", submit)
    namespace = public_namespace(b"k" * 32, adapter_digest="", model_revision="r")
    versions = [
        PinVersion(
            generation=1, namespace=namespace, tokens=pack(system_prompt(number, VOCAB)), fingerprints=()
        )
        for number in range(SYSTEMS)
    ]
    for seed in seeds:
        run = FaultRun(seed)
        for router in run.routers:
            router.public.set(versions, LARGEST_PAGE)
        report = run.run()
        assert not report.problems, str(report)
        assert report.finished > 0.5 * report.requests > 0
    assert placed > 10 * len(seeds)


def test_a_few_seeds_of_mixed_faults_answer_nobody_from_anothers_tail(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check(FEW, monkeypatch)


@pytest.mark.slow
def test_twenty_seeds_of_mixed_faults_answer_nobody_from_anothers_tail(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check(MANY, monkeypatch)
