"""The pin controller: what is wished and what is seen go in, what is to be done comes out. Pure: time is passed in.

One step, in this order:

1. what has had its time, and what was meant for lives that are over, has ended;
2. how every wish stands (``standing``);
3. what nobody wishes is let go: strays, replicas beyond those that are wanted, old versions that nothing is gained from (``rolling``);
4. operators' pins, those first that nobody holds, then heat: what is missing is brought again, and workers are chosen for what is
   short (``choice``), as long as moves may be ordered.

Observed state may lie, be late, or forget: nothing is ordered because of what was ordered before, only because of what is seen and what is under
way. So a step may be skipped, repeated, or be the first of another controller that takes over. Budgets hold by what workers say they have and what is
under way together (``site``); the worker itself is the last to refuse.
"""

from collections.abc import Iterable, Sequence
from typing import Final

from prefixmesh.router.pins.choice import Chooser
from prefixmesh.router.pins.config import PinControllerConfig
from prefixmesh.router.pins.failures import Memory
from prefixmesh.router.pins.rolling import Rolling
from prefixmesh.router.pins.scene import HEAT_SOURCE, Scene
from prefixmesh.router.pins.site import Site
from prefixmesh.router.pins.sizes import has_prompt, proof_tokens
from prefixmesh.router.pins.sources import sources_for
from prefixmesh.router.pins.standing import Standing, Standings
from prefixmesh.router.pins.status import status_of
from prefixmesh.router.pins.under_way import UnderWay
from prefixmesh.router.pins.wishes import Action, Unpin, Warm, Wish, WishStatus, WorkerSeen

NO_ANSWER: Final = "no answer within {:g} s"
NOT_WHOLE: Final = "it said that it was done, and lacks some of it"


