"""A workload sent to a running cluster over gRPC, by the client that callers use: for ``prefixmesh bench serve``.

Requests come by the very schedule of a replay (``sim/replay_arrivals``), with the event loop's clock in the simulation's place. What becomes of
each is noted by ``serve_figures``; an error ends its request alone, and whoever follows it comes all the same.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from prefixmesh.bench.serve_figures import Served
from prefixmesh.bench.serve_prompts import DEFAULT_IDS, PromptMaker
from prefixmesh.client import Answer, AsyncClient, TokenPrompt
from prefixmesh.errors import ConfigError, PrefixmeshError
from prefixmesh.sim.replay_arrivals import Arrivals
from prefixmesh.sim.workload import Workload, WorkloadRequest
from prefixmesh.tokens import pack

DEFAULT_TIMEOUT_S: Final = 600.0
"""For one answer: longer than any queue that is worth measuring."""

_MS_PER_S: Final = 1e3


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeSpec:
    """How a workload is sent."""

    address: str | None
    """Of a router, or of a worker; None: the fleet that is up."""

    api_key: str | None = None
    """With one, all tenants of the workload are this key's."""

    speed: float = 1.0
    concurrency: int = 0
    """So many conversations at a time, whatever the workload's times; 0: by its times."""

    seed: int = 0
    ids: int = DEFAULT_IDS
    """Prompts are made of token ids below it."""

    timeout_s: float = DEFAULT_TIMEOUT_S
    adapters: bool = False
    """Whether requests name the adapters that the workload says, which must be loaded; otherwise the base model answers all."""

    def __post_init__(self) -> None:
        for name, least in (("speed", 0.0), ("timeout_s", 0.0)):
            if not least < getattr(self, name) < float("inf"):
                raise ConfigError(f"{name} must be a number above {least:g}, got {getattr(self, name)}")
        if self.concurrency < 0:
            raise ConfigError(f"concurrency must be 0 or more, got {self.concurrency}")
        if self.concurrency and self.speed != 1.0:
            raise ConfigError(
                "speed cannot be with concurrency, where no request comes by the workload's times"
            )


class LoopClock:
    """The event loop's time as a simulation's, from the moment in which the workload's first request comes."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._loop = asyncio.get_running_loop()
        self._began = self._loop.time() - start_s

    @property
    def now(self) -> float:
        """Seconds."""
        return self._loop.time() - self._began

    def call_at(self, when: float, call: Callable[[], Any]) -> object:
        """Call it then."""
        return self._loop.call_at(self._began + when, call)

    def call_later(self, delay_s: float, call: Callable[[], Any]) -> object:
        """Call it after so many seconds."""
        return self._loop.call_later(delay_s, call)


class ServeRun:
    """One run. ``served`` grows as requests end, so that who is interrupted has what there is."""

    def __init__(
        self, workload: Workload, spec: ServeSpec, on_served: Callable[[Served], None] = lambda _: None
    ) -> None:
        """``on_served`` is told of each request that is over."""
        self.served: list[Served] = []
        self.problems: dict[str, str] = {}
        """By kind of error, what the first one said."""

        self._requests = workload.requests
        self._spec = spec
        self._on_served = on_served
        self._prompts = PromptMaker(workload.block_size, spec.seed, spec.ids)
        self._clients: dict[str, AsyncClient] = {}
        self._running: set[asyncio.Task[None]] = set()
        self._is_over = False

    async def run(self) -> None:
        """Send all, and return when all are over. Cancelled, it cancels what runs, which is not among ``served``."""
        spec, requests = self._spec, self._requests
        first_ms = min(one.arrival_ms for one in requests if one.arrival_ms is not None)
        self._clock = LoopClock(0.0 if spec.concurrency else first_ms / _MS_PER_S / spec.speed)
        self._all_over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._arrivals = Arrivals(
            self._clock, requests, self._arrive, speed=spec.speed, concurrency=spec.concurrency
        )
        try:
            await self._all_over
        finally:
            self._is_over = True
            for task in tuple(self._running):
                task.cancel()
            await asyncio.gather(*self._running, return_exceptions=True)
            for client in self._clients.values():
                await client.close()

    def _arrive(self, number: int) -> None:
        if self._is_over:
            return  # a pause ended after the run
        task = asyncio.get_running_loop().create_task(self._serve(number, self._clock.now))
        self._running.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: "asyncio.Task[None]") -> None:
        self._running.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not self._all_over.done():
            self._all_over.set_exception(error)  # a bug of ours must not make the run wait for ever

    async def _serve(self, number: int, arrived_s: float) -> None:
        request = self._requests[number]
        note = partial(Served, number, arrived_s)
        prompt = self._prompts.prompt(number, request)
        sent_s = self._clock.now
        try:
            answer = await self._ask(request, prompt)
        except PrefixmeshError as error:
            self.problems.setdefault(error.reason, str(error))
            self._ended(note(self._clock.now, error.reason))
            return
        self._prompts.answered(request, prompt, pack(answer.token_ids))
        self._ended(
            note(
                sent_s + answer.total_s,
                worker=answer.worker_id,
                policy=answer.started.routing.policy if answer.started.routing else "",
                prompt_tokens=answer.prompt_tokens,
                output_tokens=answer.completion_tokens,
                cached=answer.cached,
                first_s=None if answer.first_token_s is None else sent_s + answer.first_token_s,
                interruptions=answer.interruptions,
            )
        )

    async def _ask(self, request: WorkloadRequest, prompt: bytes) -> Answer:
        """As long as the workload says, whatever the model would say: greedy, and past its own end of turn."""
        client = self._client(request.tenant)
        adapter = request.adapter if self._spec.adapters else ""
        return await client.generate(
            TokenPrompt(prompt),
            temperature=0.0,
            ignore_eos=True,
            max_tokens=request.output_length,
            adapter=adapter,
        )

    def _client(self, tenant: str) -> AsyncClient:
        spec = self._spec
        name = tenant if spec.api_key is None else ""
        client = self._clients.get(name)
        if client is None:
            client = self._clients[name] = AsyncClient(
                spec.address, api_key=spec.api_key, tenant=name or None, timeout_s=spec.timeout_s
            )
        return client

    def _ended(self, one: Served) -> None:
        self.served.append(one)
        self._on_served(one)
        self._arrivals.ended(one.number)
        if len(self.served) == len(self._requests) and not self._all_over.done():
            self._all_over.set_result(None)
