"""A ``Router`` service without a router, for what commands show of pins: it keeps them, and says of each what the test tells it to."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from prefixmesh.errors import BudgetError, NotFoundError
from prefixmesh.proto.v1 import router_pb2 as pb
from prefixmesh.rpc.server import add_service, make_server

TENANT: Final = "acme"
"""Who every caller is here."""


@dataclass
class ScriptedPins:
    """See the module. Everything may be turned at any time."""

    wanted: int = 2
    held: int = 0
    rises: bool = False
    """Each question finds one worker more that holds it."""

    why: str = ""
    room: int | None = None
    """Most pins; one more is refused for the budget."""

    acting: bool = True
    heat: pb.ListHeatResponse = field(default_factory=pb.ListHeatResponse)
    workers: list[pb.WorkerView] = field(default_factory=list)
    pins: dict[tuple[str, str], pb.PinSpec] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    """Methods that changed something, and the names they were about, in order."""

    async def ListWorkers(self, _message: pb.ListWorkersRequest, _: Any) -> pb.ListWorkersResponse:
        return pb.ListWorkersResponse(workers=self.workers)

    async def PutPin(self, message: pb.PutPinRequest, _: Any) -> pb.PutPinResponse:
        spec = pb.PinSpec()
        spec.CopyFrom(message.spec)
        spec.owner = spec.owner or TENANT
        if not spec.public:
            spec.tenant = spec.tenant or spec.owner
        key = (spec.owner, spec.name)
        if self.room is not None and key not in self.pins and len(self.pins) >= self.room:
            raise BudgetError(f"pin {spec.name!r} of {spec.owner}: 20 tokens wanted, 10 of 100 are left")
        changed = self.pins.get(key) != spec
        self.pins[key] = spec
        self.calls.append(f"put {spec.name}")
        return pb.PutPinResponse(pin=self._status(spec, with_prompt=False), changed=changed)

    async def GetPin(self, message: pb.GetPinRequest, _: Any) -> pb.GetPinResponse:
        spec = self.pins.get((message.owner or TENANT, message.name))
        if spec is None:
            raise NotFoundError(f"{message.name} is no pin of {message.owner or TENANT}")
        if self.rises:
            self.held = min(self.wanted, self.held + 1)
        return pb.GetPinResponse(pin=self._status(spec, with_prompt=True))

    async def ListPins(self, message: pb.ListPinsRequest, _: Any) -> pb.ListPinsResponse:
        owner = message.owner or TENANT
        mine = [spec for spec in self.pins.values() if owner in ("*", spec.owner)]
        budgets = [
            pb.PinBudgetUse(owner=one, charged_tokens=500, budget_tokens=2_000)
            for one in dict.fromkeys(spec.owner for spec in mine)
        ]
        return pb.ListPinsResponse(
            pins=[self._status(spec, with_prompt=False) for spec in mine],
            acting=self.acting,
            actions={"warmed": 3, "warm_failed": 1},
            budgets=budgets,
        )

    async def RemovePin(self, message: pb.RemovePinRequest, _: Any) -> pb.RemovePinResponse:
        self.calls.append(f"remove {message.name}")
        gone = self.pins.pop((message.owner or TENANT, message.name), None)
        return pb.RemovePinResponse(removed=gone is not None)

    async def ListHeat(self, _message: pb.ListHeatRequest, _: Any) -> pb.ListHeatResponse:
        return self.heat

    def _status(self, spec: pb.PinSpec, *, with_prompt: bool) -> pb.PinStatus:
        told = pb.PinSpec()
        told.CopyFrom(spec)
        if not with_prompt:
            told.ClearField(spec.WhichOneof("prompt") or "text")
        replicas = [
            pb.PinReplica(
                worker_id=f"worker-{number}",
                address=f"127.0.0.1:{7000 + number}",
                held_tokens=1_234 if number < self.held else 0,
                state="held" if number < self.held else "warming",
                generation=3,
            )
            for number in range(self.wanted)
        ]
        return pb.PinStatus(
            spec=told,
            tokens=1_234,
            wanted=self.wanted,
            held=self.held,
            missing=self.wanted - self.held,
            why=self.why,
            replicas=replicas,
            expires_in_ms=spec.ttl_ms,
            generation=3,
            namespace_digest="abcdef",
        )


@asynccontextmanager
async def serving_pins(scripted: ScriptedPins) -> AsyncIterator[str]:
    """Serve it on a free port; gives the address."""
    server = make_server()
    port = server.add_insecure_port("127.0.0.1:0")
    add_service(server, pb.DESCRIPTOR.services_by_name["Router"], scripted, partial=True)
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)
