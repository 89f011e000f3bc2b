"""One call of Generate on a worker, from its request to its last message, with an engine that does as it is told."""

import logging

import grpc
import grpc.aio
import msgspec
import pytest

from prefixmesh.config import EngineConfig
from prefixmesh.errors import (
    CancelledError,
    InternalError,
    InvalidRequestError,
    OverloadedError,
    UnavailableError,
)
from prefixmesh.proto.v1 import inference_pb2 as pb
from prefixmesh.rpc.channel import MAX_MESSAGE_BYTES
from prefixmesh.text.prompt_threads import MAX_INLINE_CHARS
from prefixmesh.tokens import pack
from prefixmesh.worker.messages import Refused
from tests.support.scripted_engine import (
    CONTEXT_LENGTH,
    EOS,
    INFO,
    VOCAB_SIZE,
    ScriptedEngine,
    byte_tokenizer,
)
from tests.support.servers import Worker, eventually, failure_of, records_of, rest_of, scripted_worker

TENANT = "x-prefixmesh-tenant"


def text_request(text: str = "ping", **sampling: object) -> pb.GenerateRequest:
    return pb.GenerateRequest(text=text, sampling=pb.Sampling(**sampling))  # type: ignore[arg-type]


def chat_request(*turns: tuple[str, str]) -> pb.GenerateRequest:
    messages = [pb.ChatMessage(role=role, content=content) for role, content in turns]
    return pb.GenerateRequest(chat=pb.ChatPrompt(messages=messages))


async def test_an_answer_is_started_deltas_finished() -> None:
    """Everything a caller is promised is in the stream, and adds up."""
    engine = ScriptedEngine("Hello, world.")
    async with scripted_worker(engine, worker_id="w-7") as worker:
        answer = await worker.generate(text_request("ping", seed=42))
    started, usage, timings = answer.started, answer.finished.usage, answer.finished.timings
    assert (started.worker_id, started.model, started.seed) == ("w-7", "scripted", 42)
    assert (started.prompt_tokens, started.cached_tokens.device) == (4, 0)
    assert started.request_id == engine.submitted[0].request_id
    assert started.namespace_digest == engine.submitted[0].namespace[:4].hex()
    assert answer.text == "Hello, world."
    assert answer.token_ids == list(b"Hello, world.")
    assert answer.finished.reason == pb.FINISH_REASON_STOP
    assert (usage.prompt_tokens, usage.completion_tokens, usage.retokenized_tokens) == (4, 13, 0)
    assert timings.queued_ms >= 1.0
    assert timings.first_token_ms >= 3.0
    assert (timings.prefill_ms, timings.decode_ms) == (2.0, 4.0)


async def test_the_engine_gets_what_was_asked_for() -> None:
    """Sampling reaches the engine whole, with the model's own end tokens unless they are to be ignored."""
    engine = ScriptedEngine()
    async with scripted_worker(engine) as worker:
        await worker.generate(
            text_request(temperature=0, top_k=5, top_p=0.5, stop_token_ids=[7], max_tokens=3)
        )
        await worker.generate(text_request(ignore_eos=True, stop_token_ids=[7]))
    first, second = (submit.sampling for submit in engine.submitted)
    assert (first.temperature, first.top_k, first.top_p, first.max_tokens) == (0.0, 5, 0.5, 3)
    assert set(first.stop_token_ids) == {EOS, 7}
    assert set(second.stop_token_ids) == {7}
    assert second.max_tokens == CONTEXT_LENGTH - 4


async def test_a_turn_ends_where_only_the_tokenizer_says_so() -> None:
    """Model folders may name the end of a turn in the tokenizer's files alone; ignore_eos goes past it all the same."""
    engine = ScriptedEngine(info=msgspec.structs.replace(INFO, eos_token_ids=()))
    async with scripted_worker(engine) as worker:
        await worker.generate(text_request())
        await worker.generate(text_request(ignore_eos=True))
    first, second = engine.submitted
    assert first.sampling.stop_token_ids == byte_tokenizer().eos_token_ids != ()
    assert second.sampling.stop_token_ids == ()


async def test_a_seed_is_drawn_and_told_when_none_is_given() -> None:
    """Two requests without a seed differ, and each can be repeated from what Started says."""
    engine = ScriptedEngine()
    async with scripted_worker(engine) as worker:
        seeds = [(await worker.generate(text_request())).started.seed for _ in range(2)]
    assert [submit.sampling.seed for submit in engine.submitted] == seeds
    assert seeds[0] != seeds[1]


