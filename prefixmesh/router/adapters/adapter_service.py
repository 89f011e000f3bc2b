"""The part of the ``Router`` service that is about adapters of the whole fleet: wished for, asked about, taken back.

Answers come from what this router knows of the state's store and of the workers; only a change waits for the store. Nothing here has a
worker do anything: what becomes of a wish is ``adapter_keeper``'s business. For administrators; on loopback without API keys, for everybody.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable
from pathlib import PurePosixPath
from typing import Final

from prefixmesh.adapter_names import NAME_RULE, is_adapter_name
from prefixmesh.errors import (
    AccessDeniedError,
    BudgetError,
    InvalidRequestError,
    UnavailableError,
    UnsupportedError,
)
from prefixmesh.proto.v1 import router_pb2 as pb
from prefixmesh.router.adapters.adapter_keeper import AdapterKeeper
from prefixmesh.router.adapters.adapter_roster import AdapterRoster
from prefixmesh.router.adapters.adapter_status import Sighting, of_their_own, shortened, sight, status_of
from prefixmesh.router.adapters.records import ADAPTERS, AdapterRecord, decode, encode, put_again, removed
from prefixmesh.router.pins.records import NewerRecordError
from prefixmesh.router.registry import WorkerRegistry
from prefixmesh.router.state_store import ABSENT, Entry, StateStore
from prefixmesh.rpc.identity import ApiKeys, identify
from prefixmesh.rpc.status import AnyContext

_log = logging.getLogger(__name__)

MAX_ADAPTERS: Final = 1024
"""Wished for at a time: as many names as a worker knows."""

MAX_REMEMBERED: Final = 4 * MAX_ADAPTERS
"""With those that were taken back within the last day: who puts and removes names in a loop is told so."""

MAX_PATH_BYTES: Final = 1024
"""Of a folder below the adapter root."""

MAX_ATTEMPTS: Final = 8
"""Of a write that somebody else's came before: operators who write one name at the same time are few."""

MAX_ROWS: Final = 65_536
"""Names by workers that one list tells in full: some 10 MiB, of the 64 that a message may have."""

MAX_LONG_ROWS: Final = 16
"""Workers that a longer list tells of for each name: of those that lack it. Asked for alone, a name is told in full."""

_MS_PER_S: Final = 1000.0


