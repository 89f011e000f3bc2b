"""What is interrupted after its first token goes on at another worker, and the caller cannot tell; or it ends in a clear error."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from prefixmesh.errors import CancelledError, InvalidRequestError, UnavailableError
from prefixmesh.history import Tokens
from prefixmesh.history_check import check_records
from prefixmesh.history_file import read_history
from prefixmesh.proto.v1 import inference_pb2 as pb
from prefixmesh.tokens import pack, unpack
from tests.support.fake_worker import Script
from tests.support.router_kit import chat_request, merging_tokenizer, running_router, token_request
from tests.support.servers import eventually, rest_of

PROMPT = range(200)
TOKENS = 8
ANSWER = [97 + n for n in range(TOKENS)]


def answers(**more: Any) -> Script:
    return Script(answer=lambda tokens: ANSWER, **more)


def told(messages: list[pb.GenerateResponse], branch: int = 0) -> list[int]:
    """The ids of a branch; asserts that positions follow each other."""
    ids: list[int] = []
    for message in messages:
        if message.HasField("delta") and message.delta.branch == branch:
            assert message.delta.position == len(ids)
            ids += [int(one) for one in unpack(message.delta.token_ids)]
    return ids


@pytest.mark.parametrize("kill_before", range(TOKENS + 1))
async def test_an_answer_survives_its_worker_at_every_token(kill_before: int) -> None:
    """F67: killed before each token, and before the end, the answer is the undisturbed one, once."""
    script = answers()
    async with running_router(2, script=script) as router:
        undisturbed = await router.generate(token_request(PROMPT))
        script.dies_before = kill_before
        answer = await router.generate(token_request(PROMPT))
        assert answer.token_ids == undisturbed.token_ids == ANSWER
        assert answer.text == undisturbed.text
        usage = answer.finished.usage
        assert usage.completion_tokens == TOKENS
        assert usage.interruptions == (1 if kill_before else 0)
        assert usage.prompt_tokens == len(PROMPT)
        assert usage.resumed_tokens == 0
        await eventually(lambda: router.loads() == [0, 0])


async def test_the_worker_that_goes_on_computes_what_was_sent_with_the_prompt() -> None:
    """And is placed so: what was told is a part of its prompt, and its limit what is left."""
    script = answers(dies_before=5)
    script.before_delta.shut()
    async with running_router(2, script=script) as router:
        request = token_request(PROMPT, sampling=pb.Sampling(max_tokens=TOKENS))
        call = router.inference.Generate(request)
        messages = [await call.read(), await call.read()]
        for _ in range(4):
            script.before_delta.let_one()
            messages.append(await call.read())
        await eventually(lambda: any(len(worker.received) and worker.running for worker in router.workers))
        await eventually(lambda: sum(len(worker.received) for worker in router.workers) == 2)
        (running,) = [
            placement
            for placement in router.server.core._placements._open.values()
            if placement.request_id.endswith(".2")
        ]
        assert (running.request.prompt_tokens, running.request.max_tokens) == (len(PROMPT) + 5, TOKENS - 5)
        script.before_delta.open()
        messages += await rest_of(call)
        assert told(messages) == ANSWER
        second = max(
            (w.received[-1] for w in router.workers if w.received), key=lambda r: r.ticket.request_id
        )
        assert second.message.resumed_output == pack(ANSWER[:5])
        assert second.message.sampling.seed == messages[0].started.seed
        assert second.message.sampling.max_tokens == TOKENS


async def test_an_answer_outlives_several_workers() -> None:
    """Each brings it two tokens further and dies; the last has only to say that it has ended."""
    async with running_router(5) as router:
        for worker in router.workers:
            worker.script = answers(dies_before=2)
        answer = await router.generate(token_request(PROMPT))
        assert answer.token_ids == ANSWER
        assert answer.finished.usage.interruptions == 4
        assert answer.finished.usage.completion_tokens == TOKENS


@pytest.mark.parametrize("kill_before", [0, 1, 3, 4, 3 * TOKENS - 1, 3 * TOKENS])
async def test_several_branches_go_on_each_where_it_was(kill_before: int) -> None:
    script = answers()
    async with running_router(2, script=script) as router:
        script.dies_before = kill_before
        call = router.inference.Generate(token_request(PROMPT, branches=3))
        messages = await rest_of(call)
        assert [told(messages, branch) for branch in range(3)] == [
            [token + branch for token in ANSWER] for branch in range(3)
        ]
        ended = [message.branch_ended for message in messages if message.HasField("branch_ended")]
        assert sorted(one.branch for one in ended) == [0, 1, 2]
        assert {one.completion_tokens for one in ended} == {TOKENS}
        assert messages[-1].finished.usage.completion_tokens == 3 * TOKENS
        await eventually(lambda: router.loads() == [0, 0])


async def test_branches_that_are_all_told_need_nobody_to_say_that_they_have_ended() -> None:
    """Their ends are known: the caller is told so, whoever is left."""
    async with running_router(1, script=answers(ends_early=True)) as router:
        messages = await rest_of(router.inference.Generate(token_request(PROMPT, branches=2)))
        assert [len(told(messages, branch)) for branch in range(2)] == [TOKENS, TOKENS]
        finished = messages[-1].finished
        assert finished.reason == pb.FINISH_REASON_LENGTH
        assert finished.usage.completion_tokens == 2 * TOKENS
        assert len(router.workers[0].received) == 1
        await eventually(lambda: router.loads() == [0])
        (entry,) = router.server.core.registry
        assert entry.health.failures == 1, "that it failed is known of the worker"


async def test_a_worker_that_cannot_resume_branches_ends_the_answer_in_words() -> None:
    """One of an earlier version begins them anew: the caller gets no token twice."""
    script = answers(dies_before=4, ignores_resumed_branches=True)
    async with running_router(2, script=script) as router:
        call = router.inference.Generate(token_request(PROMPT, branches=2))
        with pytest.raises(UnavailableError, match="cannot be gone on with"):
            await rest_of(call)
        await eventually(lambda: router.loads() == [0, 0])


async def test_a_worker_that_refuses_what_was_told_ends_the_answer_in_words() -> None:
    """A grammar that does not take the tokens, or a limit: it is not the caller's request that was wrong."""
    refusal = InvalidRequestError("resumed_output", "the grammar does not allow it")
    async with running_router(2, script=answers(dies_before=3, goes_on_with=refusal)) as router:
        call = router.inference.Generate(token_request(PROMPT))
        assert told([await call.read() for _ in range(4)]) == ANSWER[:3]
        with pytest.raises(UnavailableError, match="the grammar does not allow it"):
            await rest_of(call)
        await eventually(lambda: router.loads() == [0, 0])


