"""What ``prefixmesh bench route`` asks for: packed prompts, chats of ordinary words, and the messages that carry them."""

import random
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from prefixmesh.proto.v1 import inference_pb2, router_pb2
from prefixmesh.requests import ChatMessage, ChatPrompt
from prefixmesh.tokens import pack

SEED: Final = 20_240_718
VOCABULARY: Final = 40_000

ANSWER_TOKENS: Final = 64

KNOWN_WORDS: Final = 3_600
NEW_WORDS: Final = 375
"""Of a chat: with the template's own some 4,000 tokens, since each of the words below is one."""

WORDS: Final = (
    *(
        "the",
        "of",
        "and",
        "a",
        "to",
        "in",
        "is",
        "you",
        "that",
        "it",
        "he",
        "was",
        "for",
        "on",
        "are",
        "as",
        "with",
        "his",
        "they",
        "at",
    ),
    *(
        "be",
        "this",
        "have",
        "from",
        "or",
        "one",
        "had",
        "by",
        "word",
        "but",
        "not",
        "what",
        "all",
        "were",
        "we",
        "when",
        "your",
        "can",
    ),
    *(
        "said",
        "there",
        "use",
        "an",
        "each",
        "which",
        "she",
        "do",
        "how",
        "their",
        "if",
        "will",
        "up",
        "other",
        "about",
        "out",
        "many",
    ),
    *(
        "then",
        "them",
        "these",
        "so",
        "some",
        "her",
        "would",
        "make",
        "like",
        "him",
        "into",
        "time",
        "has",
        "look",
        "two",
        "more",
    ),
)
"""Common enough to be a token each, with the space before it, in any English vocabulary."""


def packed_prompts(tokens: int) -> Iterator[bytes]:
    """Packed prompts without end: the first half is the same in all, as of one application, the rest is new."""
    rng = np.random.default_rng(SEED)
    same = rng.integers(VOCABULARY, size=tokens // 2)
    while True:
        yield pack(np.concatenate([same, rng.integers(VOCABULARY, size=tokens - len(same))]))


def chats() -> Iterator[ChatPrompt]:
    """Chats without end: one system prompt, and a question that is new each time."""
    rng = random.Random(SEED)  # noqa: S311  a bench's words
    system = ChatMessage("system", _words(rng, KNOWN_WORDS))
    while True:
        yield ChatPrompt((system, ChatMessage("user", _words(rng, NEW_WORDS))))


def generate_messages(prompts: Iterator[bytes], max_tokens: int) -> Iterator[bytes]:
    """Serialised ``GenerateRequest``s of packed prompts."""
    for prompt in prompts:
        yield _request(max_tokens, tokens=inference_pb2.TokenPrompt(ids=prompt)).SerializeToString()


def route_messages(prompts: Iterator[bytes]) -> Iterator[bytes]:
    """Serialised ``RouteRequest``s of packed prompts."""
    for prompt in prompts:
        request = _request(ANSWER_TOKENS, tokens=inference_pb2.TokenPrompt(ids=prompt))
        yield router_pb2.RouteRequest(request=request).SerializeToString()


def chat_messages(prompts: Iterator[ChatPrompt]) -> Iterator[bytes]:
    """Serialised ``RouteRequest``s of chats."""
    for prompt in prompts:
        chat = inference_pb2.ChatPrompt(
            messages=[
                inference_pb2.ChatMessage(role=one.role, content=one.content) for one in prompt.messages
            ]
        )
        request = _request(ANSWER_TOKENS, chat=chat)
        yield router_pb2.RouteRequest(request=request).SerializeToString()


def _request(max_tokens: int, **prompt: object) -> inference_pb2.GenerateRequest:
    sampling = inference_pb2.Sampling(max_tokens=max_tokens, ignore_eos=True, temperature=0.0)
    return inference_pb2.GenerateRequest(sampling=sampling, **prompt)  # type: ignore[arg-type]


def _words(rng: random.Random, count: int) -> str:
    chosen: Sequence[str] = rng.choices(WORDS, k=count)
    return " ".join(chosen)
