"""A fleet in simulated time that gives a pin controller trouble, and checks each of its orders.

Workers come, go, restart, are flushed, drain, cannot be used for a while; they refuse what they are told, do half of it, answer late or never, tell
their pins late, and lie about them and about what they hold. What they say is what the controller may go by: so budgets, moves and
last holders are reckoned here once more, in the plainest way, from what was said and what was ordered. When the troubles end, the fleet must come to
what is wished within a bounded number of steps, and stay there.
"""

import math
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Final

from prefixmesh.cache.tier import Tier
from prefixmesh.router.pins.config import PinControllerConfig
from prefixmesh.router.pins.controller import PinController
from prefixmesh.router.pins.sizes import size_tokens
from prefixmesh.router.pins.wishes import Action, PinSeen, Unpin, Warm, Wish, WorkerSeen
from tests.support.pin_checks import Ended, check_calm, check_orders, pin_of
from tests.support.pin_fleet import PinWorker, wish

CONFIG: Final = PinControllerConfig(
    max_moves=3,
    max_moves_per_worker=2,
    max_releases=4,
    warm_timeout_s=10.0,
    first_alone_s=4.0,
    unpin_timeout_s=4.0,
    first_pause_s=1.0,
    longest_pause_s=8.0,
    patience_s=2.0,
    proof_within_s=6.0,
    block_size=4,
)

MAX_WORKERS: Final = 5
CALM_STEPS: Final = 150
"""Within so many steps of a second all is as wished: the longest time limit, and some pauses, for each of a handful of wishes."""

QUIET_STEPS: Final = 25
"""After so many without an order there comes none: more than any time limit or pause."""

MOODS: Final = ("well", "slow", "refuses", "half", "silent", "late", "lost")
NAMES: Final = ("p", "q", "r")
OWNERS: Final = ("alice", "bob")
SIZES: Final = (4, 9, 16, 30)
TWICE: Final = ("time", "time", "wish", "mood")
KINDS: Final = (
    *TWICE,
    *TWICE,
    *("version", "replicas", "unwish", "heat", "cool", "expire", "adapter", "unknown", "join", "leave"),
    *("restart", "flush", "drain", "away", "lie", "blind", "deaf", "cached", "by_hand", "load"),
)
"""What can happen, some of it more often."""


@dataclass
class Troubled(PinWorker):
    """A worker, and what is wrong with it, until when."""

    mood: str = "well"
    mood_until: float = 0.0
    lies_until: float = 0.0
    blind_until: float = 0.0
    deaf_until: float = 0.0
    away_until: float = 0.0
    told: dict[str, PinSeen] = field(default_factory=dict)
    told_at: float = -1.0
    is_honest: bool = True
    """It has always said how things are, and done what it was told when it was told."""

    def observed(self, now: float, salt: int) -> WorkerSeen:
        """What the router sees."""
        self.usable = now >= self.away_until
        if now >= self.deaf_until and self.usable:
            self.told, self.told_at = dict(self.pins), now
            if now < self.lies_until:
                self.is_honest = False
                self.told = lied(self.told, salt)
        proven = dict(self.cached)
        if now < self.blind_until:
            proven = dict.fromkeys(proven, 0 if salt % 3 else salt % 40)
        return replace(self.seen(now), pins=dict(self.told), pins_at=self.told_at, proven=proven)

    def new_life(self, now: float) -> None:
        """It restarts."""
        self.restart()
        self.told, self.told_at = {}, now

    def end_pins(self, now: float) -> None:
        """Pins whose time has come."""
        over = [i for i, pin in self.pins.items() if pin.expires_at is not None and pin.expires_at <= now]
        for pin_id in over:
            del self.pins[pin_id]

    def refuses(self, of: Wish) -> bool:
        """Whether its own budgets forbid the pin."""
        size = size_tokens(of.version, self.page_size)
        others = [pin for pin_id, pin in self.pins.items() if pin_id != of.pin_id]
        in_all = sum(pin.size_tokens for pin in others)
        owners = sum(pin.size_tokens for pin in others if pin.owner == of.owner)
        return size == 0 or in_all + size > self.budget or owners + size > self.owner_budget


def lied(pins: dict[str, PinSeen], salt: int) -> dict[str, PinSeen]:
    """Something else than what is there."""
    if salt % 4 == 0:
        return {}
    if salt % 4 == 1:
        return {i: replace(pin, held_tokens=pin.size_tokens, missing_tokens=0) for i, pin in pins.items()}
    if salt % 4 == 2:
        return {
            i: replace(pin, size_tokens=salt % 50, missing_tokens=2, owner="bob") for i, pin in pins.items()
        }
    made_up = PinSeen(owner="alice", tier=Tier.DEVICE, size_tokens=8, held_tokens=8, missing_tokens=0)
    return {**pins, "pin/alice/p@1": made_up, f"pin/nobody/x@{salt}": made_up}