async def test_where_nobody_is_left_the_caller_learns_why() -> None:
    async with running_router(1, script=answers(dies_before=3)) as router:
        with pytest.raises(UnavailableError, match="w0 failed this request"):
            await router.generate(token_request(PROMPT))
        await eventually(lambda: router.loads() == [0])


async def test_a_worker_that_falls_silent_in_an_answer_is_told_to_abort_it() -> None:
    """After the first token a silence counts: the answer goes on elsewhere, and the work is not done twice."""
    async with running_router(2, stream_idle_timeout_s=0.2) as router:
        for worker in router.workers:
            worker.script.answer = lambda tokens: ANSWER
            worker.script.before_delta.shut()
        call = router.inference.Generate(token_request(PROMPT))
        messages = [await call.read(), await call.read()]
        home, other = sorted(router.workers, key=lambda worker: -worker.running)
        other.script.before_delta.open()
        messages += await rest_of(call)
        assert told(messages) == ANSWER
        assert messages[-1].finished.usage.interruptions == 1
        await eventually(lambda: home.aborted == [messages[0].started.request_id])
        await eventually(lambda: not home.running)


async def test_a_long_silence_before_the_first_token_is_no_failure() -> None:
    """A long prompt takes what it takes."""
    script = answers()
    script.before_start.shut()
    async with running_router(2, script=script, stream_idle_timeout_s=0.05) as router:
        answer = asyncio.create_task(router.generate(token_request(PROMPT)))
        await eventually(lambda: script.before_start.waiting == 1)
        await asyncio.sleep(0.2)  # four idle times: what is tested is that nothing happens in them
        script.before_start.open()
        assert (await answer).token_ids == ANSWER
        assert sum(len(worker.received) for worker in router.workers) == 1


async def test_the_streams_of_a_worker_that_is_put_out_are_carried_on() -> None:
    async with running_router(2) as router:
        for worker in router.workers:
            worker.script.answer = lambda tokens: ANSWER
            worker.script.before_delta.shut()
        calls = [router.inference.Generate(token_request([n] * 100)) for n in range(4)]
        begun = [[await call.read(), await call.read()] for call in calls]
        home, other = router.workers
        assert home.running
        other.script.before_delta.open()
        pool: Any = router.server._pool
        pool.link(home.address).give_up_calls("it was put out")
        for call, messages in zip(calls, begun, strict=True):
            assert told(messages + await rest_of(call)) == ANSWER
        await eventually(lambda: router.loads() == [0, 0] and not home.running)


