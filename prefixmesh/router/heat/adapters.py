"""Which adapters are asked for more than the workers where they are resident can serve. Pure.

An adapter is no prefix: it takes a place of its own on a worker, and goes when others need the place. So it is wished without tokens, and
nothing has to be let go of: a wish that ends leaves the adapter to its worker.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from prefixmesh.ids import Namespace
from prefixmesh.router.heat.origin import Origin
from prefixmesh.router.heat.targets import Targets, target_of
from prefixmesh.router.pins.wishes import PinVersion

MAX_ADAPTERS: Final = 4096
"""Contents that are counted; what comes when there are so many is not, until a review has dropped those that came least."""

ROOM_SHARE: Final = 0.75
"""As full as a review leaves them."""

_NO_NAMESPACE: Final = Namespace(bytes(16))


@dataclass(slots=True)
class AdapterUse:
    """One adapter's content, and how much it is asked for; sums by a ``DecayClock``."""

    name: str
    """Of the request that came last: a content may have several."""

    digest: str
    born: float
    requests: float = 0.0
    work_ms: float = 0.0
    load: float = 0.0
    """In workers, as of the last review."""

    target: int = 1

    @property
    def version(self) -> PinVersion:
        """As a wish tells it: no tokens, only the adapter."""
        return PinVersion(
            generation=1,
            namespace=_NO_NAMESPACE,
            tokens=b"",
            fingerprints=(),
            adapter=self.name,
            adapter_digest=self.digest,
        )


class AdapterHeat:
    """Adapters by content. Not thread-safe."""

    def __init__(self) -> None:
        self._uses: dict[str, AdapterUse] = {}
        self._targets = Targets()

    def __len__(self) -> int:
        return len(self._uses)

    def __repr__(self) -> str:
        return f"<AdapterHeat {len(self._uses)} of {MAX_ADAPTERS}>"

    def add(self, origin: Origin, weight: float, work_ms: float, now: float) -> None:
        """Count a request in. O(1)."""
        use = self._uses.get(origin.adapter_digest)
        if use is None:
            if len(self._uses) >= MAX_ADAPTERS:
                return
            use = AdapterUse(origin.adapter, origin.adapter_digest, now)
            self._uses[origin.adapter_digest] = use
        use.name = origin.adapter
        use.requests += weight
        use.work_ms += weight * work_ms

    def review(
        self, load_of: Callable[[AdapterUse], float], weight: float, mean_load: float, most: int, now: float
    ) -> list[AdapterUse]:
        """Those that are wanted on several workers, the hottest first; ``weight`` is what a request counts that comes now. O(adapters)."""
        wanted = {}
        for use in self._uses.values():
            use.load = load_of(use)
            wanted[use.digest] = target_of(use.load, use.requests / weight, mean_load, most)
        targets = self._targets.step(wanted, now)
        for use in self._uses.values():
            use.target = min(targets.get(use.digest, 1), most)
        hot = [use for use in self._uses.values() if use.target > 1]
        return sorted(hot, key=lambda use: (-use.load, use.digest))

    def make_room(self, least: float) -> None:
        """Forget who came less than ``least``, and whoever came least where there are too many. O(adapters * log adapters)."""
        ranked = sorted(self._uses.values(), key=lambda use: -use.requests)
        kept = [use for use in ranked[: int(MAX_ADAPTERS * ROOM_SHARE)] if use.requests >= least]
        if len(kept) < len(ranked):
            self._uses = {use.digest: use for use in kept}

    def scale(self, factor: float) -> None:
        """Multiply all sums. O(adapters)."""
        for use in self._uses.values():
            use.requests *= factor
            use.work_ms *= factor

    def uses(self) -> Sequence[AdapterUse]:
        """All that are counted, the hottest first. O(adapters * log adapters)."""
        return sorted(self._uses.values(), key=lambda use: (-use.load, use.digest))
