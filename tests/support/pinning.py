"""Pins of a fleet of processes: asked for at the router, and looked for at the workers themselves."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import grpc.aio

from prefixmesh.client import AsyncClient
from prefixmesh.proto.v1 import inference_pb2, router_pb2_grpc
from prefixmesh.proto.v1 import router_pb2 as pb
from prefixmesh.rpc.channel import open_channel
from prefixmesh.rpc.status import from_rpc_error
from prefixmesh.tokens import pack
from tests.support.failure_fleet import FailureFleet, ServerProcess, until
from tests.support.router_kit import headers


def some_ids(seed: int, length: int, vocab_size: int) -> list[int]:
    """A prompt that begins like no other seed's."""
    rng = random.Random(seed)
    return [rng.randrange(3, vocab_size) for _ in range(length)]


def ids_pin(name: str, ids: Sequence[int], **fields: Any) -> pb.PinSpec:
    """A wish for these tokens; ``fields`` as in ``PinSpec``."""
    return pb.PinSpec(name=name, tokens=inference_pb2.TokenPrompt(ids=pack(ids)), **fields)


class Pins:
    """The calls about pins of one caller."""

    def __init__(self, fleet: FailureFleet, *, key: str = "", tenant: str = "") -> None:
        self._fleet = fleet
        self._metadata = headers(tenant, key)

    async def put(self, spec: pb.PinSpec) -> pb.PutPinResponse:
        answer: pb.PutPinResponse = await self._call("PutPin", pb.PutPinRequest(spec=spec))
        return answer

    async def get(self, name: str, owner: str = "") -> pb.PinStatus:
        answer: pb.GetPinResponse = await self._call("GetPin", pb.GetPinRequest(name=name, owner=owner))
        return answer.pin

    async def listed(self, owner: str = "") -> pb.ListPinsResponse:
        answer: pb.ListPinsResponse = await self._call("ListPins", pb.ListPinsRequest(owner=owner))
        return answer

    async def remove(self, name: str, owner: str = "") -> bool:
        answer: pb.RemovePinResponse = await self._call(
            "RemovePin", pb.RemovePinRequest(name=name, owner=owner)
        )
        return answer.removed

    async def until_held(
        self,
        name: str,
        count: int,
        but: Callable[[pb.PinReplica], bool] = lambda _: False,
    ) -> tuple[float, list[str]]:
        """Wait until so many workers hold it and none lacks; the seconds that took, and their addresses. ``but`` are not counted."""
        holders: list[str] = []

        async def held() -> bool:
            pin = await self.get(name)
            holders[:] = [one.address for one in pin.replicas if one.state == "held" and not but(one)]
            return pin.held == pin.wanted == len(holders) == count

        took_s = await until(held, f"{count} workers hold {name}")
        return took_s, list(holders)

    async def _call(self, method: str, request: Any) -> Any:
        """The answer; the error of our tree when it fails."""
        async with open_channel(self._fleet.router.address) as channel:
            stub: Any = router_pb2_grpc.RouterStub(channel)  # type: ignore[no-untyped-call]
            try:
                return await getattr(stub, method)(request, timeout=30, metadata=self._metadata)
            except grpc.aio.AioRpcError as error:
                raise from_rpc_error(error) from error


async def cached_at(worker: ServerProcess | str, ids: Sequence[int]) -> int:
    """Prompt tokens that one worker finds cached when it is asked itself."""
    address = worker if isinstance(worker, str) else worker.address
    async with AsyncClient(address) as client:
        return (await client.generate(list(ids), max_tokens=1, temperature=0.0)).cached_tokens
