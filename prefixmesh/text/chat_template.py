"""A model's own chat template, rendered in jinja2's immutable sandbox.

Templates come with model files, so they are foreign code. The sandbox keeps them from reaching Python, changing anything or
making a huge value by one multiplication; what they write is bounded. It is no quota of time: who serves a model trusts it that
far. Settings, filters and globals follow Hugging Face's ``apply_chat_template``, for which templates are written.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, ClassVar, Final, NoReturn

import jinja2
import jinja2.ext
import jinja2.sandbox
from jinja2.exceptions import SecurityError

from prefixmesh.errors import InvalidRequestError, ModelFileError
from prefixmesh.model_files.gguf_metadata import read_gguf_metadata
from prefixmesh.model_files.model_config import gguf_token_id, read_json_object
from prefixmesh.model_files.source import ModelFiles
from prefixmesh.requests import ChatMessage
from prefixmesh.text.tokenizer import token_text

FIELD: Final = "chat.messages"

MAX_TEMPLATE_CHARS: Final = 2**20
"""The longest in use have some thousands."""

MAX_RENDERED_CHARS: Final = 64 * 2**20
"""No request carries more text than that, so a longer rendering is a template gone wild."""

MAX_PRODUCT: Final = 2**20
"""Largest repeat count, repeated length or exponent base in a template."""

MAX_EXPONENT: Final = 64
DIGEST_BYTES: Final = 16
_ERROR_CHARS: Final = 300


class ChatTemplate:
    """A compiled template; immutable and safe to share between threads."""

    def __init__(
        self, source: str, bos_token: str, eos_token: str, *, clock: Callable[[], datetime] | None = None
    ) -> None:
        """``clock`` gives templates that ask for it the date (``strftime_now``). Without one they leave it out, which
        keeps prompts equal, and so cached, from one day to the next. Raises ModelFileError for a malformed template.
        """
        if len(source) > MAX_TEMPLATE_CHARS:
            raise ModelFileError(f"the chat template is longer than {MAX_TEMPLATE_CHARS} characters")
        environment = _Sandbox(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols], autoescape=False
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        if clock is not None:
            environment.globals["strftime_now"] = lambda form: clock().strftime(form)
        try:
            self._template = environment.from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise ModelFileError(f"the chat template is malformed: {error}") from error
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self.digest: str = hashlib.blake2b(
            json.dumps([source, bos_token, eos_token]).encode(), digest_size=DIGEST_BYTES
        ).hexdigest()
        """Equal for templates that render equally: hexadecimal."""

    def render(self, messages: Sequence[ChatMessage], *, add_generation_prompt: bool = True) -> str:
        """The text of a conversation, ending where the answer begins if ``add_generation_prompt``.

        Raises InvalidRequestError when the template refuses the conversation (roles that must alternate, say).
        """
        plain = [{"role": message.role, "content": message.content} for message in messages]
        written: list[str] = []
        length = 0
        try:
            for part in self._template.generate(
                messages=plain,
                add_generation_prompt=add_generation_prompt,
                tools=None,
                documents=None,
                **self._tokens,
            ):
                length += len(part)
                if length > MAX_RENDERED_CHARS:
                    raise InvalidRequestError(
                        FIELD, f"the chat template writes more than {MAX_RENDERED_CHARS} characters"
                    )
                written.append(part)
        except InvalidRequestError:
            raise
        except Exception as error:  # foreign code: whatever it raises, it did not take this conversation
            raise InvalidRequestError(
                FIELD, f"the model's chat template refused: {str(error)[:_ERROR_CHARS]}"
            ) from error
        return "".join(written)


def load_chat_template(
    files: ModelFiles, *, clock: Callable[[], datetime] | None = None
) -> ChatTemplate | None:
    """A model's chat template; None when it has none (a base model). Raises ModelFileError when it is malformed."""
    if files.kind == "gguf":
        metadata = read_gguf_metadata(files.path)
        source = metadata.get("tokenizer.chat_template")
        bos, eos = (_gguf_token_text(files, metadata, role) for role in ("bos", "eos"))
    else:
        path = files.path / "tokenizer_config.json"
        settings = read_json_object(path) if path.is_file() else {}
        source = _hf_source(files, settings)
        bos, eos = token_text(settings, "bos_token"), token_text(settings, "eos_token")
    if source is None:
        return None
    if not isinstance(source, str):
        raise ModelFileError(f"the chat template of {files.path} is not text")
    return ChatTemplate(source, bos, eos, clock=clock)


def _hf_source(files: ModelFiles, settings: Mapping[str, Any]) -> Any:
    """A file of its own wins; else the setting, which may be one template or a list of named ones."""
    path = files.path / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ModelFileError(f"cannot read {path}: {error}") from error
    source = settings.get("chat_template")
    if not isinstance(source, list):
        return source
    named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
    if "default" not in named:
        raise ModelFileError(f"{files.path} has several chat templates and none is called 'default'")
    return named["default"]


def _gguf_token_text(files: ModelFiles, metadata: Mapping[str, Any], role: str) -> str:
    token_id = gguf_token_id(files.path, metadata, role)
    tokens = metadata.get("tokenizer.ggml.tokens")
    if token_id is None or not isinstance(tokens, list) or not 0 <= token_id < len(tokens):
        return ""
    return str(tokens[token_id])


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The sandbox, with arithmetic that could fill the memory or the processor held small."""

    intercepted_binops: ClassVar[frozenset[str]] = frozenset(["*", "**"])  # type: ignore[misc]

    def unsafe_undefined(self, obj: Any, attribute: str) -> NoReturn:
        """Refuse at once; jinja's own answer would print as nothing and only fail when used further."""
        raise SecurityError(f"the template asks for the attribute {attribute!r} of a {type(obj).__name__}")

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Multiplication and power of bounded operands only."""
        if operator == "**" and (_size(left) > MAX_PRODUCT or _size(right) > MAX_EXPONENT):
            raise SecurityError("the template computes too high a power")
        if operator == "*" and _size(left) * _size(right) > MAX_PRODUCT and not _both_numbers(left, right):
            raise SecurityError("the template repeats a value too often")
        return super().call_binop(context, operator, left, right)


def _size(value: Any) -> float:
    if isinstance(value, (int, float)):
        return abs(value)
    return len(value) if hasattr(value, "__len__") else 1


def _both_numbers(left: Any, right: Any) -> bool:
    return isinstance(left, (int, float)) and isinstance(right, (int, float))


def _to_json(
    value: Any,
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002  # templates pass these by place or name, as in Hugging Face's filter
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
