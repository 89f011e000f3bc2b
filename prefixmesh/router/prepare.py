"""From a caller's message to what can be routed and sent: tokens, namespace, names of the blocks. Once per request, whatever
number of workers it is tried on."""

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Final

import msgspec

from prefixmesh.cache.fingerprint import block_fingerprints
from prefixmesh.cache.namespace import Isolation, derive_namespace, tail_namespace
from prefixmesh.errors import InvalidRequestError
from prefixmesh.ids import Fingerprint, Namespace, TenantId
from prefixmesh.proto.v1 import inference_pb2 as pb
from prefixmesh.requests import (
    GenerateRequest,
    Prompt,
    check_resumed,
    resolve_max_tokens,
)
from prefixmesh.router.model import RouterModel
from prefixmesh.router.placement import PLAIN, PublicChain, RouteRequest
from prefixmesh.router.public_prefixes import PublicPrefixes
from prefixmesh.router.sessions import session_name
from prefixmesh.rpc.channel import MAX_MESSAGE_BYTES
from prefixmesh.text.prompt_threads import PromptThreads, is_small
from prefixmesh.text.prompts import BuiltPrompt
from prefixmesh.tokens import TOKEN_BYTES, count

MAX_NAMED_BLOCKS: Final = 4096
"""Blocks of one prompt that are named, from its start: 262,144 tokens of 64 a block. Walking them takes a few milliseconds of the
event loop, and what two prompts share beyond that does not change a decision."""

REMEMBERED_NAMESPACES: Final = 4096
"""A caller's requests are mostly in one, and making it takes 3 µs. A few MB at most: an ``extra_key`` has up to a kB."""

ENVELOPE_BYTES: Final = 128 * 1024
"""Room in the message to a worker for what is not the prompt; sampling's own limits keep it below that."""

_PASSED_ON: Final = ("request_id", "resumed_output", "branches", "priority", "queue_timeout_ms")
"""What a worker gets as the caller has said it, beside sampling and the beginnings of several branches."""


class PreparedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request that can be routed, and sent to any worker."""

    namespace: Namespace
    prompt: BuiltPrompt
    route: RouteRequest
    resumed: tuple[bytes, ...]
    """Packed ids of each branch's beginning that the caller brought along, empty where there is none."""

    message: pb.GenerateRequest
    """As the caller sent it."""

    @property
    def wire(self) -> bytes:
        """The serialised message for a worker: the same request with its prompt as tokens. O(prompt), made anew at each call: a request whose
        caller streams from the worker itself needs none.

        It names no model: the revision was compared when the worker was taken in, and a worker may know the same files by another name.
        """
        message = self.message
        wire = pb.GenerateRequest(adapter=self.route.adapter)
        wire.tokens.ids = self.prompt.tokens
        if message.HasField("sampling"):
            wire.sampling.CopyFrom(message.sampling)
        # Most requests leave these alone: a field that is only read costs a tenth of one that is set.
        for name in _PASSED_ON:
            if value := getattr(message, name):
                setattr(wire, name, value)
        if message.resumed_branches:
            wire.resumed_branches.extend(message.resumed_branches)
        return wire.SerializeToString()


