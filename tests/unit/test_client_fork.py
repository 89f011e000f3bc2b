"""What a fork's prompt is: the context and one continuation of its kind, exactly as if they were sent as one."""

from typing import Any

import numpy as np
import pytest

from prefixmesh.client import ChatMessage, ChatPrompt, TextPrompt, TokenPrompt
from prefixmesh.client.fork import MAX_FORKS, plan_forks
from prefixmesh.errors import InvalidRequestError
from prefixmesh.requests import Prompt
from prefixmesh.tokens import pack

USER = {"role": "user", "content": "hi"}
HI = ChatMessage("user", "hi")
YES = ChatMessage("assistant", "yes")


@pytest.mark.parametrize(
    ("context", "continuation", "expected"),
    [
        ("Once", " upon", TextPrompt("Once upon")),
        (TextPrompt("Once"), "", TextPrompt("Once")),
        ([USER], "and?", ChatPrompt((HI, ChatMessage("user", "and?")))),
        ([USER], YES, ChatPrompt((HI, YES))),
        (ChatPrompt((HI,)), {"role": "assistant", "content": "yes"}, ChatPrompt((HI, YES))),
        ([USER], [YES, USER], ChatPrompt((HI, YES, HI))),
        ([USER], [], ChatPrompt((HI,))),
        ([1, 2], [3], TokenPrompt(pack([1, 2, 3]))),
        (TokenPrompt(pack([1, 2])), np.array([3, 4]), TokenPrompt(pack([1, 2, 3, 4]))),
        ([1, 2], (), TokenPrompt(pack([1, 2]))),
    ],
)
def test_a_fork_is_the_context_and_what_goes_on_from_it(
    context: Any, continuation: Any, expected: Prompt
) -> None:
    """Text after text, messages after messages, ids after ids."""
    assert plan_forks(context, [continuation], {}) == [expected]


def test_forks_are_in_the_order_of_their_continuations() -> None:
    assert plan_forks("a", ["b", "c"], {}) == [TextPrompt("ab"), TextPrompt("ac")]


@pytest.mark.parametrize(
    ("context", "continuations", "field"),
    [
        ("a", [5], "continuations[0]"),
        ("a", ["b", [1]], "continuations[1]"),
        ("a", ["\ud800"], "continuations[0]"),
        ([USER], [5], "continuations[0]"),
        ([USER], [[1, 2]], "continuations[0][0]"),
        ([USER], [b"ab"], "continuations[0]"),
        ([USER], [{"role": "robot", "content": "x"}], "continuations[0][0].role"),
        ([1], ["b"], "continuations[0]"),
        ([1], [[-1]], "continuations[0]"),
        ([1], [5], "continuations[0]"),
        ([1], [b"ab"], "continuations[0]"),
        ("a", [], "continuations"),
        ("a", ["b"] * (MAX_FORKS + 1), "continuations"),
        ("a", "bc", "continuations"),
        ("a", 5, "continuations"),
        (5, ["b"], "prompt"),
        ([{"role": "robot", "content": "x"}], ["b"], "chat.messages[0].role"),
    ],
)
def test_what_does_not_go_on_from_its_context_is_refused_by_name(
    context: Any, continuations: Any, field: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        plan_forks(context, continuations, {})
    assert caught.value.field == field


def test_a_fork_does_not_resume_an_answer() -> None:
    with pytest.raises(InvalidRequestError, match="resumed_output"):
        plan_forks("a", ["b"], {"resumed_output": [1]})
    with pytest.raises(InvalidRequestError, match="resumed_branches"):
        plan_forks("a", ["b"], {"resumed_branches": [[1]]})