async def test_running_into_the_limit_is_length() -> None:
    """max_tokens cuts the answer and is named as the reason."""
    async with scripted_worker(ScriptedEngine("Hello")) as worker:
        answer = await worker.generate(text_request(max_tokens=2))
    assert (answer.text, answer.finished.reason) == ("He", pb.FINISH_REASON_LENGTH)
    assert answer.finished.usage.completion_tokens == 2


async def test_no_output_token_is_an_answer_too() -> None:
    """max_tokens 0 computes the prompt and says nothing (F58)."""
    async with scripted_worker(ScriptedEngine()) as worker:
        answer = await worker.generate(text_request(max_tokens=0))
    assert (answer.deltas, answer.finished.usage.completion_tokens) == ([], 0)
    assert answer.finished.reason == pb.FINISH_REASON_LENGTH


@pytest.mark.parametrize("tokens_per_step", [1, 3, 100])
async def test_a_stop_string_ends_the_answer_before_it(tokens_per_step: int) -> None:
    """The text ends before the stop string, the ids with the token that completed it, and the engine stops."""
    engine = ScriptedEngine("one two END three")
    engine.tokens_per_step = tokens_per_step
    async with scripted_worker(engine) as worker:
        answer = await worker.generate(text_request(stop=["END", "never"]))
        assert not engine.running
    assert answer.text == "one two "
    assert answer.token_ids == list(b"one two END")
    assert answer.finished.usage.completion_tokens == 11
    assert answer.finished.reason == pb.FINISH_REASON_STOP


async def test_a_found_stop_string_stops_the_engine() -> None:
    """An engine that would go on for ever is told to stop."""
    engine = ScriptedEngine("a.b" + "x" * 900)
    engine.hold_after_tokens = 10
    async with scripted_worker(engine) as worker:
        answer = await worker.generate(text_request(stop=["."]), timeout_s=5)
    assert answer.text == "a"


async def test_a_stop_string_that_does_not_come_is_text() -> None:
    """What was held back for a stop string is sent when the answer ends without it."""
    async with scripted_worker(ScriptedEngine("the EN")) as worker:
        answer = await worker.generate(text_request(stop=["END"]))
    assert answer.text == "the EN"
    assert answer.token_ids == list(b"the EN")


HARD_TEXTS = [
    "日本語のテキスト、漢字とかな。",
    "👩‍👩‍👧‍👦 family, 🏳️‍🌈 flag, 👍🏽 thumb",
    "각각의 한글 음절",
    "السلام عليكم",
    "e\u0301 combining, \u200b zero width, \ufeff mark",
    "mixed: aé漢😀b",
]


@pytest.mark.parametrize("tokens_per_step", [1, 2, 7])
async def test_no_half_character_is_ever_sent(tokens_per_step: int) -> None:
    """With a token per byte, the joined stream is the text, and no piece holds a replacement character (F61)."""
    for text in HARD_TEXTS:
        engine = ScriptedEngine(text)
        engine.tokens_per_step = tokens_per_step
        async with scripted_worker(engine) as worker:
            answer = await worker.generate(text_request())
        assert answer.text == text
        assert bytes(answer.token_ids) == text.encode()
        assert "\ufffd" not in "".join(delta.text for delta in answer.deltas)


async def test_a_chat_finds_the_ids_of_its_own_answers() -> None:
    """The second turn sends the first answer as text and gets the ids that were generated, retokenising nothing."""
    engine = ScriptedEngine("fine")
    async with scripted_worker(engine) as worker:
        await worker.generate(chat_request(("user", "hi")))
        engine.answer = "bye"
        history = (("user", "hi"), ("assistant", "fine"), ("user", "and?"))
        known = await worker.generate(chat_request(*history))
        unknown = await worker.generate(chat_request(*history), ((TENANT, "somebody else"),))
    assert known.finished.usage.retokenized_tokens == 0
    assert unknown.finished.usage.retokenized_tokens == len("fine")


