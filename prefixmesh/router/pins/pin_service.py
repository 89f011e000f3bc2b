"""The part of the ``Router`` service that is about pins: wished for, asked about, given up.

Answers come from what this router knows of the state's store and of the workers; only a change waits for the store. Nothing here has a
worker do anything: what becomes of a wish is ``pin_keeper``'s business.
"""

import asyncio
import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Final

from prefixmesh.errors import BudgetError, UnavailableError, UnsupportedError
from prefixmesh.proto.v1 import router_pb2 as pb
from prefixmesh.router.adapter_finder import AdapterFinder
from prefixmesh.router.pins.budgets import owner_use, why_it_does_not_fit
from prefixmesh.router.pins.paced_turns import PacedTurns
from prefixmesh.router.pins.pin_keeper import PinKeeper
from prefixmesh.router.pins.pin_prompts import PinPrompts, wish_of
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
from prefixmesh.router.pins.wishes import PinVersion, Wish
from prefixmesh.router.state_store import ABSENT, Entry, StateStore
from prefixmesh.rpc.identity import ApiKeys, Caller, identify
from prefixmesh.rpc.status import AnyContext
from prefixmesh.tokens import count

_log = logging.getLogger(__name__)

_MS_PER_S: Final = 1000.0

FIRST_NEWS_S: Final = 2.0
"""How long the first wish after a router's start waits to hear what workers may pin. Where one does not tell, the wish is taken all the
same, and waits for its room."""

STATUSES_AT_A_TIME: Final = 64
"""Told of before others on the loop have their turn."""

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
        self._turns = PacedTurns()
        self._coming: dict[str, Wish] = {}
        """Wishes that were admitted and are being written, by key."""

    async def PutPin(  # noqa: N802  the service's own name
        self, message: pb.PutPinRequest, context: AnyContext
    ) -> pb.PutPinResponse:
        """Wish for a pin, or for another one under its name; the same again only begins its time anew."""
        spec = checked(self._caller(context), message.spec)
        digest = await self._adapters.find(spec.adapter)
        await self._keeper.hear_of_all(FIRST_NEWS_S)
        with ExitStack() as admission:
            async with self._turns.turn():
                tokens = await self._prompts.tokens(spec)
                version = self._prompts.version(spec, tokens, digest)
                admission.enter_context(self._admitted(spec, version))
            return await self._write(spec, tokens)

    async def _write(self, spec: pb.PinSpec, tokens: bytes) -> pb.PutPinResponse:
        """Remember a wish, unless it is known already."""
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
        answer = pb.ListPinsResponse()
        for number, pin in enumerate(self._roster.pins(owner)):
            if number % STATUSES_AT_A_TIME == 0:
                await asyncio.sleep(0)
            answer.pins.append(self._status(pin, with_prompt=False))
        answer.budgets.extend(self._budgets(owner))
        answer.acting = self._keeper.is_acting
        if caller.is_admin:
            answer.actions.update(self._keeper.actions.counts)
        return answer

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

    @contextmanager
    def _admitted(self, spec: pb.PinSpec, version: PinVersion) -> Iterator[None]:
        """Until the block is left the wish counts, although the store does not know it yet: of a thousand at once each sees the others.

        Raises BudgetError with the sums. O(pins * workers).
        """
        name, wish = PinName(spec.owner, spec.name), wish_of(spec, version)
        known = self._roster.get(name)
        if known is None or not is_same(known.record.spec, spec):
            self._check_counts(name, is_new=known is None)
            others = {one.key: one for one in self._roster.wishes(self._clock.unix_ms)} | self._coming
            if why := why_it_does_not_fit(wish, others.values(), self._keeper.workers):
                raise BudgetError(why)
        self._coming[wish.key] = wish
        try:
            yield
        finally:
            if self._coming.get(wish.key) is wish:
                del self._coming[wish.key]

    def _check_counts(self, name: PinName, *, is_new: bool) -> None:
        coming = [
            wish for wish in self._coming.values() if self._roster.get(PinName(wish.owner, wish.name)) is None
        ]
        owned = self._roster.count_of(name.owner) + sum(wish.owner == name.owner for wish in coming)
        for there, most, whose in (
            (owned, MAX_PINS_PER_OWNER, f"{name.owner!r} has"),
            (len(self._roster) + len(coming), MAX_PINS, "all owners together have"),
        ):
            if is_new and there >= most:
                raise BudgetError(f"{whose} {there} pins, and {most} are the most")

    def _budgets(self, owner: str | None) -> Iterator[pb.PinBudgetUse]:
        owners = {pin.record.spec.owner for pin in self._roster.pins()} if owner is None else {owner}
        for one in sorted(owners):
            use = owner_use(one, self._keeper.workers)
            yield pb.PinBudgetUse(
                owner=one, charged_tokens=use.charged_tokens, budget_tokens=use.budget_tokens
            )

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