class PinController:
    """Keeps a fleet's pins as they are wished. Not thread-safe.

    * each step: ``step``, whose actions are to be performed, each told of by ``ended``, once
    * look at: ``status``, ``under_way``
    """

    def __init__(self, config: PinControllerConfig | None = None) -> None:
        self.config = config = config or PinControllerConfig()
        self.under_way = UnderWay(config)
        """For looking at."""
        self._memory = Memory(config.first_pause_s, config.longest_pause_s)
        self._standings = Standings(config, self._memory)
        self._rolling = Rolling(config.longest_pause_s)
        self._chooser = Chooser(self._standings, self._memory, self._rolling, config.max_moves_per_worker)
        self._scene = Scene(0.0, (), {}, self.under_way)

    def __repr__(self) -> str:
        return f"<PinController {len(self._scene.wishes)} wishes, {len(self.under_way)} actions under way>"

    def step(
        self,
        now: float,
        wishes: Iterable[Wish] | None,
        workers: Iterable[WorkerSeen],
        *,
        heat_is_known: bool = True,
        acts: bool = True,
    ) -> Sequence[Action]:
        """What is to be done now, in order; it counts as under way from here on.

        ``acts``: false only looks, so that ``status`` can tell. ``wishes``: all of them; None while they are not known, when nothing is done. ``heat_is_known``: false lets no pin of heat go for want
        of a wish, as for a controller that has only begun to measure. ``workers``: all that the fleet has, one of a kind; one that is left out
        is no more. O(pins + wishes), and O(workers) for each wish that is short.
        """
        seen = {worker.endpoint: worker for worker in workers}
        self._end_overdue(now)
        self.under_way.observe(seen)
        self._memory.prune({name: worker.incarnation for name, worker in seen.items()}, now)
        self._standings.observe(seen, now)
        if wishes is None:
            return []
        self._scene = scene = Scene(now, wishes, seen, self.under_way)
        standings = self._standings.judge_all(scene)
        self._rolling.observe(standings, scene)
        if not acts:
            return []
        orders: list[Action] = []
        self._let_go(standings, scene, orders, heat_is_known=heat_is_known)
        for standing in sorted(standings, key=_urgency):
            if not self.under_way.can_move:
                break
            self._bring(standing, scene, orders)
        return orders

    def ended(self, number: int, problem: str, now: float) -> None:
        """An action came to its end: well where ``problem`` is empty. One that is not under way (any more) is passed over. O(1)."""
        action = self.under_way.end(number, now, well=not problem)
        if action is None:
            return
        memory = self._memory
        if isinstance(action, Warm):
            pin_id, failures = action.wish.pin_id, memory.warms
        else:
            pin_id, failures = action.pin_id, memory.unpins
        life = (action.endpoint, action.incarnation, pin_id)
        if problem:
            failures.failed(*life, problem, now)
            return
        failures.succeeded(*life)
        if failures is memory.warms:
            memory.vain.failed(*life, NOT_WHOLE, now)

    def status(self, wish: Wish) -> WishStatus:
        """How far a wish is, as of the last step, and what has been ordered since. O(workers)."""
        standing = self._standings.judge(wish, self._scene)
        return status_of(standing, self._scene, self._memory)

    # Ends.

    def _end_overdue(self, now: float) -> None:
        for action in self.under_way.overdue(now):
            limit = self.config.warm_timeout_s if isinstance(action, Warm) else self.config.unpin_timeout_s
            self.ended(action.number, NO_ANSWER.format(limit), now)

    # Letting go.

    def _let_go(
        self, standings: Sequence[Standing], scene: Scene, orders: list[Action], *, heat_is_known: bool
    ) -> None:
        for site, pin_id in scene.stray:
            if heat_is_known or not pin_id.startswith(HEAT_SOURCE):
                self._release(site, pin_id, scene.now, orders)
        for standing in standings:
            if standing.is_whole:
                for site in _beyond(standing):
                    self._release(site, standing.wish.pin_id, scene.now, orders)
            for site, pin_id in self._rolling.superfluous(standing, scene):
                self._release(site, pin_id, scene.now, orders)

    def _release(self, site: Site, pin_id: str, now: float, orders: list[Action]) -> bool:
        """Whether the pin is leaving, or is gone."""
        seen = site.seen
        if pin_id in site.leaving:
            return True
        if not (seen.usable or seen.draining) or pin_id not in site.pins or not self.under_way.can_release:
            return False
        if self._memory.unpins.is_paused(seen.endpoint, seen.incarnation, pin_id, now):
            return False
        action = Unpin(
            number=self.under_way.next_number(),
            endpoint=seen.endpoint,
            incarnation=seen.incarnation,
            pin_id=pin_id,
        )
        self.under_way.begin(action, now)
        site.leaving.add(pin_id)
        orders.append(action)
        return True

    # Bringing.

    def _bring(self, standing: Standing, scene: Scene, orders: list[Action]) -> None:
        for site in standing.again:
            self._warm(standing.wish, site, scene, orders)
        # Not more than could be ordered at all: a wish of all workers looks for the others in later steps.
        for _ in range(min(standing.short, self.config.max_moves)):
            choice = self._chooser.choose(standing, scene)
            if choice is None:
                self._give_up_old(standing, scene, orders)
                return
            self._make_room(standing.wish, choice.site, choice.must_go, scene, orders)
            if not choice.must_go:
                self._warm(standing.wish, choice.site, scene, orders)
            standing.coming.append(choice.site)
            self._reserve(standing.wish, choice.site)
            if not self.under_way.can_move:
                return

    def _warm(self, wish: Wish, site: Site, scene: Scene, orders: list[Action]) -> None:
        """Order it, where a move is free."""
        seen = site.seen
        if not (self.under_way.can_move and self.under_way.can_move_at(seen.endpoint)):
            return
        sources = sources_for(wish, site, scene)
        # Who has a part may be at the rest of it: to begin now would be to compute that rest as well.
        whole = proof_tokens(wish.version, seen.page_size, self.config.block_size)
        is_whole = bool(sources) and sources[0].tokens >= whole
        if not is_whole and self._is_being_computed(wish, site, scene):
            return
        action = Warm(
            number=self.under_way.next_number(),
            endpoint=seen.endpoint,
            incarnation=seen.incarnation,
            wish=wish,
            sources=sources,
        )
        self.under_way.begin(action, scene.now)
        site.warming[wish.pin_id] = action
        orders.append(action)

    def _is_being_computed(self, wish: Wish, site: Site, scene: Scene) -> bool:
        """Whether another worker will soon have what ``site`` could copy. O(workers)."""
        layout = site.seen.kv_layout
        soon = scene.now - self.config.first_alone_s
        return bool(layout and has_prompt(wish.version)) and any(
            other.seen.kv_layout == layout
            and other.seen.usable
            and self.under_way.since(other.warming[wish.pin_id]) > soon
            for other in scene.sites
            if wish.pin_id in other.warming
        )

    def _reserve(self, wish: Wish, site: Site) -> None:
        """Nobody else takes that room in this step."""
        site.take(wish.tier, wish.owner, site.size(wish))
        site.moves += 1
        site.chosen.add(wish.pin_id)

    def _make_room(
        self, wish: Wish, site: Site, must_go: Sequence[str], scene: Scene, orders: list[Action]
    ) -> None:
        for pin_id in must_go:
            if self._release(site, pin_id, scene.now, orders) and pin_id.startswith(f"{wish.key}@"):
                self._rolling.made_room(wish.key, site, scene.now)

    def _give_up_old(self, standing: Standing, scene: Scene, orders: list[Action]) -> None:
        for site, pin_id in self._rolling.left_over(standing, scene):
            self._release(site, pin_id, scene.now, orders)


def _urgency(standing: Standing) -> tuple[bool, bool, float, str]:
    """Operators' pins before heat; what nobody holds before what some do, and those who lack the larger part first."""
    wish = standing.wish
    share = len(standing.held) / standing.wanted if standing.wanted else 1.0
    return (wish.source != "pin", bool(standing.held), share, wish.key)


def _beyond(standing: Standing) -> list[Site]:
    """Whose replicas are too many: those that do not hold, and of the others the second ones of a host first. As long as the same workers hold, the
    same are kept."""
    if len(standing.held) == standing.wanted and not standing.coming and not standing.doubtful:
        return []
    hosts: set[str] = set()
    first: list[Site] = []
    second: list[Site] = []
    for site in standing.held:
        (second if site.seen.host in hosts else first).append(site)
        hosts.add(site.seen.host)
    kept = (first + second)[: standing.wanted]
    return [site for site in (*standing.held, *standing.coming, *standing.doubtful) if site not in kept]