@dataclass
class Call:
    """An action on its way."""

    action: Action
    ordered_at: float
    due: float
    mood: str
    is_over: bool = False
    """Whether nobody waits for its answer any more."""

    @property
    def limit_s(self) -> float:
        """How long it is waited for."""
        return CONFIG.warm_timeout_s if isinstance(self.action, Warm) else CONFIG.unpin_timeout_s


class TroubledPins:
    """``do`` something, any number of times; ``calm`` at the end, or in between. Each raises AssertionError for what must not be."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.controller = PinController(CONFIG)
        self.workers: dict[str, Troubled] = {}
        self.wishes: dict[str, Wish] = {}
        self.calls: list[Call] = []
        self.ended: dict[tuple[str, int, str], Ended] = {}
        """By worker, life and pin: how the last action for it ended."""
        self.generation = 0
        self.lives = 0
        self.is_known = True
        self.happened: Counter[str] = Counter()
        for salt in range(3):
            self._join(salt)

    # What happens.

    def do(self, kind: str, x: int, y: int) -> None:
        """One thing; ``x`` and ``y`` say which of its kind."""
        self.happened[kind] += 1
        if kind == "time":
            self._pass_time(0.5 + x % 3, y)
        elif kind in ("wish", "version", "replicas", "unwish", "heat", "cool", "expire", "adapter"):
            self._change_wishes(kind, x, y)
        elif kind == "unknown":
            self.is_known = x % 3 > 0
        elif kind == "join":
            self._join(y)
        elif self.workers:
            names = sorted(self.workers)
            self._trouble(kind, self.workers[names[x % len(names)]], y)

    def _join(self, salt: int) -> None:
        if len(self.workers) >= MAX_WORKERS:
            return
        self.lives += 1
        name = next(n for n in "abcdefgh" if n not in self.workers)
        self.workers[name] = Troubled(
            name,
            host=f"h{salt % 2}",
            page_size=(2, 4)[salt % 2],
            budget=(40, 64, 100)[salt % 3],
            owner_budget=(32, 60)[salt % 2],
            layout=("L", "L", "M")[salt % 3],
            incarnation=1000 * self.lives,
            adapters=frozenset({"d"} if salt % 3 else ()),
        )

    def _change_wishes(self, kind: str, x: int, y: int) -> None:
        is_heat = kind in ("heat", "cool")
        owner = "@heat" if is_heat else OWNERS[x % 2]
        source = "heat" if is_heat else "pin"
        key = f"{source}/{owner}/{NAMES[x // 2 % 3]}"
        if kind in ("unwish", "cool"):
            self.wishes.pop(key, None)
            return
        known = self.wishes.get(key)
        if known is None or kind in ("version", "adapter"):
            self.generation += 1
            self.wishes[key] = wish(
                NAMES[x // 2 % 3],
                SIZES[y % 4],
                replicas=(y // 4) % 4,
                owner=owner,
                source="heat" if is_heat else "pin",
                generation=self.generation,
                adapter_digest="d" if kind == "adapter" else "",
            )
        elif kind == "replicas":
            self.wishes[key] = replace(known, replicas=y % 4)
        elif kind == "expire":
            self.wishes[key] = replace(known, expires_at=None if y % 4 == 0 else self.now + y % 30)

    def _trouble(self, kind: str, worker: Troubled, y: int) -> None:
        until = self.now + 1 + y % 20
        if kind == "leave":
            if len(self.workers) > 1:
                del self.workers[worker.name]
        elif kind == "restart":
            worker.new_life(self.now)
        elif kind == "flush":
            worker.flush()
        elif kind == "drain":
            worker.draining = y % 3 > 0
        elif kind == "mood":
            worker.mood, worker.mood_until = MOODS[y % len(MOODS)], until
        elif kind == "cached":
            self._cache(worker, y)
        elif kind == "by_hand":
            seen = PinSeen(owner="carol", tier=Tier.DEVICE, size_tokens=8, held_tokens=8, missing_tokens=0)
            if sum(pin.size_tokens for pin in worker.pins.values()) + 8 <= worker.budget:
                # The controller may have ordered something meanwhile that has no room any more.
                worker.is_honest = False
                worker.pins["by-hand"] = seen
        elif kind == "load":
            worker.work_ms = 100.0 * y
        else:
            name = {"away": "away_until", "lie": "lies_until", "blind": "blind_until", "deaf": "deaf_until"}[
                kind
            ]
            setattr(worker, name, until)

    def _cache(self, worker: Troubled, y: int) -> None:
        """Requests have come by that left some of a prompt, which nobody had pinned there."""
        for each in list(self.wishes.values())[: y % 3]:
            if each.pin_id not in worker.pins:
                worker.cached[each.pin_id] = min(y, size_tokens(each.version, worker.page_size))

    # Time.

    def _pass_time(self, by_s: float, salt: int) -> None:
        self.now += by_s
        for call in [call for call in self.calls if call.due <= self.now]:
            self.calls.remove(call)
            self._arrive(call)
        for worker in self.workers.values():
            worker.end_pins(self.now)
        self._step(salt)

    def _arrive(self, call: Call) -> None:
        """A call comes to its worker, and its answer back."""
        action, mood = call.action, call.mood
        worker = self.workers.get(action.endpoint)
        if worker is None or worker.incarnation != action.incarnation:
            self._tell(call, "the worker is gone")
            return
        if mood == "refuses":
            self._tell(call, "no")
            return
        if mood == "late":
            worker.is_honest = False  # there may be no room any more, for what was ordered since
        problem = ""
        if isinstance(action, Unpin):
            worker.perform(action)
        else:
            problem = self._warm(worker, action, is_half=mood == "half")
        if mood == "silent":
            self.calls.append(replace(call, due=math.inf))
        else:
            self._tell(call, problem)

    def _warm(self, worker: Troubled, action: Warm, *, is_half: bool) -> str:
        of = action.wish
        if worker.refuses(of):
            assert not worker.is_honest, f"{worker} was asked for more than its budget: {of}"
            self.happened["refused"] += 1
            return "over the budget"
        worker.pin(of)
        if not is_half:
            return ""
        pin = worker.pins[of.pin_id]
        worker.pins[of.pin_id] = replace(pin, held_tokens=2, missing_tokens=pin.size_tokens - 2)
        worker.cached[of.pin_id] = 2
        return "it broke half-way"

    def _tell(self, call: Call, problem: str) -> None:
        action = call.action
        if not call.is_over:
            self._note_end(action, problem)
        self.controller.ended(action.number, problem, self.now)

    def _note_end(self, action: Action, problem: str) -> None:
        kind = "unsure" if problem else ("there" if isinstance(action, Warm) else "gone")
        size, owner = 0, ""
        worker = self.workers.get(action.endpoint)
        if isinstance(action, Warm) and worker is not None:
            size, owner = size_tokens(action.wish.version, worker.page_size), action.wish.owner
        key = (action.endpoint, action.incarnation, pin_of(action))
        self.ended[key] = Ended(self.now, kind, size, owner)

    def _step(self, salt: int) -> None:
        seen = [worker.observed(self.now, salt + i) for i, worker in enumerate(self.workers.values())]
        for call in self.calls:
            if not call.is_over and self.now - call.ordered_at >= call.limit_s:
                call.is_over = True
                self._note_end(call.action, "no answer")
        self.calls = [call for call in self.calls if not call.is_over or call.due < math.inf]
        wishes = self.live()
        orders = self.controller.step(self.now, list(self.wishes.values()) if self.is_known else None, seen)
        if not self.is_known:
            assert not orders
        waited_for = [call.action for call in self.calls if not call.is_over]
        check_orders(orders, wishes, seen, waited_for, self.ended, CONFIG)
        for action in orders:
            self._send(action)

    def _send(self, action: Action) -> None:
        worker = self.workers[action.endpoint]
        self.happened[type(action).__name__] += 1
        mood = worker.mood if self.now < worker.mood_until else "well"
        delay = {"slow": 3.5, "late": CONFIG.warm_timeout_s + 5.0, "lost": math.inf}.get(mood, 0.5)
        self.calls.append(Call(action, self.now, self.now + delay, mood))

    # The end of all troubles.

    def calm(self) -> None:
        """Nothing goes wrong any more: within ``CALM_STEPS`` all is as wished, and then nothing is ordered any more."""
        self.is_known = True
        for worker in self.workers.values():
            worker.mood = "well"
            worker.lies_until = worker.blind_until = worker.deaf_until = worker.away_until = 0.0
        quiet = 0
        for step in range(CALM_STEPS):
            before = self.happened["Warm"] + self.happened["Unpin"]
            self._pass_time(1.0, step)
            quiet = quiet + 1 if self.happened["Warm"] + self.happened["Unpin"] == before else 0
            if quiet >= QUIET_STEPS:
                break
        else:
            raise AssertionError("it goes on and on")
        self.happened["calm"] += 1
        check_calm(self.live(), list(self.workers.values()))

    def live(self) -> list[Wish]:
        """What is wished now."""
        return [w for w in self.wishes.values() if w.expires_at is None or self.now < w.expires_at]
