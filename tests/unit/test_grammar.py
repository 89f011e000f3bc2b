"""Grammars: what is allowed next, where answers end, what is refused, and that nobody waits for a compilation."""

import json
import threading
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import pytest
import torch

from prefixmesh import tokens
from prefixmesh.errors import InvalidRequestError
from prefixmesh.model_files.source import resolve_model
from prefixmesh.text.tokenizer import Tokenizer, load_tokenizer
from prefixmesh.worker.answer_grammar import AnswerGrammar
from prefixmesh.worker.engine import EngineCore
from prefixmesh.worker.grammar import GrammarCompiler
from prefixmesh.worker.logit_rules import RuledRow, apply_rules
from prefixmesh.worker.messages import Ended, EngineSampling, Event, Refused, Submit, TokensOut
from tests.support.scheduling import ENGINE_INFO, Bench, submit_command
from tests.support.tiny_model import VOCAB_SIZE, make_tiny_model

WAIT_S: Final = 10.0


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(resolve_model(str(make_tiny_model(tmp_path_factory.mktemp("g") / "tiny")), None))


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(lambda: tokenizer, VOCAB_SIZE + 40)


def command(resumed: list[int] | None = None, **grammar: Any) -> Submit:
    sampling = EngineSampling(
        temperature=0.0,
        top_k=0,
        top_p=1.0,
        min_p=0.0,
        seed=0,
        max_tokens=50,
        stop_token_ids=(2,),
        **grammar,
    )
    return Submit(
        request_id="r",
        namespace=b"n" * 16,
        tokens=tokens.pack([1]),
        sampling=sampling,
        resumed=tokens.pack(resumed or []),
    )


def allowed(grammar: AnswerGrammar, min_tokens: int = 0, answer: int = 0) -> set[int]:
    """Ids that are left after the rules, in a vocabulary with more rows than the tokenizer has ids."""
    logits = torch.zeros((2, VOCAB_SIZE + 40))
    sampling = command(regex="x", min_tokens=min_tokens).sampling
    row = RuledRow(1, sampling, answer, grammar=grammar)
    assert apply_rules(logits, [row]) == {}
    assert logits[0].isfinite().all()
    return set(logits[1].isfinite().nonzero().flatten().tolist())


