"""What it costs to copy a prefix's KV from another worker, against computing it: for ``prefixmesh bench copies``.

Two workers on one machine, each with its engine in a process of its own, as they serve; their two fronts share this process and its one
interpreter, which real workers do not, so a copy is told as no quicker than it is. A prefix nobody has seen is computed by one, copied by the
other, and then read from both and compared; in every repeat another one.
"""

import asyncio
import dataclasses
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any, Final

import grpc.aio
import numpy as np

from prefixmesh import fleet_secret
from prefixmesh.bench.engine_figures import Setup
from prefixmesh.bench.result import Result
from prefixmesh.bench.tier_figures import Figure, Report, measured
from prefixmesh.bench.yardstick import Yardstick, mean_yardstick, measure_yardstick
from prefixmesh.config import EngineConfig, WorkerConfig, describe
from prefixmesh.errors import InternalError
from prefixmesh.fleet_secret import FleetSecret
from prefixmesh.ids import Namespace, RequestId, TenantId
from prefixmesh.kv_source import KvSource
from prefixmesh.proto.v1 import inference_pb2 as pb
from prefixmesh.proto.v1 import inference_pb2_grpc, worker_control_pb2_grpc
from prefixmesh.proto.v1 import worker_control_pb2 as control
from prefixmesh.rpc.channel import open_channel
from prefixmesh.rpc.identity import AUTHORIZATION_METADATA
from prefixmesh.ticket import TICKET_METADATA, Ticket, sign
from prefixmesh.tokens import pack
from prefixmesh.worker.server import BoundWorker, WorkerServer

FIGURES: Final[Mapping[str, Figure]] = {
    figure.name: figure
    for figure in (
        Figure(name="compute", title="prefix computed", unit="ms"),
        Figure(name="copy", title="  copied from another worker", unit="ms"),
        Figure(name="copy_ratio", title="copied, of computed", unit="x", target=0.2),
        Figure(name="copy_rate", title="  bytes of KV", unit="GB/s"),
        Figure(name="first_token", title="first token, prefix copied for the request", unit="ms"),
        Figure(
            name="bytes_that_differ", title="bytes that differ from those computed", unit="bytes", target=0.0
        ),
    )
}
"""Every figure, in the order in which they are told."""

NAMESPACE: Final = b"prefixmesh bench"
OWN_TOKENS: Final = 24
"""Of a prompt, behind its prefix: the question."""

IDS: Final = (100, 500)
"""Prompts are drawn from these ids, which every vocabulary has."""

