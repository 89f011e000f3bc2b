"""The part of the ``Router`` service that is about pins: wished for, asked about, given up.

Answers come from what this router knows of the state's store and of the workers; only a change waits for the store. Nothing here has a
worker do anything: what becomes of a wish is ``pin_keeper``'s business.
"""

import logging
from typing import Final

from prefixmesh.errors import BudgetError, UnavailableError, UnsupportedError
from prefixmesh.proto.v1 import router_pb2 as pb
from prefixmesh.router.adapter_finder import AdapterFinder
from prefixmesh.router.pins.pin_keeper import PinKeeper
from prefixmesh.router.pins.pin_prompts import PinPrompts
from prefixmesh.router.pins.pin_roster import KnownPin, PinRoster
from prefixmesh.router.pins.pin_rules import (
    MAX_PINS,
    MAX_PINS_PER_OWNER,
    checked,
    listed_owner,
    named,
    not_found,
)
from prefixmesh.router.pins.pin_status import status_of
from prefixmesh.router.pins.records import (
    NewerRecordError,
    PinName,
    PinRecord,
    decode,
    encode,
    is_same,
    key_of,
    renewed,
)
from prefixmesh.router.pins.store_clock import StoreClock
from prefixmesh.router.state_store import ABSENT, Entry, StateStore
from prefixmesh.rpc.identity import ApiKeys, Caller, identify
from prefixmesh.rpc.status import AnyContext
from prefixmesh.tokens import count

_log = logging.getLogger(__name__)

_MS_PER_S: Final = 1000.0

MAX_ATTEMPTS: Final = 8
"""Of a write that somebody else's came before: operators who write one pin at the same time are few."""


class PinService:
    """Serves the calls about pins."""

    def __init__(
        self,
        *,
        roster: PinRoster,
        prompts: PinPrompts,
        adapters: AdapterFinder,
        store: StateStore,
        keys: ApiKeys | None,
        clock: StoreClock,
        keeper: PinKeeper,
    ) -> None:
        self._clock = clock
        self._roster = roster
        self._prompts = prompts
        self._adapters = adapters
        self._store = store
        self._keys = keys
        self._keeper = keeper

    async def PutPin(  # noqa: N802  the service's own name
        self, message: pb.PutPinRequest, context: AnyContext
    ) -> pb.PutPinResponse:
        """Wish for a pin, or for another one under its name; the same again only begins its time anew."""
        spec = checked(self._caller(context), message.spec)
        await self._adapters.find(spec.adapter)
        tokens = await self._prompts.tokens(spec)
        self._check_counts(spec)
        unix_ms = round(_MS_PER_S * await self._store.now())
        for _ in range(MAX_ATTEMPTS):
            entry = await self._store.get(key_of(spec))
            before = None if entry is None else _read(entry, unix_ms)
            record = renewed(before, spec, unix_ms)
            is_news = before is None or not is_same(before.spec, spec)
            version = entry.version if entry else ABSENT
            if is_news or spec.ttl_ms:
                written = await self._store.put(key_of(spec), encode(record), expect=version)
                if written is None:
                    continue
                version = written
            pin = self._roster.take(record, version, tokens)
            if is_news:
                _log_put(pin)
            return pb.PutPinResponse(pin=self._status(pin, with_prompt=False), changed=is_news)
        raise UnavailableError(f"the pin {spec.name!r} is being changed by others all the time; try again")

    async def GetPin(  # noqa: N802  the service's own name
        self, message: pb.GetPinRequest, context: AnyContext
    ) -> pb.GetPinResponse:
        """One pin, with its prompt, and how far it is."""
        name = named(self._caller(context), message.owner, message.name)
        pin = self._roster.get(name)
        if pin is None:
            raise not_found(name)
        return pb.GetPinResponse(pin=self._status(pin, with_prompt=True))

    async def ListPins(  # noqa: N802  the service's own name
        self, message: pb.ListPinsRequest, context: AnyContext
    ) -> pb.ListPinsResponse:
        """An owner's pins, or everybody's, without their prompts."""
        caller = self._caller(context)
        owner = listed_owner(caller, message.owner)
        pins = [self._status(pin, with_prompt=False) for pin in self._roster.pins(owner)]
        return pb.ListPinsResponse(
            pins=pins,
            acting=self._keeper.is_acting,
            actions=self._keeper.actions.counts if caller.is_admin else {},
        )

    async def RemovePin(  # noqa: N802  the service's own name
        self, message: pb.RemovePinRequest, context: AnyContext
    ) -> pb.RemovePinResponse:
        """Wish for a pin no more. Workers let go of it at once."""
        name = named(self._caller(context), message.owner, message.name)
        known = self._roster.get(name)
        removed = await self._store.delete(name.key)
        if known is not None:
            self._roster.drop(known)
        if removed:
            _log.info("pin_removed owner=%r name=%r", *name)
        return pb.RemovePinResponse(removed=removed)

    def _caller(self, context: AnyContext) -> Caller:
        return identify(context.invocation_metadata(), self._keys)

    def _check_counts(self, spec: pb.PinSpec) -> None:
        if self._roster.get(PinName(spec.owner, spec.name)) is not None:
            return
        for owned, most, whose in (
            (self._roster.count_of(spec.owner), MAX_PINS_PER_OWNER, f"{spec.owner!r} has"),
            (len(self._roster), MAX_PINS, "all owners together have"),
        ):
            if owned >= most:
                raise BudgetError(f"{whose} {owned} pins, and {most} are the most")

    def _status(self, pin: KnownPin, *, with_prompt: bool) -> pb.PinStatus:
        return status_of(pin, self._keeper.status(pin), self._clock.unix_ms, with_prompt=with_prompt)


def _read(entry: Entry, unix_ms: int) -> PinRecord | None:
    """The pin that is there; None for one that is over, and for what is none."""
    try:
        record = decode(entry.value)
    except NewerRecordError as error:
        raise UnsupportedError(f"a pin of this name was written by a later version: {error}") from error
    except ValueError:
        return None
    return None if record.is_over(unix_ms) else record


def _log_put(pin: KnownPin) -> None:
    """Never the prompt."""
    record = pin.record
    _log.info(
        "pin_put owner=%r name=%r tokens=%d replicas=%d tier=%d public=%s generation=%d ttl_ms=%d",
        *record.name,
        count(pin.tokens or b""),
        record.spec.replicas,
        record.spec.tier,
        record.spec.public,
        record.generation,
        record.spec.ttl_ms,
    )
