"""An engine without a model: every answer is the text it was told, one token a byte, and it can wait, refuse and die.

It is an ``EngineClient`` as the real ones are: requests sit in a table from submission to their last event, closing a stream
early aborts, a dead engine fails every stream. Its cache is the longest common prefix with what it has seen in the namespace, and it
tells of that in whole blocks.
"""

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Callable
from typing import Final

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from prefixmesh.cache.fingerprint import DEFAULT_BLOCK_SIZE, block_fingerprints
from prefixmesh.cache.ledger import Hits, LedgerRow, Misses
from prefixmesh.cache.packed_names import pack_names
from prefixmesh.cache.tier import Tier
from prefixmesh.errors import NotFoundError, PrefixmeshError, UnavailableError
from prefixmesh.ids import Fingerprint, Namespace
from prefixmesh.model_files.peft_adapter import check_adapter_name
from prefixmesh.text.backend import byte_level_alphabet
from prefixmesh.text.tokenizer import Tokenizer
from prefixmesh.tokens import count, pack, unpack
from prefixmesh.worker.engine_client import RequestEvent
from prefixmesh.worker.engine_stats import TierCounts
from prefixmesh.worker.messages import (
    AdapterInfo,
    Admitted,
    CacheChange,
    CacheChanges,
    Ended,
    EndReason,
    EngineInfo,
    Refused,
    Stats,
    Submit,
    TokensOut,
)
from prefixmesh.worker.prefill_savings import PrefillShape
from prefixmesh.worker.prefix_desk import PrefixDesk
from prefixmesh.worker.prefix_messages import PrefixAnswer, PrefixCommand

EOS: Final = 256
VOCAB_SIZE: Final = 257
CONTEXT_LENGTH: Final = 1000

ADMISSION: Final = -1
"""The place of admission among an answer's positions."""

INFO: Final = EngineInfo(
    model="scripted",
    model_revision="rev-1",
    vocab_size=VOCAB_SIZE,
    context_length=CONTEXT_LENGTH,
    page_size=1,
    total_pages=4000,
    max_total_tokens=4000,
    max_running_requests=8,
    prefix_cache="radix",
    device="none",
    dtype="float32",
    eos_token_ids=(EOS,),
    memory_sums="kv=0",
    prefill_shape=PrefillShape(linear_flops_per_token=1000, attention_flops_per_pair=2),
)


