"""Which pins are wished, as the state's store remembers them, and what workers are to hold for each.

Every router follows the store for as long as it lives, so that all of them know the same pins. While the store is out of reach, they stay
as they are. A pin's tokens are made once, beside the event loop; its namespace again whenever its adapter's name means another content.
"""

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable
from contextlib import aclosing
from typing import Final

from prefixmesh.errors import PrefixmeshError
from prefixmesh.router.pins.pin_prompts import PinPrompts, wish_of
from prefixmesh.router.pins.records import PINS, PinName, PinRecord, decode, is_same, is_same_prompt, name_of
from prefixmesh.router.pins.wishes import PinVersion, Wish
from prefixmesh.router.state_store import StateStore

_log = logging.getLogger(__name__)

RETRY_S: Final = 1.0
"""Between attempts to follow a store that cannot be read."""

NO_TOKENS: Final = "its tokens are being made"


class KnownPin:
    """One pin as a router knows it now."""

    __slots__ = ("is_resolved", "problem", "record", "store_version", "tokens", "version", "wish")

    def __init__(self, record: PinRecord, store_version: int) -> None:
        self.record = record
        self.store_version = store_version
        """Of its entry in the store."""

        self.tokens: bytes | None = None
        self.version: PinVersion | None = None
        """None while it is not known what workers are to hold."""

        self.wish: Wish | None = None
        self.is_resolved = False
        """Whether version and wish are of this record, and not of the one before it."""

        self.problem = NO_TOKENS
        """Why there is no wish; empty where there is one."""


