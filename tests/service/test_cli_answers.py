"""``prefixmesh generate`` and ``chat`` against a fake server: what is sent, what is printed, what Ctrl-C does."""

import asyncio
import json
import os
import re
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from prefixmesh import errors, fleet_state
from prefixmesh.cli.main import main
from prefixmesh.fleet_state import FleetState
from prefixmesh.proto.v1 import inference_pb2 as pb
from prefixmesh.tokens import pack
from tests.support.fake_inference import FakeInference, refusing_address

SUMMARY = r"cached 1,152/1,204 prompt tokens · worker-1 · first token \d+ ms\n"
WAIT_S = 20


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home of its own, and no key from the developer's environment."""
    monkeypatch.setenv("PREFIXMESH_HOME", str(tmp_path))
    monkeypatch.delenv("PREFIXMESH_API_KEY", raising=False)
    return tmp_path


@pytest.fixture
async def fake() -> AsyncIterator[FakeInference]:
    async with FakeInference() as server:
        yield server


async def run(*arguments: str, stdin: str | bytes = "", env: dict[str, str] | None = None) -> Result:
    """Run the command in a thread: the fake server lives on this event loop."""

    def invoke() -> Result:
        return CliRunner().invoke(main, arguments, input=stdin, env=env)

    return await asyncio.wait_for(asyncio.to_thread(invoke), WAIT_S)


async def start(*arguments: str, **settings: Any) -> Process:
    """The command as a program of its own."""
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "prefixmesh.cli.main", *arguments, stdout=PIPE, stderr=PIPE, **settings
    )


def messages(fake: FakeInference) -> list[list[tuple[str, str]]]:
    """The conversations that were sent."""
    return [[(m.role, m.content) for m in request.chat.messages] for request in fake.requests]


async def test_generate_prints_the_answer_and_its_summary(fake: FakeInference) -> None:
    """stdout is the answer alone; stderr is the one line about it; nothing is coloured in a pipe."""
    result = await run("generate", "hi", "--address", fake.address)
    assert result.exit_code == 0, result.output
    assert result.stdout == "The quick brown fox\n"
    assert_matches(SUMMARY, result.stderr)
    assert messages(fake) == [[("user", "hi")]]


async def test_generate_sends_every_option(fake: FakeInference) -> None:
    """Each flag reaches its field; the key and the tenant travel as credentials."""
    flags = (
        "--system S --extra-key K --adapter poet --max-tokens 9 --temperature 0 --top-p 0.5 --top-k 3 --min-p 0.25 "
        "--seed 4 --stop END --stop ## --tenant acme --api-key pm-k --timeout 30 --model fake"
    )
    result = await run("generate", "hi", "--address", fake.address, *flags.split())
    assert result.exit_code == 0, result.output
    (request,) = fake.requests
    sampling = request.sampling
    assert messages(fake) == [[("system", "S"), ("user", "hi")]]
    assert (request.extra_key, request.adapter, request.model) == ("K", "poet", "fake")
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p) == (9, 0.0, 0.5)
    assert (sampling.top_k, sampling.min_p, sampling.seed) == (3, 0.25, 4)
    assert list(sampling.stop) == ["END", "##"]
    assert fake.metadata[0]["authorization"] == "Bearer pm-k"
    assert fake.metadata[0]["x-prefixmesh-tenant"] == "acme"


async def test_a_terminal_gets_the_likeliest_answer(fake: FakeInference) -> None:
    """Its own output limit and temperature; the rest is left to the server."""
    await run("generate", "hi", "--address", fake.address)
    sampling = fake.requests[0].sampling
    assert not sampling.HasField("seed")
    assert (sampling.temperature, sampling.top_p, sampling.max_tokens) == (0.0, 1.0, 512)


async def test_api_key_is_read_from_the_environment(fake: FakeInference) -> None:
    """So that it need not stand among a command's arguments."""
    await run("generate", "hi", "--address", fake.address, env={"PREFIXMESH_API_KEY": "pm-env"})
    assert fake.metadata[0]["authorization"] == "Bearer pm-env"