async def test_the_streams_of_a_worker_whose_grace_is_over_go_on_elsewhere() -> None:
    """It lives and says that it leaves: what it had begun with was not refused."""
    async with running_router(2) as router:
        for worker in router.workers:
            worker.script.answer = lambda tokens: ANSWER
            worker.script.before_delta.shut()
        call = router.inference.Generate(token_request(PROMPT))
        messages = [await call.read(), await call.read()]
        home, other = sorted(router.workers, key=lambda worker: -worker.running)
        home.script.breaks_with = UnavailableError("this worker is stopping")
        home.script.before_delta.open()
        other.script.before_delta.open()
        messages += await rest_of(call)
        assert told(messages) == ANSWER
        assert messages[-1].finished.usage.interruptions == 1


async def test_an_abort_ends_an_answer_that_went_on_and_nobody_goes_on_with_it_again() -> None:
    """Its reader cannot tell from the error who has ended the worker's call; the request knows."""
    async with running_router(3) as router:
        for worker in router.workers:
            worker.script.answer = lambda tokens: ANSWER
            worker.script.before_delta.shut()
        call = router.inference.Generate(token_request(PROMPT))
        started = (await call.read()).started
        assert (await call.read()).HasField("delta")
        home = next(worker for worker in router.workers if worker.running)
        await home.kill()
        await eventually(lambda: any(w.running for w in router.workers if w is not home))
        await router.inference.Abort(pb.AbortRequest(request_id=started.request_id))
        with pytest.raises(CancelledError, match="aborted"):
            await rest_of(call)
        await eventually(lambda: not any(router.loads()) and not any(w.running for w in router.workers))
        assert sum(len(worker.received) for worker in router.workers) == 2


async def test_the_next_turn_of_a_chat_finds_an_answer_that_was_interrupted() -> None:
    """The whole of it is remembered, with the ids that were generated on both workers."""
    paris = [ord(char) for char in "Paris"]
    script = Script(answer=lambda tokens: paris, decode=merging_tokenizer().decode, dies_before=2)
    async with running_router(2, script=script) as router:
        turns = [("user", "Which city is the capital of France? " * 4)]
        first = await router.generate(chat_request(*turns))
        assert (first.text, first.finished.usage.interruptions) == ("Paris", 1)
        turns += [("assistant", "Paris"), ("user", "And what is it known for?")]
        second = await router.generate(chat_request(*turns))
        assert second.finished.usage.retokenized_tokens == 0


async def test_a_callers_own_resumed_output_stays_its_own() -> None:
    """What it brought along is not told again, and not counted as generated, also after an interruption."""
    script = answers(dies_before=2)
    async with running_router(2, script=script) as router:
        call = router.inference.Generate(token_request(PROMPT, resumed_output=pack(ANSWER[:3])))
        messages = await rest_of(call)
        positions = [m.delta.position for m in messages if m.HasField("delta")]
        assert positions == list(range(3, TOKENS))
        usage = messages[-1].finished.usage
        assert (usage.completion_tokens, usage.resumed_tokens, usage.interruptions) == (TOKENS - 3, 3, 1)


async def test_the_history_of_an_interrupted_answer_is_in_order(tmp_path: Path) -> None:
    """Each token once, each reservation settled, one end; and a checker agrees."""
    path = tmp_path / "history"
    script = answers()
    async with running_router(2, script=script, history=str(path)) as router:
        for kill_before in (None, 0, 3):
            script.dies_before = kill_before
            assert (await router.generate(token_request(PROMPT))).token_ids == ANSWER
            for worker in router.workers:
                if worker._server is None:
                    await worker.restart()
            await router.until_ready(2)
    records = [line.record for line in read_history(path) if line.record is not None]
    kinds = [type(record).__name__.lower() for record in records]
    assert kinds.count("ended") == kinds.count("asked") == 3
    assert kinds.count("placed") == kinds.count("settled") == 5
    assert kinds.count("failed") == 2
    assert kinds.count("resumed") == 1
    assert sum(record.count for record in records if isinstance(record, Tokens)) == 3 * TOKENS
    assert not check_records(records).violations