class PinRoster:
    """Keeps the pins of the store, and their wishes. ``start`` it once, ``close`` it at the end."""

    def __init__(
        self,
        store: StateStore,
        prompts: PinPrompts,
        digest_of: Callable[[str], str | None],
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        """``digest_of`` gives the content that an adapter's name means now, None where no ready worker has it; ``on_change`` is called
        whenever there are other wishes."""
        self._store = store
        self._prompts = prompts
        self._digest_of = digest_of
        self._on_change = on_change
        self._pins: dict[PinName, KnownPin] = {}
        self._unread: set[PinName] = set()
        self._of_owner: Counter[str] = Counter()
        self._unbuilt: deque[PinName] = deque()
        self._has_unbuilt = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._public: set[PinName] = set()
        self.is_read = False
        """Whether the store has been read: before that nothing says which pins are not wished."""

    def __len__(self) -> int:
        return len(self._pins)

    def __repr__(self) -> str:
        wished = sum(pin.wish is not None for pin in self._pins.values())
        return f"PinRoster({len(self)} pins, {wished} wished)"

    def start(self) -> None:
        """Follow the store from now on. Nobody waits for it."""
        self._tasks = [
            asyncio.create_task(self._follow(), name="pin-roster"),
            asyncio.create_task(self._build_all(), name="pin-prompts"),
        ]

    async def close(self) -> None:
        """Follow the store no more."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def is_settled(self) -> bool:
        """Whether the store has been read, and it is known of every pin what its tokens are, or why that cannot be. O(pins)."""
        return self.is_read and all(pin.problem != NO_TOKENS for pin in self._pins.values())

    def get(self, name: PinName) -> KnownPin | None:
        """A pin by its name; None when there is none."""
        return self._pins.get(name)

    def pins(self, owner: str | None = None) -> list[KnownPin]:
        """An owner's, or with None everybody's, by name. O(pins)."""
        return [self._pins[name] for name in sorted(self._pins) if owner is None or name.owner == owner]

    def count_of(self, owner: str) -> int:
        """How many pins an owner has. O(1)."""
        return self._of_owner[owner]

    def wishes(self, unix_ms: int) -> list[Wish]:
        """What is wished at this time of the store's clock; equal ones are the same objects. O(pins)."""
        return [
            pin.wish
            for pin in self._pins.values()
            if pin.wish is not None and not pin.record.is_over(unix_ms)
        ]

    def public_versions(self, unix_ms: int) -> list[PinVersion]:
        """What every tenant may match at this time of the store's clock. O(public pins)."""
        pins = (self._pins[name] for name in sorted(self._public))
        return [
            pin.version
            for pin in pins
            if pin.version is not None
            and not pin.record.is_over(unix_ms)
            # Of a pin that has only now become public, what is still known is not.
            and pin.version.namespace == self._prompts.namespace(pin.record.spec, pin.version.adapter_digest)
        ]

    def unresolved(self) -> set[str]:
        """Keys of wishes that there are, and that this router cannot tell now: what workers hold of them is not to be touched. O(pins)."""
        unknown = {name for name, pin in self._pins.items() if pin.wish is None}
        return {wish_key(name) for name in unknown | self._unread}

    def over(self, unix_ms: int) -> list[KnownPin]:
        """Pins that have ended by themselves at this time of the store's clock. O(pins)."""
        return [pin for pin in self._pins.values() if pin.record.is_over(unix_ms)]

    def take(self, record: PinRecord, store_version: int, tokens: bytes) -> KnownPin:
        """A pin is this, as of a write of ours, unless something newer is known. O(prompt)."""
        known = self._pins.get(record.name)
        if known is not None and known.store_version >= store_version:
            if known.tokens is None and known.record == record:  # the store's news of it came first
                known.tokens = tokens
                self._resolve(known)
            return known
        return self._enter(record, store_version, tokens)

    def drop(self, known: KnownPin) -> None:
        """A pin was removed by us, unless it is another by now. O(1)."""
        if self._pins.get(known.record.name) is known:
            self._leave(known.record.name)

    def review(self) -> None:
        """See which adapters' names mean another content now. Call it a few times a second. O(pins)."""
        for pin in self._pins.values():
            if pin.tokens is not None and pin.record.spec.adapter:
                self._resolve(pin)

    def _enter(self, record: PinRecord, store_version: int, tokens: bytes | None = None) -> KnownPin:
        """A pin is this from now on. What the last one has in common with it stays known, and what it wished is wished until it is known
        what this one does."""
        name = record.name
        before = self._pins.get(name)
        pin = self._pins[name] = KnownPin(record, store_version)
        self._unread.discard(name)
        self._of_owner[name.owner] += before is None
        (self._public.add if record.spec.public else self._public.discard)(name)
        if before is not None:
            pin.version, pin.wish = before.version, before.wish
            if is_same_prompt(before.record.spec, record.spec):
                pin.tokens, pin.problem, pin.is_resolved = before.tokens, before.problem, before.is_resolved
            if not is_same(before.record.spec, record.spec):
                pin.is_resolved = False
        if tokens is not None and tokens != pin.tokens:
            pin.tokens, pin.is_resolved = tokens, False
        if pin.tokens is None:
            self._unbuilt.append(name)
            self._has_unbuilt.set()
        else:
            self._resolve(pin)
        return pin

    def _leave(self, name: PinName) -> None:
        self._unread.discard(name)
        if self._pins.pop(name, None) is None:
            return
        self._public.discard(name)
        self._of_owner[name.owner] -= 1
        if not self._of_owner[name.owner]:
            del self._of_owner[name.owner]
        self._on_change()

    def _resolve(self, pin: KnownPin) -> None:
        """Find what workers are to hold of a pin whose tokens are known. Its adapter's name means what it meant last, while nobody that is
        ready has it."""
        spec, last = pin.record.spec, pin.version
        digest = self._digest_of(spec.adapter) if spec.adapter else ""
        if digest is None and last is not None and last.adapter == spec.adapter:
            digest = last.adapter_digest
        if digest is None:
            pin.problem = f"no worker that is ready has the adapter {spec.adapter!r}"
            return
        if pin.is_resolved and last is not None and last.adapter_digest == digest:
            return
        assert pin.tokens is not None
        pin.version = self._prompts.version(spec, pin.tokens, digest)
        pin.problem, pin.is_resolved = "", True
        pin.wish = wish_of(spec, pin.version)
        self._on_change()

    async def _build_all(self) -> None:
        """Make the tokens of pins that others have put, one after the other."""
        while True:
            await self._has_unbuilt.wait()
            self._has_unbuilt.clear()
            while self._unbuilt:
                pin = self._pins.get(self._unbuilt.popleft())
                if pin is not None and pin.tokens is None:
                    await self._build(pin)

    async def _build(self, pin: KnownPin) -> None:
        try:
            tokens = await self._prompts.tokens(pin.record.spec)
        except PrefixmeshError as error:  # of another model, or another length of its context
            pin.problem = str(error)
            return
        except Exception:  # a bug of ours: the other pins are kept
            _log.exception("pin_prompt_failed owner=%r name=%r", *pin.record.name)
            pin.problem = "its tokens could not be made; the router's log has the reason"
            return
        if self._pins.get(pin.record.name) is pin:
            pin.tokens = tokens
            self._resolve(pin)

    async def _follow(self) -> None:
        while True:
            try:
                # First as a whole: a watch does not tell when it has shown all that was there.
                for entry in await self._store.entries(PINS):
                    self._take_over(entry.key, entry.value, entry.version)
                self.is_read = True
                async with aclosing(self._store.watch(PINS)) as changes:
                    async for change in changes:
                        self._take_over(change.key, change.value, change.version)
                return  # the store is closed
            except PrefixmeshError as error:
                _log.warning("state_not_followed problem=%r", str(error))
                await asyncio.sleep(RETRY_S)

    def _take_over(self, key: str, value: bytes | None, version: int) -> None:
        """What the store says, which is in order: also where its numbers are lower than before, since it may be another store."""
        name = name_of(key)
        if name is None:
            _log.warning("state_entry_ignored key=%r", key)
            return
        if value is None:
            self._leave(name)
            return
        known = self._pins.get(name)
        if known is not None and known.store_version == version:
            return
        try:
            record = decode(value)
            if record.name != name:
                raise ValueError("it is of another pin")
        except ValueError as error:
            _log.warning("pin_not_read key=%r problem=%r", key, str(error))
            self._leave(name)
            self._unread.add(name)
        else:
            self._enter(record, version)


def wish_key(name: PinName) -> str:
    """What the wish of a pin is called (``Wish.key``)."""
    return f"pin/{name.owner}/{name.name}"