async def test_generate_sends_every_rule_of_sampling(fake: FakeInference, tmp_path: Path) -> None:
    """Each flag reaches its field; a schema may be in a file."""
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "integer"}')
    flags = (
        "--stop-token-id 5 --stop-token-id 6 --ignore-eos --min-tokens 2 --repetition-penalty 1.5 --frequency-penalty 0.5 "
        "--presence-penalty -0.5 --logit-bias 7=-100 --logit-bias 8=2.5 --logprobs 3 --resumed-output 4,5 --json"
    )
    result = await run(
        "generate", "hi", "--address", fake.address, *flags.split(), "--json-schema", f"@{schema}"
    )
    (request,) = fake.requests
    sampling = request.sampling
    assert (list(sampling.stop_token_ids), sampling.ignore_eos, sampling.min_tokens) == ([5, 6], True, 2)
    assert (sampling.repetition_penalty, sampling.frequency_penalty) == (1.5, 0.5)
    assert (sampling.presence_penalty, dict(sampling.logit_bias)) == (-0.5, {7: -100.0, 8: 2.5})
    assert (sampling.logprobs, sampling.json_schema) == (3, '{"type": "integer"}')
    assert request.resumed_output == pack([4, 5])
    assert result.exit_code == 0


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ("--logit-bias 7", "ID=BIAS"),
        ("--resumed-output a,b", "5,17,9"),
        ("--logprobs 3", "--json"),
        ("--json-schema @/no/such/file", "/no/such/file"),
    ],
)
async def test_a_rule_of_the_wrong_form_is_a_usage_error(flags: str, problem: str) -> None:
    result = await run("generate", "hi", *flags.split())
    assert result.exit_code == 2
    assert problem in result.stderr


async def test_generate_prints_every_branch_under_its_number(fake: FakeInference) -> None:
    """Once all are complete, since they come mixed; the summary is one line, with what the cache saved."""
    fake.saved = pb.PrefillSavings(linear=0.96, attention=0.92, total=0.951)
    flags = "--branches 2 --priority -3 --queue-timeout-ms 1500"
    result = await run("generate", "hi", "--address", fake.address, *flags.split())
    assert result.exit_code == 0, result.output
    assert result.stdout == "[0]\nThe quick brown fox\n[1]\nThe quick brown fox\n"
    summary = r"cached 1,152/1,204 prompt tokens · 95 % of prefill saved · worker-1 · first token \d+ ms\n"
    assert_matches(summary, result.stderr)
    (request,) = fake.requests
    assert (request.branches, request.priority, request.queue_timeout_ms) == (2, -3, 1500)


async def test_generate_raw_completes_plain_text_from_stdin(fake: FakeInference) -> None:
    """``-`` reads the prompt; ``--raw`` sends it as it stands, line end and all."""
    result = await run("generate", "--raw", "-", "--address", fake.address, stdin="Once upon é\n")
    assert result.exit_code == 0, result.output
    assert fake.requests[0].text == "Once upon é\n"


async def test_generate_json_prints_one_object(fake: FakeInference) -> None:
    """And nothing else, on either stream."""
    result = await run("generate", "hi", "--json", "--address", fake.address)
    data = json.loads(result.stdout)
    assert data["text"] == "The quick brown fox"
    assert (data["cached_tokens"], data["prompt_tokens"]) == (1152, 1204)
    assert [branch["text"] for branch in data["branches"]] == ["The quick brown fox"]
    assert result.stderr == ""


async def test_remembered_fleet_is_the_default(fake: FakeInference) -> None:
    """Without ``--address`` the call goes to the router that ``up`` remembered."""
    fleet_state.save(
        FleetState(
            router=fake.address,
            workers={},
            model="fake",
            ray_address="127.0.0.1:1",
            ray_namespace="prefixmesh",
            actor_names=(),
            started_ray=False,
            pid=None,
        )
    )
    assert (await run("generate", "hi")).stdout == "The quick brown fox\n"


