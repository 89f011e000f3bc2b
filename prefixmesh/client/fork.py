"""Several continuations of one context: what each fork's prompt is. Pure; the clients send them.

A fork's prompt is exactly what it would be if it were sent alone, so its answer is too. Whether the context's tokens begin every fork's
tokens is another matter: of chats and token ids they do; of plain text the last word may be tokenised otherwise where a continuation goes
on without a space, and then all but those last tokens are shared.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, TypeAlias

from prefixmesh.client.calls import GenerateOptions
from prefixmesh.client.checks import PromptLike, check_ids, check_messages, check_prompt, check_text
from prefixmesh.errors import InvalidRequestError
from prefixmesh.requests import MAX_BRANCHES, ChatMessage, ChatPrompt, Prompt, TextPrompt, TokenPrompt

MAX_FORKS: Final = MAX_BRANCHES
"""Each fork is a call of its own at the same time, and at the blocking client a thread."""

ContinuationLike: TypeAlias = (
    str | ChatMessage | Mapping[str, str] | Sequence[ChatMessage | Mapping[str, str]] | Sequence[int]
)
"""What goes on where a context ends: text after text; a message, several, or text (which a user says) after a chat; token ids after
token ids. An empty one is the context as it stands."""


def plan_forks(
    context: PromptLike, continuations: Sequence[ContinuationLike], options: GenerateOptions
) -> list[Prompt]:
    """The prompt of each fork, in order; raises InvalidRequestError for a continuation that is not of the context's kind."""
    for name in ("resumed_output", "resumed_branches"):
        if options.get(name):
            raise InvalidRequestError(
                name, "is the beginning of one call's answers, and forks are several calls"
            )
    if isinstance(continuations, str | bytes | Mapping) or not isinstance(continuations, Sequence):
        kind = type(continuations).__name__
        raise InvalidRequestError("continuations", f"must be a sequence of continuations, got {kind}")
    if not 1 <= len(continuations) <= MAX_FORKS:
        raise InvalidRequestError("continuations", f"must be 1 to {MAX_FORKS}, got {len(continuations)}")
    start = check_prompt(context)
    return [_extend(start, f"continuations[{n}]", one) for n, one in enumerate(continuations)]


def _extend(start: Prompt, field: str, continuation: object) -> Prompt:
    match start:
        case TextPrompt(text=text):
            return TextPrompt(text + check_text(field, continuation))
        case ChatPrompt(messages=messages):
            return ChatPrompt((*messages, *check_messages(field, _messages(field, continuation))))
        case TokenPrompt(packed=packed):
            return TokenPrompt(packed + check_ids(field, _ids(field, continuation)))


def _messages(field: str, continuation: object) -> Sequence[object]:
    if isinstance(continuation, str):
        return [ChatMessage("user", continuation)]
    if isinstance(continuation, ChatMessage | Mapping):
        return [continuation]
    if isinstance(continuation, Sequence) and not isinstance(continuation, bytes):
        return continuation
    raise InvalidRequestError(
        field, f"must be text or chat messages, as the context is a chat; got {type(continuation).__name__}"
    )


def _ids(field: str, continuation: object) -> Iterable[object]:
    if isinstance(continuation, Iterable) and not isinstance(continuation, str | bytes | Mapping):
        return continuation
    raise InvalidRequestError(
        field, f"must be token ids, as the context is; got {type(continuation).__name__}"
    )