ENDS_S: Final = 600.0
"""For one call: longer than any machine takes that such a bench is of use on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Effort:
    """How large and how often."""

    prefix_tokens: int = 2_000
    repeats: int = 7
    page_size: int = 1


FULL: Final = Effort()
QUICK: Final = Effort(prefix_tokens=256, repeats=2)
BENCH_CONFIG: Final = EngineConfig(device="cpu")


@dataclass(slots=True)
class _Taken:
    """One for each repeat."""

    compute_ms: list[float] = field(default_factory=list)
    copy_ms: list[float] = field(default_factory=list)
    first_token_ms: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    differing: list[float] = field(default_factory=list)


class BenchWorker:
    """One of the two, and calls to it."""

    def __init__(self, bound: BoundWorker, secret: FleetSecret, channel: grpc.aio.Channel) -> None:
        self.bound = bound
        self._secret = secret
        self._inference: Any = inference_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]
        self._control: Any = worker_control_pb2_grpc.WorkerControlStub(channel)  # type: ignore[no-untyped-call]
        self._metadata = ((AUTHORIZATION_METADATA, f"Bearer {secret.control_token()}"),)
        self._asked = 0

    async def describe(self) -> control.DescribeResponse:
        """Who it is."""
        told: control.DescribeResponse = await self._control.Describe(
            control.DescribeRequest(), metadata=self._metadata, timeout=ENDS_S
        )
        return told

    async def answer(self, ids: list[int], max_tokens: int, *sources: KvSource) -> pb.Finished:
        """Serve one request, which its ticket lets copy from ``sources``."""
        self._asked += 1
        ticket = Ticket(
            request_id=RequestId(f"bench-{self._asked}"),
            tenant=TenantId("bench"),
            namespace=Namespace(NAMESPACE),
            incarnation=self.bound.incarnation,
            sources=sources,
        )
        request = pb.GenerateRequest(
            tokens=pb.TokenPrompt(ids=pack(ids)), sampling=pb.Sampling(temperature=0.0, max_tokens=max_tokens)
        )
        metadata = ((TICKET_METADATA, sign(ticket, self._secret)),)
        finished = pb.Finished()
        async for message in self._inference.Generate(request, metadata=metadata, timeout=ENDS_S):
            if message.WhichOneof("event") == "finished":
                finished = message.finished
        return finished

    async def flush(self) -> None:
        """Forget every prefix, so that nothing of one is found cached for another."""
        await self._control.Flush(control.FlushRequest(), metadata=self._metadata, timeout=ENDS_S)

    async def warm(self, ids: list[int], source: "BenchWorker") -> control.WarmResponse:
        """Bring a prefix from the other worker, and compute nothing."""
        warmed: control.WarmResponse = await self._control.Warm(
            control.WarmRequest(
                prefix=control.Prefix(namespace=NAMESPACE, token_ids=pack(ids)),
                sources=[
                    control.KvSource(
                        address=source.bound.address, incarnation=source.bound.incarnation, tokens=len(ids)
                    )
                ],
                copy_only=True,
            ),
            metadata=self._metadata,
            timeout=ENDS_S,
        )
        return warmed

    async def read(self, ids: list[int]) -> bytes:
        """All KV that it has of a prefix."""
        told = await self.describe()
        request = control.ReadPrefixRequest(
            prefix=control.Prefix(namespace=NAMESPACE, token_ids=pack(ids)),
            model_revision=told.model_revision,
            layout_digest=told.kv_layout,
        )
        call = self._control.ReadPrefix(request, metadata=self._metadata, timeout=ENDS_S)
        return b"".join([message.part.kv async for message in call])


def run_copies_bench(
    effort: Effort,
    config: EngineConfig = BENCH_CONFIG,
    progress: Callable[[str], None] = lambda _: None,
) -> Report:
    """Measure; ``progress`` is told what comes next. Takes a minute or two. Raises ConfigError and ModelFileError, and InternalError when
    something was not copied that should have been."""
    return asyncio.run(_run(effort, config, progress))


async def _run(effort: Effort, config: EngineConfig, progress: Callable[[str], None]) -> Report:
    pool = max(3 * (effort.prefix_tokens + OWN_TOKENS + 8), 1024)
    engine = dataclasses.replace(config, page_size=effort.page_size, max_total_tokens=pool)
    secret = fleet_secret.generate()
    before = measure_yardstick()
    async with AsyncExitStack() as stack:
        workers = []
        for name in ("holder", "taker"):
            progress(f"starting the {name}")
            workers.append(await _started(stack, WorkerConfig(worker_id=name, engine=engine), secret))
        holder, taker = workers
        rng = np.random.default_rng(0)
        taken = _Taken()
        for number in range(effort.repeats + 1):  # the first one warms up
            progress(f"prefix {number} of {effort.repeats}")
            one = taken if number else _Taken()
            await _measure(effort, holder, taker, rng, one)
        info = await holder.describe()
    return _report(effort, engine, info, taken, mean_yardstick([before, measure_yardstick()]))


async def _started(stack: AsyncExitStack, config: WorkerConfig, secret: FleetSecret) -> BenchWorker:
    server = WorkerServer(config, secret)
    bound = await server.start()
    stack.push_async_callback(server.stop, 0.0)
    channel = await stack.enter_async_context(open_channel(bound.address))
    return BenchWorker(bound, secret, channel)


async def _measure(
    effort: Effort,
    holder: BenchWorker,
    taker: BenchWorker,
    rng: np.random.Generator,
    taken: _Taken,
) -> None:
    """One prefix: computed, copied by a call of its own and compared; and another one, copied for a request."""
    size = effort.prefix_tokens // effort.page_size * effort.page_size
    first, second = (rng.integers(*IDS, size=size).tolist() for _ in range(2))
    await asyncio.gather(holder.flush(), taker.flush())
    began = time.perf_counter()
    await holder.answer(first, 0)
    taken.compute_ms.append(1e3 * (time.perf_counter() - began))
    began = time.perf_counter()
    warmed = await taker.warm(first, holder)
    copy_s = time.perf_counter() - began
    if warmed.copied_tokens != size:
        raise InternalError(f"{warmed.copied_tokens} of {size} tokens were copied: {warmed.copy_problem}")
    computed, copied = await holder.read(first), await taker.read(first)
    taken.copy_ms.append(1e3 * copy_s)
    taken.rates.append(len(computed) / copy_s / 1e9)
    differing = np.frombuffer(computed, np.uint8) != np.frombuffer(copied, np.uint8)
    taken.differing.append(float(np.count_nonzero(differing)))
    await asyncio.gather(holder.flush(), taker.flush())
    await holder.answer(second, 0)
    question = rng.integers(*IDS, size=OWN_TOKENS).tolist()
    source = KvSource(address=holder.bound.address, incarnation=holder.bound.incarnation, tokens=size)
    finished = await taker.answer(second + question, 1, source)
    if finished.usage.cached_tokens.peer != size:
        raise InternalError(f"a request had {finished.usage.cached_tokens.peer} of {size} tokens copied")
    taken.first_token_ms.append(finished.timings.first_token_ms)


def _report(
    effort: Effort,
    config: EngineConfig,
    info: control.DescribeResponse,
    taken: _Taken,
    yardstick: Yardstick,
) -> Report:
    ratio = statistics.median(taken.copy_ms) / statistics.median(taken.compute_ms)
    ratios = [copy / compute for copy, compute in zip(taken.copy_ms, taken.compute_ms, strict=True)]
    values = {
        "compute": (taken.compute_ms, {"prefix_tokens": float(effort.prefix_tokens)}),
        "copy": (taken.copy_ms, {}),
        "copy_ratio": ([ratio], {"largest_of_one": max(ratios)}),
        "copy_rate": (taken.rates, {}),
        "first_token": (taken.first_token_ms, {"own_tokens": float(OWN_TOKENS)}),
        "bytes_that_differ": (taken.differing, {}),
    }
    return Report(
        setup=Setup(
            model=info.model,
            dtype="as the engine chose",
            threads=config.threads or len(os.sched_getaffinity(0)),
            cores=len(os.sched_getaffinity(0)),
            versions={
                "python": platform.python_version(),
                **{name: version(name) for name in ("prefixmesh", "torch", "numpy", "grpcio")},
            },
            sizes=dataclasses.asdict(effort),
            settings=describe(config),
        ),
        results=[
            Result(figure=FIGURES[name], measurement=measured(figures), yardstick=yardstick, notes=notes)
            for name, (figures, notes) in values.items()
        ],
    )
