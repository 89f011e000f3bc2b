"""What comes after: an engine that is killed under its calls, and a worker that starts again with other weights."""

import asyncio
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from prefixmesh import fleet_secret
from prefixmesh.config import EngineConfig, WorkerConfig
from prefixmesh.errors import UnavailableError
from prefixmesh.fleet_secret import FleetSecret
from prefixmesh.proto.v1 import inference_pb2 as pb
from prefixmesh.proto.v1 import worker_control_pb2 as control_pb
from prefixmesh.worker.process_engine import ProcessEngine
from prefixmesh.worker.server import WorkerServer
from tests.support.router_kit import token_request
from tests.support.servers import Answer, eventually, failure_of, real_worker, rest_of, running_worker
from tests.support.tiny_model import TinyShape, make_tiny_model

NOTICE_S = 5.0
"""Longest that a death may go unnoticed (F65); far more than it takes."""

ENDLESS = pb.Sampling(temperature=0, max_tokens=3000, ignore_eos=True)


def tiny_settings(model: Path, **settings: Any) -> EngineConfig:
    defaults: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_total_tokens": 12_000, "threads": 1}
    return EngineConfig(model=str(model), **(defaults | settings))


@pytest.mark.slow
async def test_a_killed_engine_ends_every_call_in_whatever_state_it_is(tmp_path: Path) -> None:
    """F65: decoding, in the middle of a prompt, queued, and just sent: each ends in UNAVAILABLE, and so does every later one."""
    model = make_tiny_model(tmp_path / "tiny")
    settings = tiny_settings(model, max_running_requests=2, chunked_prefill_size=4)
    async with real_worker(settings, in_process=False) as worker:

        async def state() -> control_pb.DescribeResponse:
            told: control_pb.DescribeResponse = await worker.control.Describe(
                control_pb.DescribeRequest(), metadata=worker.control_metadata()
            )
            return told

        async def is_running(running: int, queued: int) -> bool:
            told = await state()
            return (told.running_requests, told.queued_requests) == (running, queued)

        calls = {"decoding": worker.inference.Generate(token_request([5], sampling=ENDLESS))}
        for _ in range(3):
            assert (await calls["decoding"].read()).WhichOneof("event") in ("started", "delta")
        calls["prefilling"] = worker.inference.Generate(token_request([6] * 4000))
        await eventually(lambda: is_running(2, 0))
        calls["queued"] = worker.inference.Generate(token_request([7]))
        await eventually(lambda: is_running(2, 1))
        calls["sent"] = worker.inference.Generate(token_request([8]))
        engine = worker.server._engine
        assert isinstance(engine, ProcessEngine)
        assert engine.pid is not None
        os.kill(engine.pid, signal.SIGKILL)
        async with asyncio.timeout(NOTICE_S):
            for call in calls.values():
                with pytest.raises(UnavailableError):
                    await rest_of(call)
            with pytest.raises(UnavailableError, match="unexpectedly"):
                await worker.server.wait_closed()
        assert isinstance(await failure_of(worker, token_request([9])), UnavailableError)


@dataclass(frozen=True)
class Life:
    """What one life of a worker told and answered to one prompt, asked twice."""

    revision: str
    first: Answer
    second: Answer


async def live(model: Path, secret: FleetSecret) -> Life:
    config = WorkerConfig(engine=tiny_settings(model), in_process=True)
    request = token_request([5, 6, 7, 8] * 10, sampling=pb.Sampling(temperature=0, max_tokens=8))
    async with running_worker(WorkerServer(config, secret), secret) as worker:
        (told,) = (await worker.inference.ListModels(pb.ListModelsRequest())).models
        return Life(told.revision, await worker.generate(request), await worker.generate(request))


async def test_new_weights_in_the_same_folder_are_another_namespace(tmp_path: Path) -> None:
    """F33: nothing of the old weights can be found by it, here or wherever KV is kept by namespace; the same weights again are the
    same namespace."""
    secret = fleet_secret.generate()
    lives = []
    for seed in (1, 2, 1):
        model = make_tiny_model(tmp_path / "tiny", TinyShape(seed=seed))
        lives.append(await live(model, secret))
    for one in lives:
        assert (one.first.started.cached_tokens.device, one.second.started.cached_tokens.device) == (0, 39)
        assert one.first.started.namespace_digest == one.second.started.namespace_digest
        assert one.first.token_ids == one.second.token_ids
    old, new, again = (
        (one.revision, one.first.started.namespace_digest, one.first.token_ids) for one in lives
    )
    assert old == again
    assert not any(before == after for before, after in zip(old, new, strict=True))