@pytest.mark.parametrize(
    ("arguments", "stdin", "complaint"),
    [
        (["generate", "hi", "--max-tokens", "-1"], b"", "sampling.max_tokens: must be at least 0"),
        (["generate", "hi", "--temperature", "nan"], b"", "sampling.temperature"),
        (["generate", "hi", "--timeout", "0"], b"", "timeout_s"),
        (["generate", "hi", "--branches", "0"], b"", "branches: must be at least 1 and at most 64"),
        (["generate", "hi", "--branches", "2", "--resumed-output", "5"], b"", "branches: must be 1"),
        (["chat", "--priority", "101"], b"hi\n", "priority: must be"),
        (["generate", ""], b"", "PROMPT is empty"),
        (["generate", "-"], b"", "PROMPT is empty"),
        (["generate", "-"], b"\xff", "stdin: must be valid UTF-8"),
        (["generate", "hi", "--raw", "--system", "S"], b"", "--system needs a chat"),
        (["generate", "hi\udcff"], b"", "chat.messages[0].content: must be valid UTF-8"),
        (["chat", "--seed", "-5"], b"hi\n", "sampling.seed"),
    ],
)
async def test_bad_input_is_one_line_and_exit_code_2(
    fake: FakeInference, arguments: list[str], stdin: bytes, complaint: str
) -> None:
    """It names the field, and nothing is sent (F58)."""
    result = await run(*arguments, "--address", fake.address, stdin=stdin)
    assert result.exit_code == 2
    assert complaint in result.stderr
    assert fake.requests == []


async def test_address_without_a_port_is_refused() -> None:
    """Before anything is tried."""
    result = await run("generate", "hi", "--address", "localhost")
    assert result.exit_code == 2
    assert "address: must be host:port" in result.stderr


@pytest.mark.parametrize("command", [["generate", "hi"], ["chat"], ["models", "served"]])
async def test_nobody_there_names_the_address_and_the_cure(command: list[str]) -> None:
    """One line, exit code 1, no trace."""
    with refusing_address() as address:
        result = await run(*command, "--address", address)
    assert result.exit_code == 1
    assert_matches(f"Error: nobody answers at {address} .*start a fleet with: prefixmesh up\n", result.stderr)


async def test_a_timeout_that_passed_is_told_as_one(fake: FakeInference) -> None:
    """With the address, in words."""
    fake.hold_after = 1
    result = await run("generate", "hi", "--address", fake.address, "--timeout", "0.5")
    assert result.exit_code == 1
    assert result.stderr == f"Error: {fake.address} did not answer in full within the timeout\n"


async def test_a_missing_key_says_how_to_give_one(fake: FakeInference) -> None:
    """The server speaks of metadata, which no option is called."""
    fake.error = errors.AuthenticationError("credentials are missing")
    result = await run("generate", "hi", "--address", fake.address)
    assert result.exit_code == 1
    assert result.stderr.endswith("missing; give the key with $PREFIXMESH_API_KEY or --api-key\n")


async def test_status_of_what_is_no_router_says_so(fake: FakeInference) -> None:
    """A worker's address is easily taken for the router's."""
    result = await run("status", "--address", fake.address)
    assert result.exit_code == 1
    assert result.stderr == f"Error: {fake.address} is not a router, and only a router knows the fleet\n"


async def test_error_in_the_middle_keeps_what_was_printed(fake: FakeInference) -> None:
    """The partial answer's line is ended, then comes the error."""
    fake.error = errors.UnavailableError("worker-1 died")
    result = await run("generate", "hi", "--address", fake.address)
    assert result.exit_code == 1
    assert result.stdout == "The quick brown fox\n"
    assert result.stderr == "Error: worker-1 died\n"


async def test_answer_that_ends_its_own_line_gets_no_second_end(fake: FakeInference) -> None:
    """The prompt of the shell follows at once."""
    fake.words = ("a", "\n")
    assert (await run("generate", "hi", "--address", fake.address)).stdout == "a\n"


