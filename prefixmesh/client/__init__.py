"""The library that callers import. No torch, no Ray.

>>> from prefixmesh.client import Client
>>> with Client("127.0.0.1:8000") as client:  # doctest: +SKIP
...     answer = client.generate([{"role": "user", "content": "What is a prefix cache?"}], max_tokens=64)
...     print(answer.text, answer.cached_tokens, answer.worker_id)

``AsyncClient`` is the same for asyncio. What can go wrong is in ``prefixmesh.errors``.
"""

from prefixmesh.branch_seed import branch_seed
from prefixmesh.client.aio import AsyncClient, AsyncStream
from prefixmesh.client.answer import (
    Answer,
    Branch,
    CachedTokens,
    FinishReason,
    PrefillSavings,
    Routing,
    Started,
    TextDelta,
    Timings,
    TokenLogprobs,
)
from prefixmesh.client.blocking import Client, Stream
from prefixmesh.client.calls import GenerateOptions, ServedModel
from prefixmesh.client.checks import PromptLike
from prefixmesh.client.fork import ContinuationLike
from prefixmesh.requests import ChatMessage, ChatPrompt, TextPrompt, TokenPrompt

__all__ = [
    "Answer",
    "AsyncClient",
    "AsyncStream",
    "Branch",
    "CachedTokens",
    "ChatMessage",
    "ChatPrompt",
    "Client",
    "ContinuationLike",
    "FinishReason",
    "GenerateOptions",
    "PrefillSavings",
    "PromptLike",
    "Routing",
    "ServedModel",
    "Started",
    "Stream",
    "TextDelta",
    "TextPrompt",
    "Timings",
    "TokenLogprobs",
    "TokenPrompt",
    "branch_seed",
]
