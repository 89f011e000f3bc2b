"""The ``Inference`` service of a worker: from a call's bytes to the engine and back.

A thin shell: ``caller`` says whose call it is, ``codec`` and ``prompts`` turn it into tokens, ``branch_events`` has the engine
compute, and ``call_answer`` makes messages of what the engine says. What is here is the order of those steps, and that every way
out of a call leaves nothing behind: the table entry is a context manager, and closing the engine's stream aborts what is in it.
"""

import logging
import math
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, NamedTuple

import msgspec

from prefixmesh.branch_seed import branch_seed
from prefixmesh.cache.namespace import short_digest
from prefixmesh.errors import AdapterChangedError, DeadlineError, PrefixmeshError, UnavailableError
from prefixmesh.ids import Namespace, RequestId
from prefixmesh.proto import codec
from prefixmesh.proto.v1 import inference_pb2 as pb
from prefixmesh.requests import (
    MAX_SEED,
    GenerateRequest,
    Prompt,
    SamplingParams,
    check_min_tokens,
    check_resumed,
    resolve_max_tokens,
    resumed_field,
)
from prefixmesh.rpc.status import AnyContext
from prefixmesh.served_model import check_model
from prefixmesh.text.detokenizer import IncrementalDetokenizer
from prefixmesh.text.prompt_threads import PromptThreads
from prefixmesh.text.prompts import BuiltPrompt, PromptBuilder
from prefixmesh.text.tokenizer import Tokenizer
from prefixmesh.tokens import count, unpack
from prefixmesh.worker.answer_stream import AnswerStream
from prefixmesh.worker.branch_events import branch_events, branch_ids
from prefixmesh.worker.call_answer import AnswerHead, CallAnswer
from prefixmesh.worker.caller import CallerCheck, WorkerCaller
from prefixmesh.worker.engine_client import EngineClient
from prefixmesh.worker.front_adapters import FrontAdapters
from prefixmesh.worker.front_load import FrontLoad, LoadPlace
from prefixmesh.worker.messages import Admitted, EngineInfo, EngineSampling, Refused, Submit
from prefixmesh.worker.request_copies import RequestCopies
from prefixmesh.worker.running_calls import CallPlace, RunningCalls
from prefixmesh.worker.ticket_gate import check_limits

_log = logging.getLogger(__name__)

MAX_QUOTED_CHARS: Final = 80
"""How much of a caller's own text an error or a log line repeats."""

MAX_PREPARATIONS: Final = 2
"""How often a request is prepared whose adapter is loaded anew between its preparation and its admission."""