BAD_REQUESTS = [
    (pb.GenerateRequest(), "prompt"),
    (text_request(""), "text"),
    (pb.GenerateRequest(chat=pb.ChatPrompt()), "chat.messages"),
    (pb.GenerateRequest(tokens=pb.TokenPrompt(ids=b"")), "tokens.ids"),
    (pb.GenerateRequest(tokens=pb.TokenPrompt(ids=b"abc")), "tokens.ids"),
    (pb.GenerateRequest(tokens=pb.TokenPrompt(ids=pack([VOCAB_SIZE]))), "tokens.ids"),
    (pb.GenerateRequest(tokens=pb.TokenPrompt(ids=pack([2**32 - 1]))), "tokens.ids"),
    (pb.GenerateRequest(text="a", model="gpt-9"), "model"),
    (pb.GenerateRequest(text="a", adapter="x"), "adapter"),
    (pb.GenerateRequest(text="a", extra_key="x" * 1025), "extra_key"),
    (pb.GenerateRequest(text="a", request_id="x" * 257), "request_id"),
    (text_request(temperature=float("nan")), "sampling.temperature"),
    (text_request(top_p=float("inf")), "sampling.top_p"),
    (text_request(max_tokens=-1), "sampling.max_tokens"),
    (text_request(max_tokens=2**31), "sampling.max_tokens"),
    (text_request(max_tokens=CONTEXT_LENGTH), "sampling.max_tokens"),
    (text_request(stop=["x"] * 1000), "sampling.stop"),
    (text_request(stop=[""]), "sampling.stop"),
]


@pytest.mark.parametrize(
    ("request_", "field"), BAD_REQUESTS, ids=[f"{n}-{f}" for n, (_, f) in enumerate(BAD_REQUESTS)]
)
async def test_bad_input_names_the_field_and_the_next_request_works(
    request_: pb.GenerateRequest, field: str
) -> None:
    """Every kind of bad input is INVALID_ARGUMENT with the field's name, and does no harm (F58, F64)."""
    engine = ScriptedEngine()
    async with scripted_worker(engine) as worker:
        error = await failure_of(worker, request_)
        assert isinstance(error, InvalidRequestError)
        assert error.field == field
        assert not engine.submitted
        assert (await worker.generate(text_request())).text == engine.answer


@pytest.mark.parametrize("text", [" ", "\n\n", "\t", "\u3000", "\x00"])
async def test_a_blank_prompt_is_a_prompt(text: str) -> None:
    """Blank is not empty: it is tokenised and answered (F58)."""
    async with scripted_worker(ScriptedEngine()) as worker:
        assert (await worker.generate(text_request(text))).started.prompt_tokens == len(text.encode())


@pytest.mark.parametrize("excess", [-2, -1, 0, 1, 2])
async def test_lengths_at_the_edge_are_served_or_refused(excess: int) -> None:
    """Around the context's limit, with and without max_tokens, nothing is an internal error (F59)."""
    text = "x" * (CONTEXT_LENGTH + excess)
    async with scripted_worker(ScriptedEngine("ab")) as worker:
        for max_tokens in (None, 0, 1):
            fits = excess + (1 if max_tokens is None else max_tokens) <= 0
            request = text_request(text) if max_tokens is None else text_request(text, max_tokens=max_tokens)
            if fits:
                assert (await worker.generate(request)).started.prompt_tokens == len(text)
            else:
                error = await failure_of(worker, request)
                assert isinstance(error, InvalidRequestError)
                assert str(CONTEXT_LENGTH + excess) in str(error) or str(CONTEXT_LENGTH) in str(error)


async def test_a_long_prompt_is_built_beside_the_event_loop() -> None:
    """A prompt above the inline size gives the same tokens as one below it."""
    engine = ScriptedEngine(info=msgspec.structs.replace(INFO, context_length=10_000))
    text = "é" * (MAX_INLINE_CHARS + 1)
    async with scripted_worker(engine) as worker:
        assert (await worker.generate(text_request(text))).started.prompt_tokens == 2 * len(text)
    assert engine.submitted[0].tokens == pack(list(text.encode()))


async def test_a_body_above_the_cap_is_refused_and_the_next_is_served() -> None:
    """Beyond the cap the client's own channel refuses; just below, the model's limit, before anything is tokenised (F62, F64)."""
    async with scripted_worker(ScriptedEngine()) as worker:
        error = await failure_of(worker, text_request("x" * MAX_MESSAGE_BYTES))
        assert isinstance(error, InvalidRequestError)
        assert str(MAX_MESSAGE_BYTES) in str(error)
        error = await failure_of(worker, text_request("x" * (MAX_MESSAGE_BYTES - 100)))
        assert isinstance(error, InvalidRequestError)
        assert error.field == "text"
        await worker.generate(text_request())