def byte_tokenizer() -> Tokenizer:
    """A tokenizer whose ids are the bytes of UTF-8, and one end-of-turn token."""
    vocabulary = byte_level_alphabet()
    backend = tokenizers.Tokenizer(models.BPE(vocab=dict(vocabulary), merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<|end|>", special=True)])
    return Tokenizer(backend, bos_token_id=None, eos_token_ids=(EOS,), adds_bos=False, digest="bytes")


class ScriptedEngine:
    """See the module. Knobs may be turned at any time; ``release`` lets a held engine go on."""

    def __init__(self, answer: str = "Hello, world.", *, info: EngineInfo = INFO) -> None:
        self.answer = answer
        self.info = info
        self.answer_of: Callable[[Submit], str] = lambda command: self.answer
        """The answer to one request; every request's is ``answer`` unless this says otherwise."""

        self.tokens_per_step = 1
        self.refusal: Refused | None = None
        self.start_error: PrefixmeshError | None = None
        self.failure = ""
        """Ends every request in ``failed``, with this text."""

        self.hold_stats = False
        """Stats are told no more: as while a long step runs."""

        self.counts = LedgerRow(2, 40, Hits(device=10, host=5), Misses(11, 7, 4, 3))
        """What its ledger has counted; every number another, so that none is taken for another."""

        self.tiers = TierCounts()
        self.load_back_ms_per_token = 0.0
        self.host_tokens = self.disk_tokens = 0
        """Of what a prompt finds, what came from there, as far as there is so much."""

        self.load_back_ms = 0.0
        """How long that took."""

        self.steps = 0
        self.stats_told = 0
        self.hold_admission = False
        self.hold_after_tokens: int | None = None
        self.submitted: list[Submit] = []
        self.admitted: list[str] = []
        self.aborted: list[str] = []
        self.running: set[str] = set()
        self.started = False
        self.adapters: dict[str, AdapterInfo] = {}
        self._prefixes = PrefixDesk()
        """Loaded as told: the digest of each is that of its path."""

        self.tell_changes: Callable[[CacheChanges], None] | None = None
        self.closed = asyncio.Event()
        self._to_abort: set[str] = set()
        self._seen: dict[bytes, set[bytes]] = {}
        self._told: set[Fingerprint] = set()
        self._changed = asyncio.Event()

    def watch_cache(self, listener: Callable[[CacheChanges], None]) -> None:
        """Whole blocks of what it has seen are told; a test may tell more."""
        self.tell_changes = listener

    async def start(self) -> EngineInfo:
        if self.start_error is not None:
            raise self.start_error
        self.started = True
        return self.info

    async def submit(self, command: Submit) -> AsyncGenerator[RequestEvent, None]:
        self._check_alive()
        self.submitted.append(command)
        request_id = command.request_id
        assert request_id not in self.running
        if self.refusal is not None:
            yield Refused(request_id=request_id, field=self.refusal.field, problem=self.refusal.problem)
            return
        self.running.add(request_id)
        self._notify()
        ended = False
        try:
            async for event in self._events(command):
                ended = isinstance(event, Ended)
                if ended:
                    self.running.discard(request_id)
                yield event
        finally:
            self.running.discard(request_id)
            if not ended:
                self.aborted.append(request_id)
            self._notify()

    def abort(self, request_id: str) -> None:
        self._to_abort.add(request_id)
        self._notify()

    async def stats(self) -> Stats:
        await self.until(lambda: not self.hold_stats or self.closed.is_set())
        self._check_alive()
        self.stats_told += 1
        self._notify()
        return Stats(
            running=len(self.running),
            queued=0,
            total_pages=self.info.total_pages,
            free_pages=self.info.total_pages - 7 - self.steps,
            evictable_pages=4,
            protected_pages=3,
            prefill_tokens_per_s=1000.0,
            decode_step_ms=2.0,
            cache=self.counts,
            double_releases=0,
            steps=self.steps,
            load_back_ms_per_token=self.load_back_ms_per_token,
            tiers=self.tiers,
        )

    async def flush(self) -> None:
        self._seen.clear()
        self._told.clear()
        self._tell(CacheChange("cleared"))

    async def load_adapter(self, name: str, path: str, *, pinned: bool = False) -> AdapterInfo:
        self._check_alive()
        check_adapter_name(name)
        digest = hashlib.blake2b(path.encode(), digest_size=32).hexdigest()
        self.adapters[name] = AdapterInfo(
            name=name,
            digest=digest,
            rank=8,
            size_bytes=1000,
            resident=pinned,
            pinned=pinned,
            running_requests=0,
        )
        return self.adapters[name]

    async def unload_adapter(self, name: str) -> None:
        self._check_alive()
        check_adapter_name(name)
        if self.adapters.pop(name, None) is None:
            raise NotFoundError(f"no adapter has the name {name!r}")

    async def list_adapters(self) -> tuple[AdapterInfo, ...]:
        self._check_alive()
        return tuple(self.adapters[name] for name in sorted(self.adapters))

    async def ask_prefix(self, make: Callable[[int], PrefixCommand]) -> PrefixAnswer:
        self._check_alive()
        return self._prefixes.handle(make(0), 0.0)

    async def close(self) -> None:
        self.closed.set()
        self._notify()

    def die(self) -> None:
        """As if the engine's process had been killed."""
        self.closed.set()
        self._notify()

    def release(self) -> None:
        """Let everything that is held go on."""
        self.hold_stats = self.hold_admission = False
        self.hold_after_tokens = None
        self._notify()

    async def until(self, condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
        """Wait until a condition on this engine's state holds; it is looked at after every change."""
        async with asyncio.timeout(timeout_s):
            while not condition():
                await self._changed.wait()

    async def _events(self, command: Submit) -> AsyncGenerator[RequestEvent, None]:
        request_id = command.request_id
        if await self._held(request_id, ADMISSION):
            yield self._ended(request_id, "aborted", 0)
            return
        self.admitted.append(request_id)
        self._notify()
        yield self._admission(command)
        ids = self.answer_of(command).encode()
        limit = min(len(ids), command.sampling.max_tokens)
        position = min(count(command.resumed), limit)
        while position < limit:
            if await self._held(request_id, position):
                yield self._ended(request_id, "aborted", position)
                return
            step = tuple(ids[position : min(position + self.tokens_per_step, limit)])
            yield TokensOut(request_id=request_id, position=position, token_ids=step)
            position += len(step)
        self._remember(command, ids[:position])
        if self.failure:
            yield self._ended(request_id, "failed", position)
        else:
            yield self._ended(request_id, "stop" if limit == len(ids) else "length", position)

    def _admission(self, command: Submit) -> Admitted:
        cached = self._match(command)
        host = min(self.host_tokens, cached)
        disk = min(self.disk_tokens, cached - host)
        return Admitted(
            request_id=command.request_id,
            cached_tokens=cached,
            queued_ms=1.0,
            host_tokens=host,
            disk_tokens=disk,
            load_back_ms=self.load_back_ms if host or disk else 0.0,
        )

    def _remember(self, command: Submit, answer: bytes) -> None:
        """Prompt and answer are cached now, but for the last token, which was never computed."""
        tokens = command.tokens + pack(list(answer))[:-4] if answer else command.tokens
        self._seen.setdefault(command.namespace, set()).add(tokens)
        names = block_fingerprints(Namespace(command.namespace), tokens, DEFAULT_BLOCK_SIZE)
        new = [name for name in names if name not in self._told]
        if new:
            self._told.update(new)
            self._tell(CacheChange("stored", Tier.DEVICE, None, pack_names(new)))

    def _tell(self, change: CacheChange) -> None:
        if self.tell_changes is not None:
            self.tell_changes(CacheChanges(changes=[change]))

    async def _held(self, request_id: str, position: int) -> bool:
        """Wait while the request is held before a token (or admission); whether it was aborted meanwhile."""
        while True:
            await asyncio.sleep(0)
            self._check_alive()
            if request_id in self._to_abort:
                return True
            after = self.hold_after_tokens
            if not (
                self.hold_admission if position == ADMISSION else after is not None and position >= after
            ):
                return False
            await self._changed.wait()

    def _match(self, command: Submit) -> int:
        prompt = unpack(command.tokens)
        best = 0
        for seen in map(unpack, self._seen.get(command.namespace, ())):
            size = min(len(seen), len(prompt))
            differs = (seen[:size] != prompt[:size]).nonzero()[0]
            best = max(best, int(differs[0]) if len(differs) else size)
        return min(best, len(prompt) - 1)

    def _ended(self, request_id: str, reason: EndReason, completion_tokens: int) -> Ended:
        return Ended(
            request_id=request_id,
            reason=reason,
            completion_tokens=completion_tokens,
            prefill_ms=2.0,
            first_token_ms=3.0,
            decode_ms=4.0,
            error=self.failure,
        )

    def _check_alive(self) -> None:
        if self.closed.is_set():
            raise UnavailableError("the engine's process ended")

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