def test_the_ids_that_are_left_are_those_whose_text_the_grammar_allows(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    """Against a look at every id: beginnings of three digits; then the end alone."""
    grammar = compiler.compile(command(regex="[0-9]{3}"))
    ids = range(tokenizer.vocab_size)
    digits = {i for i in ids if tokenizer.piece(i).isdigit() and len(tokenizer.piece(i)) <= 3}
    assert allowed(grammar) == digits
    for char in "123":
        [token_id] = tokenizer.encode_plain(char)
        grammar.accept(token_id)
    assert grammar.is_finished


def test_an_end_may_come_where_the_answer_may_be_complete_and_not_before_min_tokens(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    """Where nothing but the end is left, it comes whatever min_tokens says."""
    grammar = compiler.compile(command(regex="a{1,2}b?"))
    assert 2 not in allowed(grammar)
    grammar.accept(tokenizer.encode_plain("a")[0])
    assert 2 in allowed(grammar)
    assert 2 not in allowed(grammar, min_tokens=5, answer=1)
    over = compiler.compile(command(regex="(a|)"))
    assert 2 in allowed(over)
    over.accept(tokenizer.encode_plain("a")[0])
    assert over.is_finished or allowed(over, min_tokens=5, answer=1) == {2}


@pytest.mark.parametrize(
    ("grammar", "field", "problem"),
    [
        ({"regex": "[0-9"}, "sampling.regex", "unclosed character class"),
        ({"regex": "(?=a)b"}, "sampling.regex", "look-around"),
        ({"json_schema": '{"type": "bogus"}'}, "sampling.json_schema", "bogus"),
        ({"json_schema": '{"enum": []}'}, "sampling.json_schema", "nsatisfiable"),
        ({"json_schema": '{"$ref": "http://a.b/c"}'}, "sampling.json_schema", "a.b/c"),
        ({"json_schema": '{"uniqueItems": true}'}, "sampling.json_schema", "uniqueItems"),
        (
            {
                "json_schema": json.dumps(
                    {"allOf": [{"anyOf": [{"minimum": i}, {"multipleOf": i}]} for i in range(1, 15)]}
                )
            },
            "sampling.json_schema",
            "too large",
        ),
        ({"regex": "abc", "resumed": [250]}, "resumed_output", "token 0"),
    ],
)
def test_a_bad_grammar_is_refused_by_name(
    compiler: GrammarCompiler, grammar: dict[str, Any], field: str, problem: str
) -> None:
    """Malformed, impossible, not supported, too complex, or not what was answered before."""
    with pytest.raises(InvalidRequestError, match=problem) as caught:
        compiler.compile(command(**grammar))
    assert caught.value.field == field
    assert len(str(caught.value)) < 400


def test_an_object_may_have_as_many_properties_as_fit_a_schema(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    """The library's own bounds end at some hundreds."""
    schema = json.dumps({"properties": {f"p{i}": {} for i in range(2000)}, "type": "object"})
    grammar = compiler.compile(command(json_schema=schema))
    for char in '{"p':
        assert tokenizer.encode_plain(char)[0] in allowed(grammar)
        grammar.accept(tokenizer.encode_plain(char)[0])
    assert not grammar.error


def test_what_is_resumed_moves_the_grammar_on(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    """Cut anywhere, the same ids may follow; past its end nothing may."""
    ids = [tokenizer.encode_plain(char)[0] for char in "12ab"]
    whole = compiler.compile(command(regex="[0-9]{2}[ab]{2}"))
    for cut in range(4):
        resumed = compiler.compile(command(regex="[0-9]{2}[ab]{2}", resumed=ids[:cut]))
        assert allowed(resumed) == allowed(whole)
        whole.accept(ids[cut])
    assert compiler.compile(command(regex="[0-9]{2}[ab]{2}", resumed=ids)).is_finished
    with pytest.raises(InvalidRequestError, match="token 4"):
        compiler.compile(command(regex="[0-9]{2}[ab]{2}", resumed=[*ids, ids[0]]))


class Slow:
    """A compiler that is held until it is let go."""

    def __init__(self, outcome: AnswerGrammar | Exception) -> None:
        self.go = threading.Event()
        self._outcome = outcome

    def compile(self, command: Submit) -> AnswerGrammar:
        assert self.go.wait(WAIT_S)
        if isinstance(self._outcome, Exception):
            raise self._outcome
        return self._outcome


class Anything:
    """Allows everything, three tokens of it; or breaks."""

    def __init__(self, error_after: int | None = None) -> None:
        self.taken = 0
        self._error_after = error_after
        self.mask_words = 2

    @property
    def is_finished(self) -> bool:
        return self.taken == 3

    @property
    def error(self) -> str:
        return "too complex" if self.taken == self._error_after else ""

    def fill(self, mask: np.ndarray[Any, np.dtype[np.int32]]) -> None:
        mask.fill(-1)

    def accept(self, token_id: int) -> None:
        self.taken += 1


def with_grammar(request_id: str) -> Submit:
    plain = submit_command(request_id, [1, 2], max_tokens=9)
    return Submit(
        request_id=request_id,
        namespace=plain.namespace,
        tokens=plain.tokens,
        sampling=EngineSampling(
            temperature=0.0,
            top_k=0,
            top_p=1.0,
            min_p=0.0,
            seed=0,
            max_tokens=9,
            stop_token_ids=(),
            regex="x",
        ),
    )


def core_with(compile_: Callable[[Submit], AnswerGrammar] | None) -> EngineCore:
    bench = Bench()
    return EngineCore(
        info=ENGINE_INFO, scheduler=bench.scheduler, runner=bench.model, compile_grammar=compile_
    )


def finish(core: EngineCore) -> list[Event]:
    events: list[Event] = []
    while core.has_work:
        events += core.step(0.0)
        core.check_invariants()
    return events


def test_others_are_served_while_a_grammar_is_compiled() -> None:
    slow = Slow(Anything())
    core = core_with(slow.compile)
    assert core.submit(with_grammar("g"), 0.0) == []
    core.submit(submit_command("plain", [1, 2], max_tokens=2), 0.0)
    events: list[Event] = []
    while not any(isinstance(event, Ended) for event in events):
        events += core.step(0.0)
    assert {event.request_id for event in events if not isinstance(event, Refused)} == {"plain"}  # type: ignore[union-attr]
    assert (core.has_work, core.stats().queued) == (True, 1)
    slow.go.set()
    events = finish(core)
    assert len([event for event in events if isinstance(event, TokensOut)]) == 3
    assert isinstance(events[-1], Ended)
    assert events[-1].reason == "stop"


def test_a_request_can_be_aborted_while_its_grammar_is_compiled() -> None:
    slow = Slow(Anything())
    core = core_with(slow.compile)
    core.submit(with_grammar("g"), 0.0)
    [again] = core.submit(with_grammar("g"), 0.0)
    assert isinstance(again, Refused)
    [ended] = core.abort("g", 0.0)
    assert isinstance(ended, Ended)
    assert (ended.reason, core.has_work) == ("aborted", False)
    slow.go.set()


@pytest.mark.parametrize(
    ("error", "shown"),
    [(InvalidRequestError("sampling.regex", "bad"), "bad"), (KeyError("secret"), "KeyError")],
)
def test_a_compilation_that_fails_is_a_refusal(error: Exception, shown: str) -> None:
    slow = Slow(error)
    slow.go.set()
    core = core_with(slow.compile)
    core.submit(with_grammar("g"), 0.0)
    [refused] = finish(core)
    assert isinstance(refused, Refused)
    assert (refused.field, shown in refused.problem, "secret" in refused.problem) == (
        "sampling.regex",
        True,
        False,
    )


@pytest.mark.parametrize("after", [0, 1])
def test_a_grammar_that_breaks_fails_its_request_and_no_other(after: int) -> None:
    """Before a token is chosen or after."""
    core = core_with(lambda _: Anything(error_after=after))
    core.submit(with_grammar("g"), 0.0)
    core.submit(submit_command("plain", [1, 2], max_tokens=2), 0.0)
    ends = {event.request_id: event for event in finish(core) if isinstance(event, Ended)}
    assert (ends["g"].reason, ends["plain"].reason) == ("failed", "length")
    assert "too complex" in ends["g"].error


def test_an_engine_without_a_compiler_refuses_grammars() -> None:
    core = core_with(None)
    core.submit(with_grammar("g"), 0.0)
    [refused] = finish(core)
    assert isinstance(refused, Refused)
    assert refused.field == "sampling.regex"
