"""What the command line writes about an answer."""

import dataclasses
import json

import pytest

from prefixmesh.cli.failure import one_line
from prefixmesh.cli.render import answer_as_dict, printable, summary_line
from prefixmesh.client.answer import Answer
from prefixmesh.client.answer_builder import AnswerBuilder
from prefixmesh.proto.v1 import inference_pb2 as pb
from tests.support.fake_inference import delta, finished, started


def answer(
    *deltas: pb.GenerateResponse,
    saved: pb.PrefillSavings | None = None,
    host: int = 0,
    disk: int = 0,
    peer: int = 0,
) -> Answer:
    builder = AnswerBuilder(sent_at_s=1.0)
    cached = pb.CachedTokens(device=1152 - host - disk - peer, host=host, disk=disk, peer=peer)
    for response in (
        started(prompt_tokens=1204),
        *deltas,
        finished(len(deltas), prompt_tokens=1204, cached_tokens=cached, saved=saved),
    ):
        builder.add(response, now_s=1.0851)
    return builder.end()


def test_summary_line_names_cache_worker_and_first_token() -> None:
    """Thousands are separated; milliseconds are whole."""
    line = "cached 1,152/1,204 prompt tokens · worker-1 · first token 85 ms"
    assert summary_line(answer(delta(0, "a"))) == line


@pytest.mark.parametrize(
    ("host", "disk", "peer", "told"),
    [
        (1024, 0, 0, ", 1,024 of them on the host"),
        (0, 64, 0, ", 64 of them on the disk"),
        (1024, 64, 0, ", 1,024 of them on the host, 64 of them on the disk"),
        (0, 0, 1000, ", 1,000 of them copied from another worker"),
    ],
)
def test_summary_line_names_what_did_not_lie_on_the_device(
    host: int, disk: int, peer: int, told: str
) -> None:
    """All of them count as cached; what is not there is not named."""
    line = f"cached 1,152/1,204 prompt tokens{told} · worker-1 · first token 85 ms"
    assert summary_line(answer(delta(0, "a"), host=host, disk=disk, peer=peer)) == line


@pytest.mark.parametrize(
    ("total", "told"),
    [(0.0, ""), (0.004, ""), (0.934, " · 93 % of prefill saved"), (0.9999, " · 99 % of prefill saved")],
)
def test_summary_line_tells_what_was_saved_where_something_was(total: float, told: str) -> None:
    """In whole percent, rounded down: never all of it, for one token is always computed."""
    saved = pb.PrefillSavings(linear=1, attention=1, total=total)
    line = f"cached 1,152/1,204 prompt tokens{told} · worker-1 · first token 85 ms"
    assert summary_line(answer(delta(0, "a"), saved=saved)) == line


@pytest.mark.parametrize(("interruptions", "told"), [(1, "once"), (3, "3 times")])
def test_an_answer_that_went_on_elsewhere_says_so(interruptions: int, told: str) -> None:
    one = dataclasses.replace(answer(delta(0, "a")), interruptions=interruptions)
    assert summary_line(one).endswith(f" · interrupted {told}, and carried on elsewhere")
    assert answer_as_dict(one)["interruptions"] == interruptions


def test_summary_line_of_an_answer_without_tokens() -> None:
    """There is no first-token time to show."""
    assert summary_line(answer()).endswith("· worker-1 · no token")


def test_json_form_holds_the_answers_figures() -> None:
    """Plain JSON values, times in milliseconds, the sum of cached tokens and its tiers."""
    saved = pb.PrefillSavings(linear=0.5, attention=0.25, total=0.375)
    one = answer(delta(0, "hé", 7, 8), saved=saved, host=50, disk=2, peer=7)
    data = json.loads(json.dumps(answer_as_dict(one)))
    assert data["text"] == "hé"
    assert data["token_ids"] == [7, 8]
    assert data["cached_tokens"] == 1152
    assert data["cached_by_tier"] == {"device": 1093, "host": 50, "disk": 2, "peer": 7}
    assert data["first_token_ms"] == pytest.approx(85.1)
    assert data["worker_timings"]["prefill_ms"] == 20.0
    assert data["worker_timings"]["load_back_ms"] == 5.0
    assert data["routing"]["policy"] == "cost"
    assert (data["worker_id"], data["seed"], data["finish_reason"]) == ("worker-1", 7, "stop")
    assert data["prefill_saved"] == {"linear": 0.5, "attention": 0.25, "total": 0.375}
    assert [branch["text"] for branch in data["branches"]] == ["hé"]


def test_control_characters_never_reach_the_terminal() -> None:
    """Escape sequences in a model's text lose their teeth; text, tabs and line ends stay."""
    assert printable("a\x1b[31mred\x07\x9b2J\r\tb\nc é 漢") == "a[31mred2J\tb\nc é 漢"


def test_error_message_is_one_line() -> None:
    """Whatever a server puts into it."""
    assert one_line("first\n  second\x1b[2J\n") == "first second[2J"
