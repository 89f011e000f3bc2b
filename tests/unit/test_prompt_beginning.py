"""What is pinned of a prompt is what every longer prompt that begins with it has, by the tokenizers that are served."""

import random

import pytest

from prefixmesh.errors import InvalidRequestError
from prefixmesh.ids import Namespace
from prefixmesh.model_files.source import ModelFiles
from prefixmesh.requests import ChatMessage, ChatPrompt, TextPrompt, TokenPrompt
from prefixmesh.text.answer_memory import AnswerMemory
from prefixmesh.text.chat_template import ChatTemplate, load_chat_template
from prefixmesh.text.prompts import PromptBuilder
from prefixmesh.text.tokenizer import Tokenizer, load_tokenizer
from prefixmesh.tokens import count, pack
from tests.support.texts import random_texts
from tests.support.tokenizer_kit import sentencepiece_tokenizer

NAMESPACE = Namespace(b"n" * 16)
POLICY = "You are Ada, who answers for a bookshop. Be brief; never promise 1,234 books.\n\nReturns: 14 days"
GOES_ON = (
    "",
    "s",
    "'t",
    ".",
    "56",
    " and",
    "\n",
    "\n\n- item",
    "   x",
    "é",
    "的",
    "<|im_end|>",
    "_x",
    ")",
    "\t",
)


@pytest.fixture(scope="module")
def smollm2(smollm2_files: ModelFiles) -> PromptBuilder:
    return builder(load_tokenizer(smollm2_files), load_chat_template(smollm2_files))


def builder(tokenizer: Tokenizer, template: ChatTemplate | None = None) -> PromptBuilder:
    return PromptBuilder(tokenizer, template, AnswerMemory(2**20), context_length=8192)


def chat(*turns: tuple[str, str]) -> ChatPrompt:
    return ChatPrompt(tuple(ChatMessage(role, content) for role, content in turns))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["smollm2", "sentencepiece"])
def test_text_begins_every_text_that_goes_on_from_it(smollm2: PromptBuilder, kind: str) -> None:
    """Cut anywhere, and gone on with anything; what is left out is little."""
    prompts = smollm2 if kind == "smollm2" else builder(sentencepiece_tokenizer())
    rng = random.Random(7)
    texts = [POLICY, "x " * 700, *(text for text in random_texts(40) if len(text) > 20)]
    for text in texts:
        for end in (len(text), rng.randrange(16, len(text) + 1)):
            try:
                pinned = prompts.beginning(TextPrompt(text[:end]), NAMESPACE)
            except InvalidRequestError:
                continue  # nothing of it is sure
            for more in (text[end : end + 40], *GOES_ON):
                longer = prompts.build(TextPrompt(text[:end] + more), NAMESPACE).tokens
                assert longer.startswith(pinned), (text[:end], more)
    whole = prompts.build(TextPrompt(POLICY), NAMESPACE).tokens
    assert count(prompts.beginning(TextPrompt(POLICY), NAMESPACE)) >= count(whole) - 8


def test_system_message_begins_every_chat_that_begins_with_it(smollm2: PromptBuilder) -> None:
    pinned = smollm2.beginning(chat(("system", POLICY)), NAMESPACE)
    for more in (
        [("user", "Hi")],
        [("user", "")],
        [("user", "\n1"), ("assistant", "Sure."), ("user", "On!")],
        [("assistant", "Welcome"), ("user", "Hi")],
    ):
        longer = smollm2.build(chat(("system", POLICY), *more), NAMESPACE).tokens
        assert longer.startswith(pinned)
    other = smollm2.build(chat(("system", POLICY + " only"), ("user", "Hi")), NAMESPACE).tokens
    assert not other.startswith(pinned)
    alone = smollm2.build(chat(("system", POLICY)), NAMESPACE).tokens
    assert count(alone) > count(pinned) >= count(alone) - 8  # but for the opening of an answer


def test_remembered_answer_does_not_enter(smollm2: PromptBuilder) -> None:
    """Another router, which does not remember it, has the same tokens."""
    examples = chat(("system", POLICY), ("user", "Hi"), ("assistant", "Hello there"), ("user", "On"))
    before = smollm2.beginning(examples, NAMESPACE)
    asked = smollm2.build(chat(("system", POLICY), ("user", "Hi")), NAMESPACE)
    odd_ids = [token for char in "Hello there" for token in smollm2._tokenizer.encode_plain(char)]
    smollm2.remember(NAMESPACE, asked, "Hello there", odd_ids)
    assert smollm2.build(examples, NAMESPACE).tokens[: len(before)] != before
    assert smollm2.beginning(examples, NAMESPACE) == before


def test_template_that_refuses_a_conversation_without_a_user_takes_its_beginning() -> None:
    """What it makes of a system message alone is seen from conversations that go on from it."""
    strict = ChatTemplate(
        "{% if messages[-1].role != 'user' %}{{ raise_exception('no user') }}{% endif %}"
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}",
        "",
        "",
    )
    prompts = builder(sentencepiece_tokenizer(), strict)
    pinned = prompts.beginning(chat(("system", "hello hello")), NAMESPACE)
    longer = prompts.build(chat(("system", "hello hello"), ("user", "he")), NAMESPACE).tokens
    assert longer.startswith(pinned)
    assert pinned
    refusing = builder(sentencepiece_tokenizer(), ChatTemplate("{{ raise_exception('never') }}", "", ""))
    with pytest.raises(InvalidRequestError, match="refused"):
        refusing.beginning(chat(("system", "hello")), NAMESPACE)


def test_tokens_are_pinned_as_they_are(smollm2: PromptBuilder) -> None:
    assert smollm2.beginning(TokenPrompt(pack([5, 6, 7])), NAMESPACE) == pack([5, 6, 7])


def test_what_leaves_nothing_is_refused(smollm2: PromptBuilder) -> None:
    with pytest.raises(InvalidRequestError, match="text: too short"):
        smollm2.beginning(TextPrompt("don"), NAMESPACE)
    with pytest.raises(InvalidRequestError, match="context"):
        smollm2.beginning(TextPrompt("word " * 9000), NAMESPACE)
