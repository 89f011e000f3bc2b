"""What callers met, counted at the ``Inference`` service's edge: how calls ended, how many tokens, how long it took.

``CountedInference`` is the service with a counter around it: it looks at the messages that pass and changes none, so neither the
service nor the engine knows that anybody counts. Labels come from fixed sets: nothing that a caller sends or is becomes one.
"""

import asyncio
from bisect import bisect_left
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Final, cast

from prometheus_client import Metric
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector

from prefixmesh.errors import PrefixmeshError
from prefixmesh.proto.v1 import inference_pb2 as pb
from prefixmesh.rpc.status import AnyContext
from prefixmesh.tokens import TOKEN_BYTES
from prefixmesh.worker.service import InferenceService

OUTCOMES: Final = (
    "stop",
    "length",
    "cancelled",
    "deadline_exceeded",
    "invalid_request",
    "unauthenticated",
    "access_denied",
    "not_found",
    "overloaded",
    "queue_timeout",
    "over_budget",
    "adapter_changed",
    "unavailable",
    "internal",
)
"""How a call may end: the two ways in which an answer does, the caller's leaving, its deadline, and the reasons of our errors."""

SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
"""Bounds of the histograms' buckets: from a warm prompt on a GPU to a long answer on a CPU."""

_REASONS: Final = {pb.FINISH_REASON_STOP: "stop", pb.FINISH_REASON_LENGTH: "length"}
_S_PER_MS: Final = 1e-3


class Spread:
    """A histogram over ``SECONDS``."""

    def __init__(self) -> None:
        self._counts = [0] * (len(SECONDS) + 1)
        self._sum_s = 0.0

    def observe(self, value_s: float) -> None:
        """Count one value. O(log buckets)."""
        self._counts[bisect_left(SECONDS, value_s)] += 1
        self._sum_s += value_s

    def family(self, name: str, documentation: str) -> Metric:
        """As Prometheus knows it: each bucket with those below it."""
        bounds = (*map(str, SECONDS), "+Inf")
        buckets = list(zip(bounds, map(float, accumulate(self._counts)), strict=True))
        return HistogramMetricFamily(name, documentation, buckets=buckets, sum_value=self._sum_s)


@dataclass(slots=True)
class Call:
    """One call as far as it has come."""

    outcome: str = "cancelled"
    """Until it is known: whoever leaves tells nobody."""


