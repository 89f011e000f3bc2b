"""Who runs: the admitted requests, in order of admission, and by what they do. Pure; a record, the scheduler decides.

Every step asks who decodes and who prefills, so that is kept and not looked for. Whoever waits for KV from the host has been admitted, and
takes part in no step before enough of that has come.
"""

from collections.abc import Collection, Iterator
from itertools import chain

from prefixmesh.worker.request import Phase, Request


class RunningBatch:
    """The admitted requests. Every method is O(1) but where it says otherwise."""

    def __init__(self) -> None:
        # Dictionaries for their order and their removal in O(1); requests are compared by identity.
        self._all: dict[Request, None] = {}
        self._loading: dict[Request, None] = {}
        self._prefilling: dict[Request, None] = {}
        self._decoding: dict[Request, None] = {}

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._all)

    @property
    def loading(self) -> Collection[Request]:
        """Those that wait for KV, in order of admission."""
        return self._loading.keys()

    @property
    def prefilling(self) -> Collection[Request]:
        """Those whose known tokens are not all computed and that wait for nothing, in the order in which that began."""
        return self._prefilling.keys()

    def uncomputed(self) -> Iterator[Request]:
        """All whose known tokens are not all computed. O(them)."""
        return chain(self._prefilling, self._loading)

    @property
    def decoding(self) -> Collection[Request]:
        """Those that get one token a step, in the order in which they began to."""
        return self._decoding.keys()

    def add(self, request: Request) -> None:
        """Admit a request: it prefills, at once or when it has been loaded."""
        request.phase = Phase.PREFILLING
        self._all[request] = None
        (self._prefilling if request.load is None else self._loading)[request] = None

    def start_prefilling(self, request: Request) -> None:
        """It waits for KV no longer; nothing for one that does not wait."""
        if request in self._loading:
            del self._loading[request]
            self._prefilling[request] = None

    def start_decoding(self, request: Request) -> None:
        """Its known tokens are all computed."""
        request.phase = Phase.DECODING
        del self._prefilling[request]
        self._decoding[request] = None

    def remove(self, request: Request) -> None:
        """Take a request out, whatever it did; its next phase is the caller's to set."""
        del self._all[request]
        self._loading.pop(request, None)
        self._prefilling.pop(request, None)
        self._decoding.pop(request, None)
