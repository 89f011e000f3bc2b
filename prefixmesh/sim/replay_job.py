"""One request of a replay on its way, and who hears of it."""

from collections.abc import Sequence
from typing import Protocol

from prefixmesh.ids import Fingerprint
from prefixmesh.sim.replay_cache import Change
from prefixmesh.sim.workload import WorkloadRequest


class Job:
    """One request on its way, and what has become of it. Times are seconds of the simulation."""

    __slots__ = (
        "arrived_at",
        "device_tokens",
        "ended_at",
        "first_token_at",
        "host_tokens",
        "left_names",
        "locked",
        "names",
        "number",
        "private_blocks",
        "request",
        "uncached_tokens",
        "worker",
    )

    def __init__(
        self,
        number: int,
        request: WorkloadRequest,
        names: Sequence[Fingerprint],
        left_names: Sequence[Fingerprint],
    ) -> None:
        self.number = number
        self.request = request
        self.names = names
        self.left_names = left_names
        """Of the whole blocks that prompt and answer fill together; none where the answer leaves nothing."""

        self.worker = 0
        self.arrived_at = self.first_token_at = self.ended_at = 0.0
        self.device_tokens = self.host_tokens = 0
        """Tokens of the prompt that were found, and brought back from the host."""

        self.uncached_tokens = request.input_length
        """To be computed: expected until it begins."""

        self.locked: Sequence[Fingerprint] = ()
        """Blocks that it uses and shares, and the number of those that only it has, while it runs. Where caches change as requests are sent
        nothing is really locked."""

        self.private_blocks = 0

    @property
    def cached_tokens(self) -> int:
        """Found on either tier and used."""
        return self.device_tokens + self.host_tokens


class Listener(Protocol):
    """Who hears of what happens to requests at a worker."""

    def begun(self, job: Job) -> None:
        """Its prefill begins: what it found is known."""
        ...

    def first_token(self, job: Job) -> None:
        """Its prefill is over."""
        ...

    def ended(self, job: Job) -> None:
        """It has its answer."""
        ...

    def changed(self, worker: int, changes: Sequence[Change]) -> None:
        """Blocks came to a worker's cache, and others went."""
        ...
