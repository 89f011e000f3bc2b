"""When a dead part is started again, as which life, and when it is given up; by examples, and by chance beside a plain model."""

import math

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from prefixmesh.errors import ConfigError
from prefixmesh.fleet.supervision import (
    Action,
    End,
    GivenUp,
    Lost,
    Part,
    Prepare,
    RestartPolicy,
    RouteTo,
    Start,
    Supervision,
)

POLICY = RestartPolicy(
    max_restarts=2, steady_s=60.0, first_pause_s=1.0, longest_pause_s=4.0, standby_routers=False
)


def supervise(policy: RestartPolicy = POLICY, *, workers: int = 1, router: bool = False) -> Supervision:
    """A fleet that serves since time 0."""
    core = Supervision(policy)
    parts = [Part(f"worker-{index}", "worker", address=f"w{index}:1") for index in range(workers)]
    core.adopt([*parts, *([Part("router", "router", address="r:1")] if router else [])], 0.0)
    return core


def test_a_worker_that_dies_is_ended_routed_around_and_started_at_once_as_its_next_life() -> None:
    """In this order: nothing new is sent to it before the next life's process exists."""
    core = supervise(workers=2)
    assert core.lost("worker-0", 1, "killed", 10.0, 0.5) == [
        End("worker-0", 1),
        RouteTo(("w1:1",)),
        Lost("worker-0", 1, "killed", 0.0),
        Start("worker-0", 2),
    ]
    assert core.served("worker-0", 2, "w0:2", 11.0) == [RouteTo(("w0:2", "w1:1"))]
    part = core.parts["worker-0"]
    assert (part.phase, part.life, part.restarts, part.reason, part.since) == (
        "serving",
        2,
        1,
        "killed",
        11.0,
    )


def test_pauses_double_up_to_the_longest_and_half_of_each_is_chance() -> None:
    """The first restart comes at once."""
    assert [POLICY.pause_s(n, 1.0) for n in (1, 2, 3, 4, 5, 5000)] == [0, 1, 2, 4, 4, 4]
    assert [POLICY.pause_s(n, 0.0) for n in (1, 2, 3)] == [0, 0.5, 1]


def test_a_part_whose_lives_do_not_last_is_given_up_with_the_reason_and_left_alone() -> None:
    """It is not due, and news of its dead lives changes nothing."""
    core = supervise()
    core.lost("worker-0", 1, "killed", 0.0, 1.0)
    assert core.lost("worker-0", 2, "no memory", 1.0, 1.0)[-1] == Lost("worker-0", 2, "no memory", 1.0)
    assert core.tick(1.9) == []
    assert core.tick(2.0) == [Start("worker-0", 3)]
    assert core.lost("worker-0", 3, "no memory", 3.0, 1.0) == [
        End("worker-0", 3),
        GivenUp("worker-0", "given up after 2 restarts in a row: no memory"),
    ]
    assert core.is_over
    assert core.due == math.inf
    assert core.tick(1e9) == []
    assert core.lost("worker-0", 3, "again", 4.0, 0.0) == []
    assert core.parts["worker-0"].restarts == 2


def test_a_life_that_lasted_gives_the_part_its_restarts_back() -> None:
    """A worker that dies once a day is never given up."""
    core = supervise()
    for day in range(1, 20):
        now = 86_400.0 * day
        assert core.lost("worker-0", day, "killed", now, 0.0)[-1] == Start("worker-0", day + 1)
        core.served("worker-0", day + 1, "w:1", now + 1)


def test_time_that_a_life_spent_loading_is_not_time_served() -> None:
    """A model that fails after minutes of loading, each time, is given up too."""
    core = supervise(RestartPolicy(max_restarts=1))
    core.lost("worker-0", 1, "killed", 0.0, 0.0)
    assert isinstance(core.lost("worker-0", 2, "cannot load", 600.0, 0.0)[-1], GivenUp)


def test_revived_parts_are_started_with_all_their_restarts_and_the_others_are_left_alone() -> None:
    """What somebody asks for is tried at once."""
    core = supervise(RestartPolicy(max_restarts=0), workers=2)
    core.lost("worker-0", 1, "killed", 0.0, 0.0)
    assert not core.is_over
    assert core.revive(5.0) == [Start("worker-0", 2)]
    assert core.parts["worker-0"].in_a_row == 0


def test_news_of_a_life_that_is_over_is_ignored() -> None:
    """A start that succeeds after it was given up is not a second life."""
    core = supervise()
    core.lost("worker-0", 1, "killed", 0.0, 0.0)
    core.lost("worker-0", 2, "not ready in time", 1.0, 0.0)
    assert core.served("worker-0", 2, "late:1", 1.1) == []
    assert core.parts["worker-0"].address == ""


