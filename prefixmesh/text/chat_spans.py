"""Where in a rendered conversation the template speaks, and where a message does.

The template may write control tokens; a message that spells one must not become one, or any caller could end its own turn and
speak as the system. So the template is rendered a second time with a mark in place of each content. What stands between the marks
is the template's own text, which no caller can influence, and it is then found again in the real rendering. Templates may trim contents
(many do); one that changes them otherwise has no spans, and the caller of this module must take care.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from prefixmesh.requests import ChatMessage
from prefixmesh.text.chat_template import ChatTemplate

_MARK: Final = "PREFIXMESHMESSAGE{}ENDSHERE"
"""Letters and digits only: nothing a template trims, escapes or splits at."""

_MARK_PATTERN: Final = re.compile(_MARK.format(r"(\d+)"))


@dataclass(frozen=True, slots=True)
class ContentSpan:
    """One message's content in the rendered text: ``[start, end)`` in characters."""

    start: int
    end: int
    message: int
    """Its place among the messages."""


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """A conversation as text."""

    text: str
    spans: tuple[ContentSpan, ...] | None
    """Contents in the order of the text; all else is the template's own. None when they could not be told apart."""


def render_chat(
    template: ChatTemplate, messages: Sequence[ChatMessage], *, opens_answer: bool = True
) -> RenderedChat:
    """Render a conversation up to where the answer begins, or without the answer's opening; O(text), two renderings. Raises what ``render``
    raises."""
    text = template.render(messages, add_generation_prompt=opens_answer)
    marked = template.render(
        [ChatMessage(message.role, _MARK.format(index)) for index, message in enumerate(messages)],
        add_generation_prompt=opens_answer,
    )
    return RenderedChat(text, _align(text, _MARK_PATTERN.split(marked), messages))


def _align(
    text: str, pieces: Sequence[str], messages: Sequence[ChatMessage]
) -> tuple[ContentSpan, ...] | None:
    """Find ``literal, message, literal, message, …, literal`` in the text; None when it is not that."""
    if not text.startswith(pieces[0]):
        return None
    at = len(pieces[0])
    spans: list[ContentSpan] = []
    for mark, literal in zip(pieces[1::2], pieces[2::2], strict=True):
        index = int(mark)
        for written in _as_written(messages[index].content):
            end = at + len(written)
            if text.startswith(written, at) and text.startswith(literal, end):
                break
        else:
            return None
        spans.append(ContentSpan(at, end, index))
        at = end + len(literal)
    return tuple(spans) if at == len(text) else None


def _as_written(content: str) -> tuple[str, ...]:
    """How templates write a content: as it is, or trimmed."""
    return (content, content.strip(), content.rstrip(), content.lstrip())