@dataclass(slots=True, eq=False)
class CallMetrics(Collector):
    """Counts of all Generate calls since the worker's start. One event loop owns it."""

    in_flight: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    retokenized_tokens: int = 0
    outcomes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(OUTCOMES, 0))
    adapter_outcomes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(OUTCOMES, 0))
    """Of those calls that named an adapter."""

    saved_requests: int = 0
    saved: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(("linear", "attention", "total"), 0.0)
    )
    queued: Spread = field(default_factory=Spread)
    prefill: Spread = field(default_factory=Spread)
    load_back: Spread = field(default_factory=Spread)
    first_token: Spread = field(default_factory=Spread)
    decode: Spread = field(default_factory=Spread)

    @contextmanager
    def call(self, context: AnyContext, *, names_adapter: bool) -> Iterator[Call]:
        """Count one call, however it ends."""
        call = Call()
        self.in_flight += 1
        try:
            yield call
        except (asyncio.CancelledError, GeneratorExit):
            remaining = context.time_remaining()
            if call.outcome == "cancelled" and remaining is not None and remaining <= 0:
                call.outcome = "deadline_exceeded"
            raise
        except Exception as error:
            call.outcome = outcome_of(error)
            raise
        finally:
            self.in_flight -= 1
            self.outcomes[call.outcome] += 1
            self.adapter_outcomes[call.outcome] += names_adapter

    def see(self, call: Call, message: pb.GenerateResponse) -> None:
        """Count what a message tells."""
        match message.WhichOneof("event"):
            case "started":
                self.prompt_tokens += message.started.prompt_tokens
            case "delta":
                self.completion_tokens += len(message.delta.token_ids) // TOKEN_BYTES
            case "finished":
                call.outcome = _REASONS.get(message.finished.reason, "internal")
                self._see_finished(message.finished)

    def _see_finished(self, finished: pb.Finished) -> None:
        usage, timings = finished.usage, finished.timings
        self.retokenized_tokens += usage.retokenized_tokens
        self.queued.observe(timings.queued_ms * _S_PER_MS)
        if usage.cached_tokens.host:
            self.load_back.observe(timings.load_back_ms * _S_PER_MS)
        if usage.completion_tokens:
            self.prefill.observe(timings.prefill_ms * _S_PER_MS)
            self.first_token.observe(timings.first_token_ms * _S_PER_MS)
            self.decode.observe(timings.decode_ms * _S_PER_MS)
        if usage.HasField("prefill_saved"):
            self.saved_requests += 1
            for part in self.saved:
                self.saved[part] += getattr(usage.prefill_saved, part)

    def collect(self) -> Iterator[Metric]:
        """Every family, in the order of ``docs/metrics.md``."""
        yield _by_label("prefixmesh_requests", "Calls that ended, by how.", "outcome", self.outcomes)
        yield _by_label(
            "prefixmesh_adapter_requests",
            "Calls that named an adapter and ended, by how.",
            "outcome",
            self.adapter_outcomes,
        )
        yield GaugeMetricFamily("prefixmesh_requests_in_flight", "Calls being answered.", self.in_flight)
        yield CounterMetricFamily(
            "prefixmesh_prompt_tokens", "Prompt tokens of calls that started.", self.prompt_tokens
        )
        yield CounterMetricFamily(
            "prefixmesh_completion_tokens", "Tokens generated and sent.", self.completion_tokens
        )
        yield CounterMetricFamily(
            "prefixmesh_retokenized_tokens",
            "Tokens of chat histories whose generated ids were not remembered.",
            self.retokenized_tokens,
        )
        yield self.queued.family("prefixmesh_queue_seconds", "From arrival to admission into a batch.")
        yield self.prefill.family("prefixmesh_prefill_seconds", "From admission to the first token.")
        yield self.load_back.family(
            "prefixmesh_load_back_seconds",
            "Of that, the wait for KV from the host, of answers that had some of there.",
        )
        yield self.first_token.family("prefixmesh_first_token_seconds", "From arrival to the first token.")
        yield self.decode.family("prefixmesh_decode_seconds", "From the first token to the last.")
        saved = SummaryMetricFamily(
            "prefixmesh_prefill_saved_share",
            "Shares of prompts' prefill that the cache saved.",
            labels=["part"],
        )
        for part, total in self.saved.items():
            saved.add_metric([part], self.saved_requests, total)
        yield saved


class CountedInference:
    """The ``Inference`` service, counted."""

    def __init__(self, service: InferenceService, metrics: CallMetrics) -> None:
        self._service = service
        self._metrics = metrics
        self.Abort = service.Abort
        self.Tokenize = service.Tokenize
        self.ListModels = service.ListModels

    async def Generate(  # noqa: N802  the service's own name
        self, message: pb.GenerateRequest, context: AnyContext
    ) -> AsyncIterator[pb.GenerateResponse]:
        """The service's own, with every message looked at."""
        metrics = self._metrics
        with metrics.call(context, names_adapter=bool(message.adapter)) as call:
            responses = cast(AsyncGenerator[pb.GenerateResponse], self._service.Generate(message, context))
            async with aclosing(responses):
                async for response in responses:
                    metrics.see(call, response)
                    yield response


def outcome_of(error: BaseException) -> str:
    """The outcome that a call has which ends in ``error``: its reason, or the nearest of its bases' that is one of ``OUTCOMES``."""
    for kind in type(error).__mro__:
        reason = kind.reason.lower() if issubclass(kind, PrefixmeshError) else ""
        if reason in OUTCOMES:
            return reason
    return "internal"


def _by_label(name: str, documentation: str, label: str, values: "dict[str, int]") -> Metric:
    family = CounterMetricFamily(name, documentation, labels=[label])
    for value, number in values.items():
        family.add_metric([value], number)
    return family