class AdapterService:
    """Serves the calls about adapters."""

    def __init__(
        self,
        *,
        registry: WorkerRegistry,
        roster: AdapterRoster,
        keeper: AdapterKeeper,
        store: StateStore,
        keys: ApiKeys | None,
        now: Callable[[], float],
    ) -> None:
        """``now`` is the keeper's clock."""
        self._registry = registry
        self._roster = roster
        self._keeper = keeper
        self._store = store
        self._keys = keys
        self._now = now

    async def PutAdapter(  # noqa: N802  the service's own name
        self, message: pb.PutAdapterRequest, context: AnyContext
    ) -> pb.PutAdapterResponse:
        """Wish that every worker know an adapter, or load it anew."""
        self._admit(context, "load adapters")
        spec = _checked(message.spec)
        for _ in range(MAX_ATTEMPTS):
            entry = await self._store.get(ADAPTERS + spec.name)
            before = None if entry is None else _read(entry)
            if before is None or before.is_removed:
                self._check_counts(is_new=before is None)
            record = put_again(before, spec)
            version = await self._store.put(
                record.key, encode(record), expect=entry.version if entry else ABSENT
            )
            if version is not None:
                self._roster.take(record, version)
                _log.info(
                    "adapter_put name=%s path=%r pinned=%s generation=%d",
                    spec.name,
                    spec.path,
                    spec.pinned,
                    record.generation,
                )
                return pb.PutAdapterResponse(adapter=self._status(record))
        raise _contended(spec.name)

    async def ListAdapters(  # noqa: N802  the service's own name
        self, message: pb.ListFleetAdaptersRequest, context: AnyContext
    ) -> pb.ListFleetAdaptersResponse:
        """Names of the store and how far each worker is with them, and what workers have of their own; sorted by name."""
        self._admit(context, "list the fleet's adapters")
        self._keeper.controller.take_over(self._roster.records)
        workers, records = sight(self._registry), self._roster.records
        own = {name for _, seen in workers if seen for name in seen.adapters if name not in records}
        names = sorted(name for name in records.keys() | own if message.name in ("", name))
        answer = pb.ListFleetAdaptersResponse(acting=self._keeper.is_acting)
        is_long = len(names) * len(workers) > MAX_ROWS
        for name in names:
            await asyncio.sleep(0)  # of a large fleet each takes a millisecond
            record = records.get(name)
            told = of_their_own(name, workers) if record is None else self._told(record, workers)
            if told.workers or record is None or not record.is_removed:
                answer.adapters.append(shortened(told, MAX_LONG_ROWS) if is_long else told)
        return answer

    async def RemoveAdapter(  # noqa: N802  the service's own name
        self, message: pb.RemoveAdapterRequest, context: AnyContext
    ) -> pb.RemoveAdapterResponse:
        """Have every worker forget an adapter that was put."""
        self._admit(context, "unload adapters")
        _check_name("name", message.name)
        unix_ms = round(_MS_PER_S * await self._store.now())
        for _ in range(MAX_ATTEMPTS):
            entry = await self._store.get(ADAPTERS + message.name)
            before = None if entry is None else _read(entry)
            if entry is None or before is None or before.is_removed:
                return pb.RemoveAdapterResponse(removed=False)
            record = removed(before, unix_ms)
            version = await self._store.put(record.key, encode(record), expect=entry.version)
            if version is not None:
                self._roster.take(record, version)
                _log.info("adapter_removed name=%s generation=%d", message.name, record.generation)
                return pb.RemoveAdapterResponse(removed=True)
        raise _contended(message.name)

    def _admit(self, context: AnyContext, what: str) -> None:
        if not identify(context.invocation_metadata(), self._keys).is_admin:
            raise AccessDeniedError(f"only an administrator's key may {what}")

    def _check_counts(self, *, is_new: bool) -> None:
        records = self._roster.records
        wished = sum(not record.is_removed for record in records.values())
        if wished >= MAX_ADAPTERS:
            raise BudgetError(
                f"{wished} adapters are wished for, and {MAX_ADAPTERS} are the most: unload one first"
            )
        if is_new and len(records) >= MAX_REMEMBERED:
            raise BudgetError(
                f"{len(records)} names were put within a day, and {MAX_REMEMBERED} are the most; put one of them again"
            )

    def _status(self, record: AdapterRecord) -> pb.FleetAdapter:
        self._keeper.controller.take_over(self._roster.records)  # what was put a moment ago is no longer held
        return self._told(record, sight(self._registry))

    def _told(self, record: AdapterRecord, workers: Iterable[Sighting]) -> pb.FleetAdapter:
        return status_of(record, self._keeper.controller, workers, self._now())


def _checked(spec: pb.AdapterSpec) -> pb.AdapterSpec:
    """Raises InvalidRequestError for what no worker would take."""
    _check_name("spec.name", spec.name)
    size = len(spec.path.encode())
    if not 1 <= size <= MAX_PATH_BYTES:
        raise InvalidRequestError("spec.path", f"must be 1 to {MAX_PATH_BYTES} bytes, got {size}")
    path = PurePosixPath(spec.path)
    if path.is_absolute() or ".." in path.parts or "\0" in spec.path:
        raise InvalidRequestError(
            "spec.path",
            f"must lead to a folder below each worker's adapter root, without '..', got {spec.path[:80]!r}",
        )
    return spec


def _check_name(field: str, name: str) -> None:
    if not is_adapter_name(name):
        raise InvalidRequestError(field, f"must be {NAME_RULE}, got {name[:80]!r}")


def _read(entry: Entry) -> AdapterRecord | None:
    """The adapter that is there; None for what is none, or another's that lies in its place."""
    try:
        record = decode(entry.value)
    except NewerRecordError as error:
        raise UnsupportedError(f"an adapter of this name was put by a later version: {error}") from error
    except ValueError:
        return None
    return record if record.key == entry.key else None


def _contended(name: str) -> UnavailableError:
    return UnavailableError(f"the adapter {name!r} is being changed by others all the time; try again")
