"""Chat templates: rendered as Hugging Face renders them, in a sandbox that lets nothing out."""

import json
import pickle
from datetime import UTC, datetime
from pathlib import Path

import pytest

from prefixmesh.errors import InvalidRequestError, ModelFileError
from prefixmesh.model_files.source import ModelFiles
from prefixmesh.requests import ChatMessage
from prefixmesh.text import chat_template
from prefixmesh.text.chat_template import ChatTemplate, load_chat_template

MESSAGES = (ChatMessage("system", "Be brief."), ChatMessage("user", "Hi <b>&</b>"))


def _render(source: str, *messages: ChatMessage) -> str:
    return ChatTemplate(source, "<s>", "</s>").render(messages or MESSAGES)


def test_the_default_models_conversation_ends_where_the_answer_begins(smollm2_files: ModelFiles) -> None:
    template = load_chat_template(smollm2_files)
    assert template is not None
    assert template.render(MESSAGES) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi <b>&</b><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert not template.render(MESSAGES, add_generation_prompt=False).endswith("assistant\n")


def test_templates_get_the_tokens_filters_and_settings_they_are_written_for() -> None:
    source = """
{%- for message in messages %}
    {%- if loop.index == 2 %}{% break %}{% endif %}
    {{ bos_token + message.role }} {{ message | tojson }}
{%- endfor %}{{ eos_token }}{{ tools is none }}{{ strftime_now is defined }}"""
    assert _render(source) == '    <s>system {"role": "system", "content": "Be brief."}</s>TrueFalse'


def test_a_clock_lets_a_template_write_the_date() -> None:
    template = ChatTemplate(
        "{{ strftime_now('%Y-%m-%d') }}", "", "", clock=lambda: datetime(2024, 5, 6, tzinfo=UTC)
    )
    assert template.render(MESSAGES) == "2024-05-06"


def test_a_template_may_refuse_a_conversation_and_says_why() -> None:
    with pytest.raises(InvalidRequestError, match="roles must alternate") as caught:
        _render("{{ raise_exception('roles must alternate') }}")
    assert caught.value.field == "chat.messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__ }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages[0].content.__class__.__base__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ '{0.__class__}'.format(messages) }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{% for i in range(10**8) %}x{% endfor %}",
        "{{ 'x' * 10**9 }}",
        "{{ [1] * 10**9 }}",
        "{{ 9 ** 9 ** 9 }}",
        "{{ messages[7].content }}",
        "{{ nothing.at.all }}",
        "{{ 1 / 0 }}",
        "{{ messages + 1 }}",
        "{% include 'other' %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_a_template_reaches_nothing_and_ends_in_a_typed_error(source: str) -> None:
    """F72: attributes of Python objects, changes, huge values and plain mistakes alike."""
    with pytest.raises(InvalidRequestError, match=r"chat\.messages"):
        _render(source)


def test_a_message_is_never_run_as_a_template() -> None:
    message = ChatMessage("user", "{{ 7 * 7 }}{% raise %}")
    assert _render("{{ messages[0].content }}", message) == message.content


def test_a_pickle_in_a_message_is_only_text() -> None:
    """F72: nothing here unpickles; the bomb stays the text it is."""
    bomb = pickle.dumps(print, protocol=0).decode()
    assert _render("{{ messages[0].content }}", ChatMessage("user", bomb)) == bomb


def test_output_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_RENDERED_CHARS", 1000)
    with pytest.raises(InvalidRequestError, match="more than 1000 characters"):
        _render("{% for a in range(99999) %}{% for b in range(99999) %}xxxxxxxxxx{% endfor %}{% endfor %}")


@pytest.mark.parametrize("source", ["{% if %}", "{{ unclosed", "x" * (2**20 + 1)])
def test_a_malformed_template_is_a_model_file_error(source: str) -> None:
    with pytest.raises(ModelFileError, match="chat template"):
        ChatTemplate(source, "", "")


def test_digests_are_equal_for_templates_that_render_equally_only() -> None:
    digests = {
        ChatTemplate(source, bos, "").digest for source, bos in (("a", ""), ("a", ""), ("b", ""), ("a", "x"))
    }
    assert len(digests) == 3


def _folder(path: Path, **settings: object) -> ModelFiles:
    (path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", **settings}))
    return ModelFiles("made", path, "hf")


@pytest.mark.parametrize(
    "setting",
    [
        "{{ bos_token }}ok",
        [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "{{ bos_token }}ok"}],
    ],
)
def test_a_hugging_face_folder_has_its_template_in_the_tokenizer_settings(
    tmp_path: Path, setting: object
) -> None:
    template = load_chat_template(_folder(tmp_path, chat_template=setting))
    assert template is not None
    assert template.render(MESSAGES) == "<s>ok"


def test_a_template_file_wins_over_the_settings(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("from the file")
    template = load_chat_template(_folder(tmp_path, chat_template="from the settings"))
    assert template is not None
    assert template.render(MESSAGES) == "from the file"


def test_a_base_model_has_no_template(tmp_path: Path) -> None:
    assert load_chat_template(_folder(tmp_path)) is None
    assert load_chat_template(ModelFiles("made", tmp_path / "empty", "hf")) is None


@pytest.mark.parametrize("setting", [7, [{"name": "other", "template": "x"}], [None]])
def test_settings_without_a_usable_template_are_refused(tmp_path: Path, setting: object) -> None:
    with pytest.raises(ModelFileError, match="chat template"):
        load_chat_template(_folder(tmp_path, chat_template=setting))
