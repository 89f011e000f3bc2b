"""From a pin's wish to what workers know it by: tokens, namespace, names of its blocks."""

import asyncio
import hashlib
from functools import partial
from typing import Final

from prefixmesh.cache.fingerprint import block_fingerprints
from prefixmesh.cache.namespace import Isolation, derive_namespace, public_namespace
from prefixmesh.cache.tier import Tier
from prefixmesh.errors import InvalidRequestError
from prefixmesh.ids import Namespace
from prefixmesh.proto import codec
from prefixmesh.proto.v1 import inference_pb2
from prefixmesh.proto.v1 import router_pb2 as pb
from prefixmesh.requests import Prompt
from prefixmesh.router.model import RouterModel
from prefixmesh.router.pins.wishes import PinVersion, Wish
from prefixmesh.side_thread import run_aside
from prefixmesh.tokens import count

MOST_AT_ONCE: Final = 2
"""Pins whose tokens are made at the same time: requests need the processor, too."""

_GENERATION_BYTES: Final = 6
"""Two of a pin's prompts are told apart by so much of a digest; the number is still exact in JSON."""


class PinPrompts:
    """Makes tokens and versions of pins for one model."""

    def __init__(
        self, model: RouterModel, *, namespace_key: bytes, isolation: Isolation, block_size: int
    ) -> None:
        self._model = model
        self._namespace_key = namespace_key
        self._isolation = isolation
        self._block_size = block_size
        self._places = asyncio.Semaphore(MOST_AT_ONCE)

    async def tokens(self, spec: pb.PinSpec) -> bytes:
        """A pin's prompt as tokens, packed: as far as every longer prompt that begins with it has the same ones. On a thread of its own.

        Raises InvalidRequestError naming the field and the limit.
        """
        prompt = prompt_of(spec)
        namespace = self.namespace(spec, "")
        async with self._places:
            tokens = await run_aside(partial(self._model.prompts.beginning, prompt, namespace), "pin-prompt")
        if spec.public and count(tokens) < self._block_size:
            raise InvalidRequestError(
                "prompt",
                f"a public one is shared in whole blocks of {self._block_size} tokens; {count(tokens)} can be pinned of this",
            )
        return tokens

    def namespace(self, spec: pb.PinSpec, adapter_digest: str) -> Namespace:
        """Where a pin's KV lives, while its adapter's name means this content."""
        if spec.public:
            return public_namespace(
                self._namespace_key, adapter_digest=adapter_digest, model_revision=self._model.revision
            )
        return derive_namespace(
            self._namespace_key,
            tenant=spec.tenant,
            adapter_digest=adapter_digest,
            model_revision=self._model.revision,
            caller_key=spec.extra_key,
            isolation=self._isolation,
        )

    def version(self, spec: pb.PinSpec, tokens: bytes, adapter_digest: str) -> PinVersion:
        """What workers are to hold of a pin now. The same for every router: what is there already is known again. O(tokens)."""
        namespace = self.namespace(spec, adapter_digest)
        return PinVersion(
            generation=_generation(namespace, tokens, Tier(spec.tier)),
            namespace=namespace,
            tokens=tokens,
            fingerprints=block_fingerprints(namespace, tokens, self._block_size),
            adapter=spec.adapter,
            adapter_digest=adapter_digest,
        )


def wish_of(spec: pb.PinSpec, version: PinVersion) -> Wish:
    """What is wished of the workers while a pin means this version. Its end is not in it: the wish is there as long as the pin is."""
    return Wish(
        source="pin",
        owner=spec.owner,
        name=spec.name,
        tier=Tier(spec.tier),
        replicas=spec.replicas,
        version=version,
    )


def prompt_of(spec: pb.PinSpec) -> Prompt:
    """A pin's prompt, by the rules of Generate. Raises InvalidRequestError. O(prompt)."""
    message = inference_pb2.GenerateRequest()
    match spec.WhichOneof("prompt"):
        case "text":
            message.text = spec.text
        case "chat":
            message.chat.CopyFrom(spec.chat)
        case "tokens":
            message.tokens.CopyFrom(spec.tokens)
    return codec.decode_generate(message).prompt


def _generation(namespace: Namespace, tokens: bytes, tier: Tier) -> int:
    """A number for what is pinned: a worker keeps one pin by one name, so another prompt, namespace or tier is to have another. It follows
    from them alone, so that routers agree on it without a word, also after a pin was removed and made again."""
    digest = hashlib.blake2b(digest_size=_GENERATION_BYTES, person=b"pin")
    digest.update(namespace + bytes([tier]))
    digest.update(tokens)
    return int.from_bytes(digest.digest(), "little")
