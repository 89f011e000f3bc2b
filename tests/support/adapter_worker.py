"""A fake worker that loads adapters: from folders that a test fills, slowly, wrongly or not at all, and says what it has when it is asked."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import grpc.aio

from prefixmesh.errors import InvalidRequestError, NotFoundError, PrefixmeshError
from prefixmesh.fleet_secret import FleetSecret
from prefixmesh.proto.v1 import router_pb2 as pb
from prefixmesh.proto.v1 import router_pb2_grpc
from prefixmesh.proto.v1 import worker_control_pb2 as control
from prefixmesh.rpc.identity import bearer_token
from prefixmesh.rpc.status import from_rpc_error
from tests.support.fake_worker import FakeWorker, Gate, Script
from tests.support.router_kit import Router, headers
from tests.support.servers import eventually

WAIT_S = 60.0


def digest_of(weights: str) -> str:
    """What a folder with these weights is known by."""
    return hashlib.blake2b(weights.encode(), digest_size=32).hexdigest()


class AdapterWorker(FakeWorker):
    """Its folders are its own until they are set to be others'."""

    def __init__(self, secret: FleetSecret, worker_id: str = "w0", script: Script | None = None) -> None:
        super().__init__(secret, worker_id, script)
        self.folders: dict[str, str] = {}
        """Weights by path."""

        self.started_with: dict[str, str] = {}
        """What each life begins with, by name: weights."""

        self.pinned: set[str] = set()
        self.loads: list[tuple[str, str]] = []
        """Every order to load that came: name and path."""

        self.unloads: list[str] = []
        self.before_load = Gate()
        self.load_error: PrefixmeshError | None = None
        self.loading = 0
        self.most_loading = 0

    async def start(self) -> "AdapterWorker":
        self.script.adapters = {name: digest_of(weights) for name, weights in self.started_with.items()}
        self.pinned.clear()
        await super().start()
        return self

    async def Describe(self, request: control.DescribeRequest, context: Any) -> control.DescribeResponse:
        answer = await super().Describe(request, context)
        for adapter in answer.adapters:
            adapter.pinned = adapter.name in self.pinned
        return answer

    async def LoadAdapter(  # type: ignore[override]
        self, message: control.LoadAdapterRequest, context: Any
    ) -> control.LoadAdapterResponse:
        assert bearer_token(dict(context.invocation_metadata() or ())) == self.secret.control_token()
        self.loads.append((message.name, message.path))
        self.loading += 1
        self.most_loading = max(self.most_loading, self.loading)
        try:
            await self.before_load.wait()
        finally:
            self.loading -= 1
        if self.load_error is not None:
            raise self.load_error
        if message.path not in self.folders:
            raise InvalidRequestError("path", f"there is no folder {message.path!r} below the adapter root")
        digest = digest_of(self.folders[message.path])
        self.script.adapters = self.script.adapters | {message.name: digest}
        (self.pinned.add if message.pinned else self.pinned.discard)(message.name)
        return control.LoadAdapterResponse(adapter=control.Adapter(name=message.name, digest=digest))

    async def UnloadAdapter(  # type: ignore[override]
        self, message: control.UnloadAdapterRequest, context: Any
    ) -> control.UnloadAdapterResponse:
        self.unloads.append(message.name)
        if message.name not in self.script.adapters:
            raise NotFoundError("it is not loaded here")
        self.script.adapters = {n: d for n, d in self.script.adapters.items() if n != message.name}
        self.pinned.discard(message.name)
        return control.UnloadAdapterResponse()


def adapter_workers(router: Router) -> list[AdapterWorker]:
    """A router's workers, as what they are."""
    assert all(isinstance(worker, AdapterWorker) for worker in router.workers)
    return [worker for worker in router.workers if isinstance(worker, AdapterWorker)]


def share_folders(workers: Sequence[AdapterWorker], folders: Mapping[str, str]) -> dict[str, str]:
    """All of them read these folders from now on, also when they change; returns them."""
    shared = dict(folders)
    for worker in workers:
        worker.folders = shared
    return shared


async def call(router: Router, method: str, request: Any, key: str = "") -> Any:
    """The answer of one call about adapters; the error of our tree when it fails."""
    stub: Any = router_pb2_grpc.RouterStub(router.channel)  # type: ignore[no-untyped-call]
    try:
        return await getattr(stub, method)(request, metadata=headers(key=key), timeout=30)
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from error


async def put(
    router: Router, name: str = "clerk", path: str = "a", *, pinned: bool = False
) -> pb.FleetAdapter:
    """Wish for an adapter."""
    spec = pb.AdapterSpec(name=name, path=path, pinned=pinned)
    answer: pb.PutAdapterResponse = await call(router, "PutAdapter", pb.PutAdapterRequest(spec=spec))
    return answer.adapter


async def remove(router: Router, name: str = "clerk") -> bool:
    """Take it back; whether it was wished for."""
    answer: pb.RemoveAdapterResponse = await call(router, "RemoveAdapter", pb.RemoveAdapterRequest(name=name))
    return answer.removed


async def listed(router: Router) -> dict[str, pb.FleetAdapter]:
    """What the router tells, by name."""
    answer = await call(router, "ListAdapters", pb.ListFleetAdaptersRequest())
    return {one.spec.name: one for one in answer.adapters}


async def states(router: Router, name: str = "clerk") -> dict[str, str]:
    """By worker, how far it is; empty for a name that is not listed."""
    told = (await listed(router)).get(name)
    return {} if told is None else {one.worker_id: one.state for one in told.workers}


async def until_held(router: Router, count: int, name: str = "clerk") -> pb.FleetAdapter:
    """The adapter, once so many workers have it and no ready one lacks it."""
    seen: list[pb.FleetAdapter] = []

    async def holds() -> bool:
        told = (await listed(router)).get(name)
        seen[:] = [] if told is None else [told]
        return told is not None and told.held == told.wanted == count

    await eventually(holds, WAIT_S)
    return seen[0]


async def until_states(router: Router, wanted: Mapping[str, str], name: str = "clerk") -> None:
    """Wait until every worker is so far."""

    async def is_so() -> bool:
        return await states(router, name) == wanted

    await eventually(is_so, WAIT_S)
