"""Where prompts are built: only what takes a few milliseconds runs on the event loop."""

import threading

import pytest

from prefixmesh.requests import ChatMessage, ChatPrompt, Prompt, TextPrompt, TokenPrompt
from prefixmesh.text.prompt_threads import MAX_INLINE_CHARS, MAX_INLINE_TOKENS, PromptThreads, is_small


def chat(messages: int, chars: int) -> ChatPrompt:
    return ChatPrompt((ChatMessage("user", "x" * chars),) * messages)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        (TextPrompt("x" * MAX_INLINE_CHARS), True),
        (TextPrompt("x" * (MAX_INLINE_CHARS + 1)), False),
        (chat(4, 500), True),
        (chat(1, MAX_INLINE_CHARS), False),
        (chat(1000, 1), False),
        (TokenPrompt(b"1234" * MAX_INLINE_TOKENS), True),
        (TokenPrompt(b"1234" * (MAX_INLINE_TOKENS + 1)), False),
    ],
    ids=["text", "long-text", "chat", "long-chat", "a-thousand-tiny-messages", "tokens", "many-tokens"],
)
async def test_only_small_prompts_are_built_on_the_event_loop(prompt: Prompt, expected: bool) -> None:
    """Characters, messages and tokens all count: a thousand one-letter messages take longer than one long one."""
    assert is_small(prompt) is expected
    threads = PromptThreads()
    try:
        built_in = await threads.run(prompt, threading.current_thread)
    finally:
        threads.close()
    assert (built_in is threading.current_thread()) is expected
