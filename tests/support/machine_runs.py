"""How rule machines of caches are run, and what must have happened in them."""

import contextlib
from collections.abc import Iterator, Mapping
from unittest import mock

from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture.providers import HypothesisProvider
from hypothesis.stateful import run_state_machine_as_test

from prefixmesh.cache.eviction import LruLine
from tests.support.cache_machine import CacheMachine

STEPS = 50
ROUND_EXAMPLES = 16
"""Hypothesis spends most of a long run on variations of what it has found before, and each example leaves some rules out: many
short runs reach more of the rare cases than a long one."""


def run_rounds(machine: type[CacheMachine], rounds: int, depth: Mapping[str, int]) -> None:
    """So many short runs, each from its own seed and the same each time. Fails also unless each of ``depth`` happened at least so
    often in them: a machine that only scratches proves nothing."""
    for number in range(rounds):
        run_machine(seeded(machine, number), ROUND_EXAMPLES, repeatable=True)
    happened = machine.happened
    short = {what: happened[what] for what, least in depth.items() if happened[what] < least}
    assert not short, f"{machine.__name__} seldom reached {short}; of {dict(happened)}"


def run_machine(machine: type[CacheMachine], examples: int, *, repeatable: bool) -> None:
    """Run so many examples; the same each time, or others."""
    how = settings(
        max_examples=examples,
        stateful_step_count=STEPS,
        deadline=None,
        derandomize=repeatable,
        report_multiple_bugs=False,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    with small_bounds(), own_chance():
        run_state_machine_as_test(machine, settings=how)


@contextlib.contextmanager
def own_chance() -> Iterator[None]:
    """Draw nothing from the constants of the modules that happen to be loaded, as Hypothesis does now and then: else a repeatable run would be
    another whenever a module is added anywhere."""
    with mock.patch.object(HypothesisProvider, "_maybe_draw_constant", _no_constant):
        yield


@contextlib.contextmanager
def small_bounds() -> Iterator[None]:
    """Let what is done once in hundreds of nodes be done once in a few: lines in segments, and heaps cleared of dead entries."""
    with (
        mock.patch.object(LruLine.__init__, "__defaults__", (3,)),
        mock.patch("prefixmesh.cache.eviction._STALE_RANKS", 1),
        mock.patch("prefixmesh.cache.owners._STALE_ENTRIES", 1),
        mock.patch("prefixmesh.cache.deadlines.STALE_ENTRIES", 1),
    ):
        yield


def seeded(machine: type[CacheMachine], number: int) -> type[CacheMachine]:
    """The same machine by another name, which is what Hypothesis takes a repeatable run's seed from."""
    other: type[CacheMachine] = type(f"{machine.__name__}Round{number}", (machine,), {})
    other.happened = machine.happened
    return other


def _no_constant(*_: object, **__: object) -> None:
    """In place of the provider's own."""