async def test_models_served(fake: FakeInference) -> None:
    """Name, context and adapters."""
    result = await run("models", "served", "--address", fake.address)
    assert result.stdout == "fake\tcontext 4,096 tokens\tpoet\n"


async def test_chat_sends_the_growing_history(fake: FakeInference) -> None:
    """Each turn carries all before it; blank lines are no turns; /new keeps the system prompt only; /quit ends."""
    lines = "one\n\ntwo\n/new\nthree\n/quit\nfour\n"
    result = await run("chat", "--system", "S", "--address", fake.address, stdin=lines)
    assert result.exit_code == 0, result.output
    answer = ("assistant", "The quick brown fox")
    assert messages(fake) == [
        [("system", "S"), ("user", "one")],
        [("system", "S"), ("user", "one"), answer, ("user", "two")],
        [("system", "S"), ("user", "three")],
    ]
    assert result.stdout == "The quick brown fox\n" * 3
    assert result.stderr.count("cached 1,152/1,204 prompt tokens") == 3


async def test_chat_ends_with_its_input(fake: FakeInference) -> None:
    """Also when the last line has no end."""
    result = await run("chat", "--address", fake.address, stdin="one")
    assert result.exit_code == 0
    assert messages(fake) == [[("user", "one")]]


async def test_piped_chat_fails_with_its_first_failing_turn(fake: FakeInference) -> None:
    """A script sees the exit code."""
    fake.error = errors.OverloadedError("queue full")
    result = await run("chat", "--address", fake.address, stdin="one\ntwo\n")
    assert result.exit_code == 1
    assert result.stderr.endswith("Error: queue full\n")
    assert len(fake.requests) == 1


async def test_interrupted_generate_cancels_at_the_server(fake: FakeInference) -> None:
    """Ctrl-C ends the program with 130, no trace, and the server stops computing (F17)."""
    fake.hold_after = 1
    process = await start("generate", "hi", "--address", fake.address, stdin=DEVNULL)
    assert process.stdout is not None
    assert await asyncio.wait_for(process.stdout.readexactly(3), WAIT_S) == b"The"
    process.send_signal(signal.SIGINT)
    out, err = await asyncio.wait_for(process.communicate(), WAIT_S)
    assert process.returncode == 130
    assert (out, err.strip()) == (b"\n", b"")
    await asyncio.wait_for(fake.cancelled.wait(), WAIT_S)


async def test_ctrl_c_stops_the_answer_and_not_the_chat(fake: FakeInference) -> None:
    """The server is told, and the part that was seen is in the next turn's history."""
    fake.hold_after = 1
    process = await start("chat", "--address", fake.address, stdin=PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(b"one\n")
    assert await asyncio.wait_for(process.stdout.readexactly(3), WAIT_S) == b"The"
    process.send_signal(signal.SIGINT)
    await asyncio.wait_for(fake.cancelled.wait(), WAIT_S)
    fake.hold_after = None
    out, err = await asyncio.wait_for(process.communicate(b"two\n"), WAIT_S)
    assert process.returncode == 0, err
    assert out == b"\nThe quick brown fox\n"
    assert b"stopped" in err
    assert b"Traceback" not in err
    assert messages(fake)[1] == [("user", "one"), ("assistant", "The"), ("user", "two")]


async def test_reader_that_goes_away_ends_the_program(fake: FakeInference) -> None:
    """``prefixmesh generate … | head -1`` leaves no trace behind and stops the server's work."""
    fake.words = ("word ",) * 20_000
    read_end, write_end = os.pipe()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "prefixmesh.cli.main", "generate", "hi", "--address", fake.address,
        stdin=DEVNULL, stdout=write_end, stderr=PIPE,
    )  # fmt: skip
    os.close(write_end)
    os.close(read_end)
    _, err = await asyncio.wait_for(process.communicate(), WAIT_S)
    assert process.returncode != 0
    assert b"Traceback" not in err


def assert_matches(pattern: str, text: str) -> None:
    assert re.fullmatch(pattern, text), text