class RequestPreparer:
    """Prepares requests for one model. Call ``close`` when it is not used any more."""

    def __init__(
        self,
        model: RouterModel,
        *,
        namespace_key: bytes,
        isolation: Isolation,
        block_size: int,
        public: PublicPrefixes | None = None,
    ) -> None:
        """``public`` are the fleet's public prefixes; None: it has none."""
        self._model = model
        self._namespace_key = namespace_key
        self._isolation = isolation
        self._block_size = block_size
        self._public = PublicPrefixes(block_size) if public is None else public
        self._builders = PromptThreads()
        self._namespaces = lru_cache(REMEMBERED_NAMESPACES)(self._derive_namespace)

    def close(self) -> None:
        """Let go of the threads."""
        self._builders.close()

    async def prepare(
        self,
        request: GenerateRequest,
        message: pb.GenerateRequest,
        tenant: TenantId,
        *,
        adapter_digest: str,
        context_length: int,
    ) -> PreparedRequest:
        """Build, name and serialise a request of ``tenant``.

        ``adapter_digest`` is the content that the request's adapter means, empty for the base model; ``context_length`` the longest that
        any worker offers now. Raises InvalidRequestError, naming the field and the limit.
        """
        namespace = self._namespaces(tenant, request.extra_key, adapter_digest)
        if is_small(request.prompt):
            return self._prepare(request, message, namespace, adapter_digest, context_length)
        return await self._builders.run(
            request.prompt,
            partial(self._prepare, request, message, namespace, adapter_digest, context_length),
        )

    async def tokenize(self, prompt: Prompt, tenant: TenantId) -> bytes:
        """Packed tokens of a prompt, as Generate would see them for a caller without ``extra_key``."""
        namespace = self.namespace(tenant, "")
        built = await self._builders.run(prompt, partial(self._model.prompts.build, prompt, namespace))
        return built.tokens

    def namespace(self, tenant: TenantId, extra_key: str, adapter_digest: str = "") -> Namespace:
        """Where the KV of a tenant's requests with this ``extra_key`` and this adapter lives."""
        return self._namespaces(tenant, extra_key, adapter_digest)

    def may_fill_block(self, prepared: PreparedRequest, answer_tokens: int) -> bool:
        """Whether an answer of at most so many tokens may complete a block that the prompt has only begun. O(1)."""
        begun = count(prepared.prompt.tokens) - len(prepared.route.fingerprints) * self._block_size
        return begun + max(map(count, prepared.resumed)) + answer_tokens > self._block_size

    def name_answer(
        self, prepared: PreparedRequest, answer_ids: bytes, branch: int = 0, chain: int = PLAIN
    ) -> Sequence[Fingerprint]:
        """Fingerprints of prompt and a branch's answer: the prompt's, by the chain that its worker keeps it under, continued. O(answer)."""
        named = prepared.route.chain(chain)
        rest = prepared.prompt.tokens[len(named) * self._block_size * TOKEN_BYTES :]
        if len(rest) >= self._block_size * TOKEN_BYTES:
            return named  # longer than what is named at all
        start = named[-1].to_bytes(8, "little") if named else prepared.namespace
        if chain != PLAIN:
            prefix = prepared.route.public[chain - 1].prefix
            if len(named) * self._block_size == prefix.boundary_tokens:
                start = tail_namespace(prepared.namespace, prefix.fingerprint)
        # A worker may number its answers as it likes.
        begun = prepared.resumed[branch] if 0 <= branch < len(prepared.resumed) else b""
        # The last token was sampled and never computed: it has no KV yet.
        computed = answer_ids[:-TOKEN_BYTES]
        return [*named, *block_fingerprints(start, rest + begun + computed, self._block_size)]

    def _derive_namespace(self, tenant: TenantId, extra_key: str, adapter_digest: str) -> Namespace:
        return derive_namespace(
            self._namespace_key,
            tenant=tenant,
            adapter_digest=adapter_digest,
            model_revision=self._model.revision,
            caller_key=extra_key,
            isolation=self._isolation,
        )

    def _prepare(
        self,
        request: GenerateRequest,
        message: pb.GenerateRequest,
        namespace: Namespace,
        adapter_digest: str,
        context_length: int,
    ) -> PreparedRequest:
        prompt = self._model.prompts.build(request.prompt, namespace)
        prompt_tokens, max_tokens = count(prompt.tokens), request.sampling.max_tokens
        most = resolve_max_tokens(prompt_tokens, max_tokens, context_length)
        resumed = request.resumed
        if any(resumed):
            check_resumed(request, most)
        if len(prompt.tokens) + sum(map(len, resumed)) > MAX_MESSAGE_BYTES - ENVELOPE_BYTES:
            raise InvalidRequestError(
                "prompt",
                f"{prompt_tokens} tokens take {len(prompt.tokens)} bytes; one message carries at most {MAX_MESSAGE_BYTES} "
                f"bytes, {ENVELOPE_BYTES} of them for what is not the prompt",
            )
        block_size = self._block_size
        named = prompt.tokens[: MAX_NAMED_BLOCKS * block_size * TOKEN_BYTES]
        is_short = prompt_tokens < block_size
        public = tuple(
            PublicChain(known.prefix, known.chain(namespace, named, block_size))
            for known in self._public.fitting(adapter_digest, prompt.tokens)
        )
        return PreparedRequest(
            namespace=namespace,
            prompt=prompt,
            resumed=resumed,
            route=RouteRequest(
                fingerprints=[] if is_short else block_fingerprints(namespace, named, block_size),
                public=public,
                prompt_tokens=prompt_tokens,
                max_tokens=max_tokens,
                branches=request.branches,
                whole_name=block_fingerprints(namespace, named, prompt_tokens)[0] if is_short else 0,
                adapter=request.adapter,
                adapter_digest=adapter_digest,
                priority=request.priority,
                session=session_name(namespace, request.session),
            ),
            message=message,
        )