def test_a_standby_takes_the_place_of_its_router_and_gets_a_successor_once_that_serves() -> None:
    """It is no life of its own before; the new router is told where the workers are."""
    core = Supervision(RestartPolicy())
    made = core.adopt(
        [Part("worker-0", "worker", address="w:1"), Part("router", "router", address="r:1")], 0.0
    )
    assert made == [RouteTo(("w:1",)), Prepare("router", 2)]
    assert core.lost("router", 1, "killed", 5.0, 0.0) == [
        End("router", 1),
        Lost("router", 1, "killed", 0.0),
        Start("router", 2, from_standby=True),
    ]
    assert core.served("router", 2, "r:1", 5.1) == [RouteTo(("w:1",)), Prepare("router", 3)]


def test_a_lost_standby_is_replaced_after_a_pause_and_at_last_done_without() -> None:
    """The router serves on meanwhile."""
    core = Supervision(RestartPolicy(max_restarts=2, first_pause_s=1.0))
    core.adopt([Part("router", "router", address="r:1")], 0.0)
    assert core.lost("router", 2, "killed", 0.0, 1.0) == [End("router", 2)]
    assert core.tick(1.0) == [Prepare("router", 3)]
    core.lost("router", 3, "killed", 1.0, 1.0)
    assert core.tick(3.0) == [Prepare("router", 4)]
    core.lost("router", 4, "killed", 3.0, 1.0)
    assert core.due == math.inf
    assert core.lost("router", 1, "killed", 9.0, 1.0)[-1] == Start("router", 5)


@pytest.mark.parametrize(
    ("field", "value"), [("max_restarts", -1), ("steady_s", math.nan), ("first_pause_s", -1.0)]
)
def test_a_policy_that_cannot_be_kept_is_refused(field: str, value: float) -> None:
    """With the field's name."""
    with pytest.raises(ConfigError, match=field):
        RestartPolicy(**{field: value})  # type: ignore[arg-type]


class Deaths(RuleBasedStateMachine):
    """Parts die, starts fail and succeed, standbys die, old news comes late, and time passes, in any order. Beside it the model: which
    processes the actions have made and not ended."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.core = Supervision(RestartPolicy(max_restarts=2, steady_s=5.0, first_pause_s=1.0))
        self.processes: dict[str, set[int]] = {}
        self.serving: dict[str, int] = {}
        self.given_up: set[str] = set()
        self.newest: dict[str, int] = {}

    @initialize(workers=st.integers(1, 3))
    def begin(self, workers: int) -> None:
        parts = [Part(f"worker-{index}", "worker", address="w:1") for index in range(workers)]
        parts.append(Part("router", "router", address="r:1"))
        for part in parts:
            self.processes[part.name], self.serving[part.name], self.newest[part.name] = {1}, 1, 1
        self.act(self.core.adopt(parts, self.now))

    def act(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Start(part, life, from_standby):
                    assert not self.serving.get(part), "two lives at once"
                    assert part not in self.given_up, "started without being asked"
                    assert (life in self.processes[part]) == from_standby
                    assert from_standby or life > self.newest[part], "a number used twice"
                    self.note(part, life)
                    self.serving[part] = life
                case Prepare(part, life):
                    assert life > self.newest[part]
                    self.note(part, life)
                case End(part, life):
                    self.processes[part].discard(life)
                    if self.serving.get(part) == life:
                        del self.serving[part]
                case GivenUp(part, reason):
                    assert reason
                    self.given_up.add(part)
                case RouteTo(addresses):
                    assert "" not in addresses, "a dead worker is routed to"
                case Lost():
                    pass

    def note(self, part: str, life: int) -> None:
        self.newest[part] = max(self.newest[part], life)
        self.processes[part].add(life)
        assert len(self.processes[part]) <= 2, "a life and a standby"

    @rule(data=st.data(), draw=st.floats(0, 1))
    def dies(self, data: st.DataObject, draw: float) -> None:
        part = data.draw(st.sampled_from(sorted(self.processes)))
        life = data.draw(st.integers(1, self.newest[part]))  # also of lives long over
        self.act(self.core.lost(part, life, "killed", self.now, draw))

    @rule(data=st.data())
    def serves(self, data: st.DataObject) -> None:
        part = data.draw(st.sampled_from(sorted(self.processes)))
        life = data.draw(st.integers(1, self.newest[part]))
        self.act(self.core.served(part, life, "a:1", self.now))

    @rule(seconds=st.floats(0, 8))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.act(self.core.tick(self.now))

    @precondition(lambda self: self.given_up)
    @rule()
    def asked(self) -> None:
        self.given_up.clear()
        self.act(self.core.revive(self.now))

    @invariant()
    def everything_is_looked_after_or_given_up(self) -> None:
        self.core.check_invariants()
        for part in self.core.parts.values():
            is_alive = part.name in self.serving
            assert is_alive + (part.due < math.inf) + (part.name in self.given_up) == 1, part

    @invariant()
    def processes_are_those_that_are_known(self) -> None:
        for part in self.core.parts.values():
            known = {part.standby, self.serving.get(part.name, 0)} - {0}
            assert self.processes[part.name] == known, part


Deaths.TestCase.settings = settings(
    derandomize=True, max_examples=60, stateful_step_count=30, deadline=None, database=None
)
TestDeaths = Deaths.TestCase