_S_PER_MS: Final = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A request that is ready for the engine."""

    submits: tuple[Submit, ...]
    """One for each branch."""

    prompt: BuiltPrompt
    head: AnswerHead


class InferenceService:
    """Serves ``Inference`` from one engine. Call ``close`` when it is not used any more."""

    def __init__(
        self,
        *,
        engine: EngineClient,
        adapters: FrontAdapters,
        info: EngineInfo,
        worker_id: str,
        callers: CallerCheck,
        calls: RunningCalls,
        load: FrontLoad,
        prompts: PromptBuilder,
        tokenizer: Tokenizer,
        copies: RequestCopies,
    ) -> None:
        self._engine = engine
        self._adapters = adapters
        self._info = info
        self._worker_id = worker_id
        self._callers = callers
        self._calls = calls
        self._load = load
        self._prompts = prompts
        self._tokenizer = tokenizer
        self._copies = copies
        self._builders = PromptThreads()
        # Some model folders name the end of a turn only in the tokenizer's files.
        self._model_stops = tuple(dict.fromkeys((*info.eos_token_ids, *tokenizer.eos_token_ids)))

    def close(self) -> None:
        """Let go of the threads."""
        self._builders.close()

    async def Generate(  # noqa: N802  the service's own name
        self, message: pb.GenerateRequest, context: AnyContext
    ) -> AsyncIterator[pb.GenerateResponse]:
        """Compute a prompt and stream the answer."""
        arrived = time.monotonic()
        caller = self._callers.identify(context.invocation_metadata())
        request = codec.decode_generate(message)
        check_model(self._info.model, request.model)
        with self._enter(caller, request.branches) as places:
            for tries_left in reversed(range(MAX_PREPARATIONS)):
                prepared = await self._prepare(caller, request, arrived)
                prepared = await self._bring(caller, prepared, context.time_remaining(), arrived)
                prepared = _due(prepared, context.time_remaining())
                places.call.check_wanted()  # an abort until now was of what the engine does not know yet
                answer = self._begin(request, prepared.head)
                try:
                    async with aclosing(self._logged(request, prepared, answer, places, arrived)) as messages:
                        async for response in messages:
                            yield response
                    return
                except AdapterChangedError:
                    # A router must make its ticket anew; here the name is only looked up once more.
                    if caller.ticket is not None or not tries_left:
                        raise

    async def Abort(  # noqa: N802  the service's own name
        self, message: pb.AbortRequest, context: AnyContext
    ) -> pb.AbortResponse:
        """Stop a running request of the caller's tenant; anything else is left alone, silently."""
        caller = self._callers.identify(context.invocation_metadata())
        request_id = RequestId(message.request_id)
        branches = self._calls.abort(request_id, caller.tenant)
        if branches:
            self._copies.abort(request_id)
        for engine_id in branch_ids(request_id, branches):
            self._engine.abort(engine_id)
        return pb.AbortResponse()

    async def Tokenize(  # noqa: N802  the service's own name
        self, message: pb.TokenizeRequest, context: AnyContext
    ) -> pb.TokenizeResponse:
        """Token ids of a prompt, as Generate would see them for a caller without ``extra_key``."""
        caller = self._callers.identify(context.invocation_metadata())
        prompt = codec.decode_tokenize(message)
        check_model(self._info.model, message.model)
        with self._calls.enter(
            caller.request_id, caller.tenant
        ):  # long prompts wait for threads: bounded, too
            self._callers.admit(caller)
            built = await self._build(prompt, self._callers.namespace(caller, ""))
        return pb.TokenizeResponse(ids=built.tokens)

    async def ListModels(  # noqa: N802  the service's own name
        self, message: pb.ListModelsRequest, context: AnyContext
    ) -> pb.ListModelsResponse:
        """The one model this worker serves, and its limits."""
        self._callers.identify(context.invocation_metadata())
        info = self._info
        model = pb.Model(
            name=info.model,
            revision=info.model_revision,
            context_length=info.context_length,
            adapters=self._adapters.names(),
        )
        return pb.ListModelsResponse(models=[model])

    @contextmanager
    def _enter(self, caller: WorkerCaller, branches: int) -> "Iterator[_Places]":
        """A place among the running calls and one in the load, for a caller whose ticket is used up by it."""
        with self._calls.enter(caller.request_id, caller.tenant, branches) as place:
            self._callers.admit(caller)
            with self._load.enter(caller.router_id, caller.request_id, branches) as load:
                yield _Places(place, load)

    async def _prepare(self, caller: WorkerCaller, request: GenerateRequest, arrived: float) -> Prepared:
        adapter_digest = self._adapter_digest(caller, request.adapter)
        namespace = self._callers.namespace(caller, request.extra_key, adapter_digest)
        prompt = await self._build(request.prompt, namespace)
        prompt_tokens = count(prompt.tokens)
        sampling = self._engine_sampling(request.sampling, prompt_tokens)
        check_resumed(request, sampling.max_tokens)
        if caller.ticket is not None:
            check_limits(
                caller.ticket,
                prompt_tokens=prompt_tokens,
                max_tokens=sampling.max_tokens,
                branches=request.branches,
            )
        head = AnswerHead(
            request_id=caller.request_id,
            worker_id=self._worker_id,
            model=self._info.model,
            namespace=namespace,
            adapter_digest=adapter_digest,
            prompt_tokens=prompt_tokens,
            retokenized_tokens=prompt.retokenized_tokens,
            resumed_tokens=sum(map(count, request.resumed)),
            seed=sampling.seed,
            prefill_shape=self._info.prefill_shape,
            prepared_ms=(time.monotonic() - arrived) * 1e3,
        )
        submit = Submit(
            request_id=caller.request_id,
            namespace=namespace,
            tokens=prompt.tokens,
            sampling=sampling,
            owner=caller.tenant,
            priority=request.priority,
            adapter=adapter_digest,
            queue_timeout_s=request.queue_timeout_ms * _S_PER_MS,
            public=caller.public,
        )
        return Prepared(submits=_branch_submits(submit, request.resumed), prompt=prompt, head=head)

    async def _bring(
        self, caller: WorkerCaller, prepared: Prepared, time_left_s: float | None, arrived: float
    ) -> Prepared:
        """The same with what other workers gave, where the ticket names some."""
        if caller.ticket is None or not caller.ticket.sources:
            return prepared
        brought = await self._copies.bring(caller.ticket, prepared.prompt.tokens, time_left_s)
        head = replace(
            prepared.head,
            prepared_ms=(time.monotonic() - arrived) * 1e3,
            peer_begin=brought.found,
            peer_end=brought.found + brought.copied,
        )
        return replace(prepared, head=head)

    def _adapter_digest(self, caller: WorkerCaller, name: str) -> str:
        """The content to compute with. Behind a router that is what the ticket's namespace was made with, or nothing."""
        if caller.ticket is None:
            return self._adapters.digest_of(name)
        self._adapters.check(name, caller.ticket.adapter_digest)
        return caller.ticket.adapter_digest

    def _begin(self, request: GenerateRequest, head: AnswerHead) -> CallAnswer:
        sampling = request.sampling
        return CallAnswer(
            head,
            [
                AnswerStream(
                    IncrementalDetokenizer(self._tokenizer, sampling.stop, sampling.min_tokens),
                    unpack(packed).tolist(),
                    branch,
                    resumed_field(request, branch),
                )
                for branch, packed in enumerate(request.resumed)
            ],
        )

    async def _build(self, prompt: Prompt, namespace: Namespace) -> BuiltPrompt:
        return await self._builders.run(prompt, partial(self._prompts.build, prompt, namespace))

    def _engine_sampling(self, sampling: SamplingParams, prompt_tokens: int) -> EngineSampling:
        info = self._info
        max_tokens = resolve_max_tokens(prompt_tokens, sampling.max_tokens, info.context_length)
        check_min_tokens(sampling.min_tokens, max_tokens)
        # A grammar says itself where the answer may end, and has no other way to let it.
        has_grammar = sampling.json_schema is not None or sampling.regex is not None
        model_stops = () if sampling.ignore_eos and not has_grammar else self._model_stops
        return EngineSampling(
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            seed=secrets.randbelow(MAX_SEED + 1) if sampling.seed is None else sampling.seed,
            max_tokens=max_tokens,
            stop_token_ids=(*model_stops, *sampling.stop_token_ids),
            min_tokens=sampling.min_tokens,
            logprobs=sampling.logprobs,
            json_schema=sampling.json_schema or "",
            regex=sampling.regex or "",
            repetition_penalty=sampling.repetition_penalty,
            frequency_penalty=sampling.frequency_penalty,
            presence_penalty=sampling.presence_penalty,
            bias_ids=tuple(sampling.logit_bias),
            biases=tuple(sampling.logit_bias.values()),
        )

    async def _logged(
        self,
        request: GenerateRequest,
        prepared: Prepared,
        answer: CallAnswer,
        places: "_Places",
        arrived: float,
    ) -> AsyncGenerator[pb.GenerateResponse]:
        outcome = ""
        try:
            async with aclosing(self._answer(prepared, answer, places)) as messages:
                async for response in messages:
                    yield response
        except Exception as error:
            outcome = error.reason if isinstance(error, PrefixmeshError) else type(error).__name__
            raise
        finally:
            _log_end(request, prepared.head, answer, outcome or answer.finished or "cancelled", arrived)

    async def _answer(
        self, prepared: Prepared, answer: CallAnswer, places: "_Places"
    ) -> AsyncGenerator[pb.GenerateResponse]:
        stopping: set[int] = set()
        places.load.submitted(prepared.head.prompt_tokens)
        async with aclosing(branch_events(self._engine, prepared.submits)) as events:
            async for branch, event in events:
                if isinstance(event, Refused) and event.adapter_left:
                    if answer.cached_tokens is None:
                        raise AdapterChangedError(event.problem)
                    raise UnavailableError("the adapter was unloaded before all branches had begun")
                places.load.on_event(branch, event)
                responses = answer.on_event(branch, event)
                if isinstance(event, Admitted):
                    places.call.admitted()
                one = answer.branches[branch]
                if one.finished is not None:
                    # Before its end is told: the next turn may follow at once.
                    self._prompts.remember(prepared.head.namespace, prepared.prompt, one.text, one.token_ids)
                for response in responses:
                    yield response
                if one.stop_found and one.finished is None and branch not in stopping:
                    stopping.add(branch)
                    self._engine.abort(prepared.submits[branch].request_id)


