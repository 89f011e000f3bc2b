"""``prefixmesh bench route``: that it measures everything, and that its sums are right. Nothing timed is asserted."""

import json
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from click.testing import CliRunner

from prefixmesh.bench import route_bench
from prefixmesh.bench.route_drive import Cost, generate_cost, route_cost
from prefixmesh.bench.route_plan import KINDS, NAMES, TOGETHER, line_through
from prefixmesh.bench.route_process import Measured, measured_echo
from prefixmesh.bench.route_prompts import chats, generate_messages, packed_prompts, route_messages
from prefixmesh.bench.route_servers import serve_proxy
from prefixmesh.cli.main import main
from prefixmesh.proto.v1 import inference_pb2, router_pb2
from prefixmesh.rpc.channel import open_channel
from prefixmesh.tokens import count
from tests.support.fake_inference import FakeInference


class Stage:
    """In the place of all processes: servers that take so many µs, the router 100 and 5 a frame more."""

    def __init__(self, _effort: object) -> None:
        self.echo, self.proxy, self.router = "echo", "proxy", "router"

    def __enter__(self) -> "Stage":
        return self

    def __exit__(self, *_: object) -> None:
        pass


async def _route_cost(server: str, messages: Iterator[bytes], requests: int) -> Cost:
    assert router_pb2.RouteRequest.FromString(next(messages)).request.WhichOneof("prompt")
    return Cost(300.0 if server == "echo" else 400.0, 1)


async def _generate_cost(server: str, messages: Iterator[bytes], requests: int) -> Cost:
    frames = 2 + inference_pb2.GenerateRequest.FromString(next(messages)).sampling.max_tokens
    return Cost(500.0 + 50 * frames if server == "proxy" else 600.0 + 55 * frames, frames)


def test_what_a_router_takes_more_is_told_for_requests_and_for_frames(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(route_bench, "_Stage", Stage)
    monkeypatch.setattr(route_bench, "route_cost", _route_cost)
    monkeypatch.setattr(route_bench, "generate_cost", _generate_cost)
    result = CliRunner().invoke(
        main,
        [
            *("bench", "route", "--quick", "--json"),
            *("--only", "route_100", "--only", "route_4096", "--only", "generate"),
        ],
    )
    assert result.exit_code == 0, result.output
    medians = {one["name"]: one["median"] for one in json.loads(result.stdout)["figures"]}
    assert medians == {
        "route_100": 100.0,
        "route_4096": 100.0,
        "generate": pytest.approx(100.0),
        "generate_frame": pytest.approx(5.0),
    }
    unknown = CliRunner().invoke(main, ["bench", "route", "--only", "nothing"])
    assert (unknown.exit_code, "route_4096" in unknown.stderr) == (2, True)


def test_every_figure_can_be_asked_for_or_comes_with_one_that_can() -> None:
    assert set(NAMES) | set(TOGETHER) == set(KINDS)
    assert set(TOGETHER.values()) <= set(NAMES)


def test_a_line_goes_through_both_its_points() -> None:
    line = line_through((10.0, 700.0), (110.0, 1_700.0))
    assert line == (600.0, 10.0)


def test_packed_prompts_share_their_first_half_and_are_no_two_the_same() -> None:
    prompts = packed_prompts(100)
    first, second = next(prompts), next(prompts)
    assert count(first) == 100
    assert first[:200] == second[:200]
    assert first != second


def test_chats_share_their_system_prompt_and_are_no_two_the_same() -> None:
    asked = chats()
    first, second = next(asked), next(asked)
    assert first.messages[0] == second.messages[0]
    assert first.messages[1] != second.messages[1]


async def test_the_no_op_proxy_passes_every_frame_on() -> None:
    async with FakeInference() as worker:
        server, address = await serve_proxy(worker.address)
        times = iter(range(100))
        measured = Measured(address, _Clock(times))  # type: ignore[arg-type]
        cost = await generate_cost(measured, generate_messages(packed_prompts(8), 4), 3)
        assert cost.frames == len(worker.words) + 2
        assert len(worker.requests) == 4, "one for the connection, three that count"
        await server.stop(None)


class _Clock:
    """A pipe to a server that tells a second more each time."""

    def __init__(self, times: Iterator[int]) -> None:
        self._times = times

    def send(self, _: object) -> None:
        pass

    def recv(self) -> float:
        return float(next(self._times))


@pytest.mark.slow
async def test_a_server_in_a_process_of_its_own_answers_and_tells_its_time() -> None:
    with measured_echo() as echo:
        before = echo.cpu_s()
        cost = await route_cost(echo, route_messages(packed_prompts(64)), 50)
        assert (cost.frames, echo.cpu_s() > before) == (1, True)
        async with open_channel(echo.address) as channel:
            ask: Any = channel.unary_unary("/prefixmesh.v1.Router/Explain")
            with pytest.raises(grpc.RpcError):
                await ask(b"")
