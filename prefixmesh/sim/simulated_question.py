"""A request as a caller in simulated time asks it, and what becomes of it on its way: a decision's demand, an engine's request."""

from dataclasses import dataclass

from prefixmesh.cache.fingerprint import DEFAULT_BLOCK_SIZE, block_fingerprints
from prefixmesh.ids import Namespace
from prefixmesh.router.placement import PublicChain, RouteRequest
from prefixmesh.router.public_prefixes import PublicPrefixes
from prefixmesh.tokens import count
from prefixmesh.worker.messages import EngineSampling, Submit


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One request as a client asks it."""

    namespace: Namespace
    prompt: bytes
    """Packed."""

    max_tokens: int
    resumed: bytes = b""
    """Packed ids that the caller has of the answer already."""

    priority: int = 0


def as_route_request(question: Question, public: PublicPrefixes) -> RouteRequest:
    """What a decision is made by, as ``router.prepare`` makes it; ``public`` are the fleet's public prefixes, of the base model."""
    namespace, prompt = question.namespace, question.prompt
    return RouteRequest(
        fingerprints=block_fingerprints(namespace, prompt),
        public=tuple(
            PublicChain(known.prefix, known.chain(namespace, prompt, DEFAULT_BLOCK_SIZE))
            for known in public.fitting("", prompt)
        ),
        prompt_tokens=count(prompt),
        max_tokens=question.max_tokens,
        priority=question.priority,
    )


def as_submit(question: Question, request_id: str, time_left_s: float) -> Submit:
    """The request to an engine, by the name that is in its ticket."""
    sampling = EngineSampling(
        temperature=0.0,
        top_k=0,
        top_p=1.0,
        min_p=0.0,
        seed=0,
        max_tokens=question.max_tokens,
        stop_token_ids=(),
    )
    return Submit(
        request_id=request_id,
        namespace=question.namespace,
        tokens=question.prompt,
        sampling=sampling,
        resumed=question.resumed,
        priority=question.priority,
        time_left_s=time_left_s,
    )