async def test_the_same_client_id_twice_is_two_requests() -> None:
    """The caller's own id is for logs only (F60)."""
    engine = ScriptedEngine()
    engine.hold_after_tokens = 1
    request = pb.GenerateRequest(text="a", request_id="mine")
    async with scripted_worker(engine) as worker:
        calls = [worker.inference.Generate(request) for _ in range(2)]
        ids = [(await call.read()).started.request_id for call in calls]
        assert ids[0] != ids[1]
        assert engine.running == set(ids)
        await worker.inference.Abort(pb.AbortRequest(request_id=ids[0]))
        with pytest.raises(CancelledError):
            await rest_of(calls[0])
        engine.release()
        assert (await rest_of(calls[1]))[-1].HasField("finished")


async def test_what_the_engine_refuses_is_told_as_it_is() -> None:
    """A refusal with a field is the caller's error; one without means that the engine is full."""
    engine = ScriptedEngine()
    async with scripted_worker(engine) as worker:
        engine.refusal = Refused(request_id="", field="prompt", problem="can never fit")
        error = await failure_of(worker, text_request())
        assert isinstance(error, InvalidRequestError)
        assert str(error) == "prompt: can never fit"
        engine.refusal = Refused(request_id="", field="", problem="the queue is full")
        assert isinstance(await failure_of(worker, text_request()), OverloadedError)
        engine.refusal = None
        await worker.generate(text_request())


async def test_a_request_that_fails_in_the_engine_ends_in_a_status() -> None:
    """A failure after tokens were sent is an error, not a short answer."""
    engine = ScriptedEngine()
    engine.failure = "numbers went bad"
    async with scripted_worker(engine) as worker:
        error = await failure_of(worker, text_request())
    assert isinstance(error, InternalError)
    assert str(error) == "numbers went bad"


async def test_more_calls_than_places_are_refused_at_once() -> None:
    """The front's table is bounded by what the engine may run and queue."""
    engine = ScriptedEngine()
    engine.hold_admission = True
    settings = EngineConfig(max_running_requests=1, max_queued_requests=1)
    async with scripted_worker(engine, engine=settings) as worker:
        calls = [worker.inference.Generate(text_request()) for _ in range(2)]
        await engine.until(lambda: len(engine.running) == 2)
        assert isinstance(await failure_of(worker, text_request()), OverloadedError)
        engine.release()
        for call in calls:
            assert [message async for message in call][-1].HasField("finished")


async def test_one_line_is_logged_per_request_and_no_text(caplog: pytest.LogCaptureFixture) -> None:
    """The end of a request is one line with figures; prompt, answer, key and tenant stay out of all logs (F74)."""
    secret_words = ("hushprompt", "hushanswer", "hushkey", "hushtenant")
    engine = ScriptedEngine(secret_words[1])
    request = pb.GenerateRequest(text=secret_words[0], extra_key=secret_words[2], request_id="mine\nforged")
    with caplog.at_level(logging.DEBUG, logger="prefixmesh"):
        async with scripted_worker(engine) as worker:
            answer = await worker.generate(request, ((TENANT, secret_words[3]),))
    (record,) = records_of(caplog, "request_ended")
    line = record.getMessage()
    assert f"id={answer.started.request_id} client_id='mine\\nforged'" in line
    assert "outcome=stop prompt_tokens=10 cached_tokens=0 completion_tokens=10" in line
    assert not [word for word in secret_words if word in caplog.text]


async def test_tokenize_gives_what_generate_sees() -> None:
    """Text and chat alike."""
    engine = ScriptedEngine()
    async with scripted_worker(engine) as worker:
        for request in (text_request("héllo"), chat_request(("user", "hi"))):
            ask = (
                pb.TokenizeRequest(text=request.text)
                if request.text
                else pb.TokenizeRequest(chat=request.chat)
            )
            ids = (await worker.inference.Tokenize(ask)).ids
            await worker.generate(request)
            assert ids == engine.submitted[-1].tokens


