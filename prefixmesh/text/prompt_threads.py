"""Where prompts are tokenised: small ones at once, large ones in a thread, so that nobody else's tokens wait for them.

Shared by every server that builds prompts. The tokenizer's work lets go of the interpreter, so a thread does help.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

from prefixmesh.requests import ChatPrompt, Prompt, TextPrompt, TokenPrompt
from prefixmesh.tokens import count

MAX_INLINE_CHARS: Final = 4096
"""Prompts up to this size (about 2 ms of tokenising) are built on the event loop."""

CHARS_PER_MESSAGE: Final = 64
"""What the template's work on one chat message counts as, in characters: thousands of tiny messages are not a small prompt."""

MAX_INLINE_TOKENS: Final = 64 * 1024
"""The same for prompts that are tokens already, which need only be checked and named."""

BUILD_THREADS: Final = 2
"""Threads that build large prompts: tokenising is bound by the processor."""

_BuiltT = TypeVar("_BuiltT")


class PromptThreads:
    """Runs what builds a prompt in the right place. Call ``close`` when it is not used any more."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(BUILD_THREADS, thread_name_prefix="prompt-builder")

    async def run(self, prompt: Prompt, build: Callable[[], _BuiltT]) -> _BuiltT:
        """What ``build`` returns; it is called here when ``prompt`` is small, in a thread when it is large."""
        if is_small(prompt):
            return build()
        return await asyncio.get_running_loop().run_in_executor(self._threads, build)

    def close(self) -> None:
        """Let go of the threads; what has not begun is dropped."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def is_small(prompt: Prompt) -> bool:
    """Whether building ``prompt`` takes no more than a few milliseconds. O(messages)."""
    match prompt:
        case TokenPrompt(packed=packed):
            return count(packed) <= MAX_INLINE_TOKENS
        case TextPrompt(text=text):
            return len(text) <= MAX_INLINE_CHARS
        case ChatPrompt(messages=messages):
            return sum(len(message.content) + CHARS_PER_MESSAGE for message in messages) <= MAX_INLINE_CHARS
