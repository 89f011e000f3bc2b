"""Grammars that answers must follow, JSON Schemas and regular expressions, by ``llguidance``. Imported at the first use.

Compiling is bounded: by the size of the text (``requests``) and by llguidance's own limits on states and steps, which count work and
not time, so that what is refused does not depend on how busy the machine is. It takes 0.2 to 500 ms all the same, which is why
``grammar_queue`` does it beside the engine's loop.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from prefixmesh import tokens
from prefixmesh.errors import InvalidRequestError
from prefixmesh.text.tokenizer import Tokenizer
from prefixmesh.worker.messages import Submit

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_ROW_ITEMS: Final = 20_000
"""States of a grammar at one place, ten times the library's own bound: an object with 2,000 properties has 8,000 behind its brace."""

MAX_STEP_ITEMS: Final = 200_000
"""States in one token's step, with the same factor of its own bound to a row's: some 50 ms."""

MAX_PROBLEM_CHARS: Final = 300
"""The library's errors may end in a dump of its state."""


class Grammar:
    """``AnswerGrammar`` over an ``LLMatcher``. Not for two threads at once."""

    def __init__(self, matcher: "LLMatcher", mask_words: int) -> None:
        self._matcher = matcher
        self.mask_words = mask_words

    @property
    def is_finished(self) -> bool:
        """See ``AnswerGrammar``."""
        return self._matcher.is_stopped()

    @property
    def error(self) -> str:
        """See ``AnswerGrammar``."""
        return _short(self._matcher.get_error()) if self._matcher.is_error() else ""

    def fill(self, mask: npt.NDArray[np.int32]) -> None:
        """See ``AnswerGrammar``. Some 50 microseconds, a few milliseconds at worst."""
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)

    def accept(self, token_id: int) -> None:
        """See ``AnswerGrammar``."""
        self._matcher.consume_token(token_id)


class GrammarCompiler:
    """Makes a ``Grammar`` for a request. The tokenizer is loaded at the first use; ``vocab_size`` is the model's."""

    def __init__(self, load_tokenizer: Callable[[], Tokenizer], vocab_size: int) -> None:
        self._load_tokenizer = load_tokenizer
        self._vocab_size = vocab_size
        self._tokenizer: LLTokenizer | None = None

    def compile(self, command: Submit) -> Grammar:
        """The grammar of a request, moved on by what it resumes. Raises InvalidRequestError when the grammar is none, is too complex, or
        does not allow what is resumed."""
        try:
            from llguidance import LLMatcher, LLParserLimits
        except ImportError as error:
            raise InvalidRequestError(
                _field(command), "this worker has no llguidance, which grammars need"
            ) from error
        tokenizer = self._tokenizer = self._tokenizer or self._make_tokenizer()
        sampling = command.sampling
        try:
            text = (
                LLMatcher.grammar_from_json_schema(sampling.json_schema)
                if sampling.json_schema
                else LLMatcher.grammar_from_regex(sampling.regex)
            )
        except ValueError as error:
            raise InvalidRequestError(_field(command), _short(str(error))) from error
        limits = LLParserLimits(max_items_in_row=MAX_ROW_ITEMS, step_max_items=MAX_STEP_ITEMS)
        matcher = LLMatcher(tokenizer, text, log_level=0, limits=limits)
        grammar = Grammar(matcher, -(-tokenizer.vocab_size // 32))
        grammar.fill(
            np.zeros(grammar.mask_words, dtype=np.int32)
        )  # some are too complex only when first used
        if grammar.error:
            raise InvalidRequestError(_field(command), grammar.error)
        _replay(grammar, tokens.unpack(command.resumed).tolist())
        return grammar

    def _make_tokenizer(self) -> "LLTokenizer":
        from llguidance import LLTokenizer

        tokenizer = self._load_tokenizer()
        return LLTokenizer(
            tokenizer.to_json(),
            n_vocab=max(self._vocab_size, tokenizer.vocab_size),
            eos_token=list(tokenizer.eos_token_ids) or None,
        )


def _replay(grammar: Grammar, resumed: Sequence[int]) -> None:
    for place, token_id in enumerate(resumed):
        is_past_the_end = grammar.is_finished
        grammar.accept(token_id)
        if is_past_the_end or grammar.error:
            raise InvalidRequestError(
                "resumed_output", f"the grammar does not allow token {place}, {token_id}"
            )


def _field(command: Submit) -> str:
    return "sampling.json_schema" if command.sampling.json_schema else "sampling.regex"


def _short(problem: str) -> str:
    return problem.split("\n<state>")[0][:MAX_PROBLEM_CHARS].strip()
