"""The ``Inference`` service of a worker: from a call's bytes to the engine and back.

A thin shell: ``caller`` says whose call it is, ``codec`` and ``prompts`` turn it into tokens, the engine computes, and
``answer_stream`` makes messages of what the engine says. What is here is the order of those steps, and that every way out of a
call leaves nothing behind: the table entry is a context manager, and closing the engine's stream aborts the request in it.
"""

import logging
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Final

from prefixmesh.cache.namespace import short_digest
from prefixmesh.errors import PrefixmeshError, UnavailableError
from prefixmesh.ids import Namespace, RequestId
from prefixmesh.proto import codec
from prefixmesh.proto.v1 import inference_pb2 as pb
from prefixmesh.requests import (
    MAX_SEED,
    GenerateRequest,
    Prompt,
    SamplingParams,
    check_min_tokens,
    resolve_max_tokens,
)
from prefixmesh.rpc.status import AnyContext
from prefixmesh.served_model import check_model
from prefixmesh.text.detokenizer import IncrementalDetokenizer
from prefixmesh.text.prompt_threads import PromptThreads
from prefixmesh.text.prompts import BuiltPrompt, PromptBuilder
from prefixmesh.text.tokenizer import Tokenizer
from prefixmesh.tokens import count, unpack
from prefixmesh.worker.answer_stream import AnswerHead, AnswerStream
from prefixmesh.worker.caller import CallerCheck, WorkerCaller
from prefixmesh.worker.engine_client import EngineClient
from prefixmesh.worker.messages import EngineInfo, EngineSampling, Submit
from prefixmesh.worker.running_calls import RunningCalls

_log = logging.getLogger(__name__)

MAX_QUOTED_CHARS: Final = 80
"""How much of a caller's own text an error or a log line repeats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A request that is ready for the engine."""

    submit: Submit
    prompt: BuiltPrompt
    head: AnswerHead


class InferenceService:
    """Serves ``Inference`` from one engine. Call ``close`` when it is not used any more."""

    def __init__(
        self,
        *,
        engine: EngineClient,
        info: EngineInfo,
        worker_id: str,
        callers: CallerCheck,
        calls: RunningCalls,
        prompts: PromptBuilder,
        tokenizer: Tokenizer,
    ) -> None:
        self._engine = engine
        self._info = info
        self._worker_id = worker_id
        self._callers = callers
        self._calls = calls
        self._prompts = prompts
        self._tokenizer = tokenizer
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
        check_model(self._info.model, request.model, request.adapter)
        with self._calls.enter(caller.request_id, caller.tenant):
            prepared = await self._prepare(caller, request, arrived)
            answer = AnswerStream(
                prepared.head,
                IncrementalDetokenizer(self._tokenizer, request.sampling.stop, request.sampling.min_tokens),
                unpack(request.resumed_output).tolist(),
            )
            outcome = "cancelled"
            try:
                async with aclosing(self._answer(prepared.submit, answer)) as messages:
                    async for response in messages:
                        if answer.finished is not None and response.HasField("finished"):
                            outcome = answer.finished
                            # Before it is sent: the next turn may follow at once.
                            self._prompts.remember(
                                prepared.head.namespace, prepared.prompt, answer.text, answer.token_ids
                            )
                        yield response
            except Exception as error:
                outcome = error.reason if isinstance(error, PrefixmeshError) else type(error).__name__
                raise
            finally:
                _log_end(request, prepared.head, answer, outcome, arrived)

    async def Abort(  # noqa: N802  the service's own name
        self, message: pb.AbortRequest, context: AnyContext
    ) -> pb.AbortResponse:
        """Stop a running request of the caller's tenant; anything else is left alone, silently."""
        caller = self._callers.identify(context.invocation_metadata())
        request_id = RequestId(message.request_id)
        if self._calls.belongs_to(request_id, caller.tenant):
            self._engine.abort(request_id)
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
            built = await self._build(prompt, self._callers.namespace(caller, ""))
        return pb.TokenizeResponse(ids=built.tokens)

    async def ListModels(  # noqa: N802  the service's own name
        self, message: pb.ListModelsRequest, context: AnyContext
    ) -> pb.ListModelsResponse:
        """The one model this worker serves, and its limits."""
        self._callers.identify(context.invocation_metadata())
        info = self._info
        model = pb.Model(
            name=info.model, revision=info.model_revision, context_length=info.context_length, adapters=()
        )
        return pb.ListModelsResponse(models=[model])

    async def _prepare(self, caller: WorkerCaller, request: GenerateRequest, arrived: float) -> Prepared:
        namespace = self._callers.namespace(caller, request.extra_key)
        prompt = await self._build(request.prompt, namespace)
        prompt_tokens = count(prompt.tokens)
        sampling = self._engine_sampling(request.sampling, prompt_tokens)
        head = AnswerHead(
            request_id=caller.request_id,
            worker_id=self._worker_id,
            model=self._info.model,
            namespace=namespace,
            prompt_tokens=prompt_tokens,
            retokenized_tokens=prompt.retokenized_tokens,
            seed=sampling.seed,
            prepared_ms=(time.monotonic() - arrived) * 1e3,
        )
        submit = Submit(
            request_id=caller.request_id,
            namespace=namespace,
            tokens=prompt.tokens,
            sampling=sampling,
            owner=caller.tenant,
            resumed=request.resumed_output,
        )
        return Prepared(submit=submit, prompt=prompt, head=head)

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

    async def _answer(self, submit: Submit, answer: AnswerStream) -> AsyncGenerator[pb.GenerateResponse]:
        stopping = False
        async with aclosing(self._engine.submit(submit)) as events:
            async for event in events:
                for response in answer.on_event(event):
                    yield response
                if answer.finished is not None:
                    return
                if answer.stop_found and not stopping:
                    stopping = True
                    self._engine.abort(submit.request_id)
        raise UnavailableError("the engine ended the stream before the answer")


def _log_end(
    request: GenerateRequest, head: AnswerHead, answer: AnswerStream, outcome: str, arrived: float
) -> None:
    _log.info(
        "request_ended id=%s client_id=%r namespace=%s outcome=%s prompt_tokens=%d cached_tokens=%d "
        "completion_tokens=%d ms=%.1f",
        head.request_id,
        request.client_request_id[:MAX_QUOTED_CHARS],
        short_digest(head.namespace),
        outcome,
        head.prompt_tokens,
        answer.cached_tokens,
        answer.completion_tokens,
        (time.monotonic() - arrived) * 1e3,
    )