async def test_list_models_names_the_model_and_its_limit() -> None:
    """The name it lists is one that Generate takes."""
    async with scripted_worker(ScriptedEngine()) as worker:
        (model,) = (await worker.inference.ListModels(pb.ListModelsRequest())).models
        assert (model.name, model.revision, model.context_length) == ("scripted", "rev-1", CONTEXT_LENGTH)
        assert not model.adapters
        await worker.generate(pb.GenerateRequest(text="a", model=model.name))


async def abort(worker: Worker, request_id: str, tenant: str) -> None:
    await worker.inference.Abort(pb.AbortRequest(request_id=request_id), metadata=((TENANT, tenant),))


async def test_abort_stops_a_request_within_its_tenant_only() -> None:
    """Another tenant's abort, an unknown id, a second abort and one after the end change nothing (F18, F49)."""
    engine = ScriptedEngine()
    engine.hold_after_tokens = 2
    async with scripted_worker(engine) as worker:
        call = worker.inference.Generate(text_request(), metadata=((TENANT, "acme"),))
        request_id = (await call.read()).started.request_id
        await abort(worker, request_id, "bolt")
        await abort(worker, "unknown", "acme")
        assert engine.running == {request_id}
        await abort(worker, request_id, "acme")
        await abort(worker, request_id, "acme")
        with pytest.raises(CancelledError, match="aborted"):
            await rest_of(call)
        assert await call.code() is grpc.StatusCode.CANCELLED
        await abort(worker, request_id, "acme")
        assert not engine.running


async def test_a_cancel_in_the_queue_computes_nothing() -> None:
    """A call cancelled before admission leaves CANCELLED, and the engine never starts on it (F18)."""
    engine = ScriptedEngine()
    engine.hold_admission = True
    async with scripted_worker(engine) as worker:
        call = worker.inference.Generate(text_request())
        await engine.until(lambda: bool(engine.running))
        call.cancel()
        await engine.until(lambda: not engine.running)
        assert await call.code() is grpc.StatusCode.CANCELLED
        assert (engine.admitted, len(engine.aborted)) == ([], 1)


@pytest.mark.parametrize("where", ["queued", "decoding"])
@pytest.mark.parametrize("way", ["cancel", "disconnect", "deadline"])
async def test_a_callers_leaving_aborts_in_the_engine(where: str, way: str) -> None:
    """However and whenever a caller leaves, the engine is told and the next request is served (F17, F22)."""
    engine = ScriptedEngine()
    if where == "queued":
        engine.hold_admission = True
    else:
        engine.hold_after_tokens = 3
    async with scripted_worker(engine) as worker:
        call = worker.inference.Generate(text_request(), timeout=0.2 if way == "deadline" else None)
        await engine.until(lambda: bool(engine.running) and (where == "queued" or bool(engine.admitted)))
        if way == "cancel":
            call.cancel()
        elif way == "disconnect":
            await worker.channel.close()
        await engine.until(lambda: not engine.running, timeout_s=1.0)
        assert len(engine.aborted) == 1
        engine.release()
        if way != "disconnect":
            await worker.generate(text_request())


async def test_the_next_turn_may_follow_a_cancelled_one_at_once() -> None:
    """A caller that closes after the first delta is served again without waiting (F21)."""
    engine = ScriptedEngine()
    engine.hold_after_tokens = 1
    async with scripted_worker(engine) as worker:
        call = worker.inference.Generate(text_request("turn one"))
        await call.read()
        await call.read()
        call.cancel()
        engine.release()
        assert (await worker.generate(text_request("turn one, turn two"))).text == engine.answer
        await eventually(lambda: not engine.running)


async def test_an_engine_that_dies_fails_its_streams() -> None:
    """Before and after the first token, a dead engine is UNAVAILABLE, never silence."""
    for hold in ("admission", "tokens"):
        engine = ScriptedEngine()
        engine.hold_admission = hold == "admission"
        engine.hold_after_tokens = 1
        async with scripted_worker(engine) as worker:
            call = worker.inference.Generate(text_request(), timeout=5)
            await engine.until(lambda e=engine: bool(e.running))  # type: ignore[misc]
            engine.die()
            with pytest.raises(UnavailableError):
                await rest_of(call)
            assert isinstance(await failure_of(worker, text_request()), UnavailableError)
