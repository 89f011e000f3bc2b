"""The ``Inference`` service of a router: the very service a worker has, with a decision in between.

A thin shell: who calls is ``rpc.identity``'s business, what is asked ``intake``'s, where it goes the core's, and ``relay`` carries it
there and back.
"""

import time

from prefixmesh.ids import RequestId
from prefixmesh.proto import codec
from prefixmesh.proto.v1 import inference_pb2 as pb
from prefixmesh.router.direct_abort import DirectAborts
from prefixmesh.router.intake import Intake
from prefixmesh.router.model import RouterModel
from prefixmesh.router.prepare import PreparedRequest, RequestPreparer
from prefixmesh.router.relay import Relay
from prefixmesh.router.routing import RouterCore
from prefixmesh.router.running import RunningRequests
from prefixmesh.rpc.identity import ApiKeys, identify
from prefixmesh.rpc.server import Send
from prefixmesh.rpc.status import AnyContext
from prefixmesh.served_model import check_model


class InferenceService:
    """Serves ``Inference`` from a fleet of workers."""

    def __init__(
        self,
        *,
        core: RouterCore,
        model: RouterModel,
        keys: ApiKeys | None,
        intake: Intake,
        preparer: RequestPreparer,
        relay: Relay,
        running: RunningRequests,
        direct_aborts: DirectAborts,
    ) -> None:
        self._core = core
        self._model = model
        self._keys = keys
        self._intake = intake
        self._preparer = preparer
        self._relay = relay
        self._running = running
        self._direct_aborts = direct_aborts

    async def Generate(  # noqa: N802  the service's own name
        self, message: pb.GenerateRequest, context: AnyContext, send: Send
    ) -> None:
        """Route a request, stream the answer back."""
        caller = identify(context.invocation_metadata(), self._keys)
        request = self._intake.read(message)
        time_left_s = context.time_remaining()
        deadline = None if time_left_s is None else time.monotonic() + time_left_s
        with self._intake.enter(caller.tenant) as running:

            async def prepare_anew() -> PreparedRequest:
                await self._intake.ask_adapters()
                return await self._intake.prepare(request, message, caller.tenant, running.request_id)

            prepared = await self._intake.prepare(request, message, caller.tenant, running.request_id)
            await self._relay.carry(prepared, running, send, deadline, prepare_anew)

    async def Abort(  # noqa: N802  the service's own name
        self, message: pb.AbortRequest, context: AnyContext
    ) -> pb.AbortResponse:
        """Stop a running request of the caller's tenant; anything else is left alone, silently."""
        caller = identify(context.invocation_metadata(), self._keys)
        request_id = RequestId(message.request_id)
        self._running.abort(request_id, caller.tenant)
        await self._direct_aborts.abort(request_id, caller.tenant)
        return pb.AbortResponse()

    async def Tokenize(  # noqa: N802  the service's own name
        self, message: pb.TokenizeRequest, context: AnyContext
    ) -> pb.TokenizeResponse:
        """Token ids of a prompt, as Generate would see them for a caller without ``extra_key``."""
        caller = identify(context.invocation_metadata(), self._keys)
        prompt = codec.decode_tokenize(message)
        check_model(self._model.name, message.model)
        # Long prompts wait for threads: bounded, and waited for at the end, like any other request.
        with self._intake.enter(caller.tenant):
            return pb.TokenizeResponse(ids=await self._preparer.tokenize(prompt, caller.tenant))

    async def ListModels(  # noqa: N802  the service's own name
        self, message: pb.ListModelsRequest, context: AnyContext
    ) -> pb.ListModelsResponse:
        """The one model that is served here, with the longest context that a worker offers now and the adapters that any has."""
        identify(context.invocation_metadata(), self._keys)
        context_length = self._core.registry.context_length or self._model.context_length
        model = pb.Model(
            name=self._model.name,
            revision=self._model.revision,
            context_length=context_length,
            adapters=self._core.registry.adapter_names(),
        )
        return pb.ListModelsResponse(models=[model])