class _Places(NamedTuple):
    """What a call holds for as long as it runs."""

    call: CallPlace
    load: LoadPlace


def _due(prepared: Prepared, time_left_s: float | None) -> Prepared:
    """The same with what its deadline leaves it; raises DeadlineError where that is nothing."""
    if time_left_s is None:
        return prepared
    if time_left_s <= 0:
        raise DeadlineError(
            "the deadline passed while the prompt was being built, or copied from another worker"
        )
    submits = tuple(msgspec.structs.replace(submit, time_left_s=time_left_s) for submit in prepared.submits)
    return replace(prepared, submits=submits)


def _branch_submits(submit: Submit, resumed: Sequence[bytes]) -> tuple[Submit, ...]:
    """The requests to the engine that answer one call: the same but for name, seed and what each goes on from, which is ``resumed``.
    Only the first may give up waiting: what the call waits for is the prompt, which the others share once it is computed. What goes on was
    admitted once, and no limit of this worker ends it."""
    if any(resumed) and not submit.queue_timeout_s:
        submit = msgspec.structs.replace(submit, queue_timeout_s=math.inf)
    if len(resumed) == 1:
        return (msgspec.structs.replace(submit, resumed=resumed[0]),)
    seed = submit.sampling.seed
    return tuple(
        msgspec.structs.replace(
            submit,
            request_id=engine_id,
            sampling=msgspec.structs.replace(submit.sampling, seed=branch_seed(seed, branch)),
            resumed=packed,
            queue_timeout_s=math.inf if branch else submit.queue_timeout_s,
            is_follower=branch > 0,
        )
        for branch, (engine_id, packed) in enumerate(
            zip(branch_ids(RequestId(submit.request_id), len(resumed)), resumed, strict=True)
        )
    )


def _log_end(
    request: GenerateRequest, head: AnswerHead, answer: CallAnswer, outcome: str, arrived: float
) -> None:
    _log.info(
        "request_ended id=%s client_id=%r namespace=%s outcome=%s prompt_tokens=%d cached_tokens=%d "
        "completion_tokens=%d branches=%d ms=%.1f",
        head.request_id,
        request.client_request_id[:MAX_QUOTED_CHARS],
        short_digest(head.namespace),
        outcome,
        head.prompt_tokens,
        answer.cached_tokens or 0,
        answer.completion_tokens,
        request.branches,
        (time.monotonic() - arrived) * 1e3,
    )
