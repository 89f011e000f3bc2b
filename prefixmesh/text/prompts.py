"""From a caller's prompt to the tokens that are computed.

Plain text is completed as it stands: special tokens written in it are those tokens (that is how base models and hand-made
templates are driven), and BOS comes first where the model wants it. In a chat only the template's own control tokens count, and
answers that were generated here come back as the very ids that were generated, so that the next turn finds their KV.
"""

import hashlib
import threading
from collections.abc import Sequence
from functools import partial
from typing import Final

import msgspec

from prefixmesh.errors import InvalidRequestError
from prefixmesh.ids import Namespace
from prefixmesh.requests import ChatMessage, ChatPrompt, Prompt, TextPrompt, TokenPrompt
from prefixmesh.text.answer_memory import AnswerMemory, HistoryDigest, answer_key
from prefixmesh.text.chat_spans import RenderedChat, render_chat
from prefixmesh.text.chat_template import ChatTemplate
from prefixmesh.text.piece_encoder import PIECE_MEMORY_BYTES, PieceEncoder
from prefixmesh.text.prompt_beginning import NEXT_MESSAGES, shared_tokens, unsettled_tokens
from prefixmesh.text.span_encoder import SpanEncoder
from prefixmesh.text.tokenizer import Tokenizer
from prefixmesh.tokens import TOKEN_BYTES, count, pack, unpack

PROBE_BYTES_PER_TOKEN: Final = 8
"""Text with more bytes than this for each token of context is probed before it is tokenised whole. Ordinary text has 1 to 5, so
it is never probed; and no text is tokenised for long only to be refused."""

CHAT_FIELD: Final = "chat.messages"


class BuiltPrompt(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A prompt ready to be computed."""

    tokens: bytes
    """Packed ids; at least one, at most the context."""

    retokenized_tokens: int = 0
    """Tokens of earlier answers whose generated ids are not remembered, so that they may differ from what is cached."""

    history: bytes | None = None
    """Digest of the conversation up to where the answer begins, for ``remember``; None for prompts that are no chat."""


def text_digest(tokenizer: Tokenizer, template: ChatTemplate | None) -> str:
    """Identity of how text becomes tokens: equal for two servers if and only if they tokenise every prompt alike."""
    parts = f"{tokenizer.digest}/{template.digest if template is not None else ''}"
    return hashlib.blake2b(parts.encode(), digest_size=16).hexdigest()


class PromptBuilder:
    """Builds prompts for one model. May be used by several threads."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        answers: AnswerMemory | None,
        *,
        context_length: int,
        vocab_size: int | None = None,
        piece_memory_bytes: int = PIECE_MEMORY_BYTES,
    ) -> None:
        """``context_length`` is the most tokens of prompt and answer together; ``answers`` None remembers nothing.

        ``vocab_size`` is the model's own, None the tokenizer's. Models often have more rows than their tokenizer has tokens, and
        may generate one: a conversation that holds it must be able to come back.
        """
        self._tokenizer = tokenizer
        self._template = template
        self._answers = answers
        self._answers_lock = threading.Lock()
        self._pieces = PieceEncoder(tokenizer, piece_memory_bytes)
        self._context_length = context_length
        self._vocab_size = tokenizer.vocab_size if vocab_size is None else vocab_size

    def build(self, prompt: Prompt, namespace: Namespace) -> BuiltPrompt:
        """Tokenise a prompt; O(its length), and O(context) for one that is far too long.

        Raises InvalidRequestError, naming the field, for what the model cannot take.
        """
        match prompt:
            case TokenPrompt(packed=packed):
                return self._tokens(packed)
            case TextPrompt(text=text):
                return self._text(text, namespace)
            case ChatPrompt(messages=messages):
                return self._chat(messages, namespace)

    def beginning(self, prompt: Prompt, namespace: Namespace) -> bytes:
        """The tokens, packed, that every longer prompt which begins with this one has, too: a text without its last word, a chat without the
        opening of an answer, tokens as they are. The same in every process: answers that are remembered here do not enter.

        Costs some tokenisings of the prompt's end. Raises as ``build``, and InvalidRequestError where nothing is left.
        """
        match prompt:
            case TokenPrompt(packed=packed):
                return self._tokens(packed).tokens
            case TextPrompt(text=text):
                field, tokens = "text", self._text(text, namespace).tokens
                unsettled = unsettled_tokens(text, partial(self._text_tokens, namespace=namespace))
                tokens = tokens[: len(tokens) - unsettled * TOKEN_BYTES]
            case ChatPrompt(messages=messages):
                field, tokens = CHAT_FIELD, self._chat_beginning(messages, namespace)
        if not tokens:
            raise InvalidRequestError(
                field, "too short: no token of it is sure to be the same in a longer prompt"
            )
        return tokens

    def remember(
        self, namespace: Namespace, built: BuiltPrompt, answer_text: str, answer_ids: Sequence[int]
    ) -> None:
        """Keep the ids generated for a prompt, for when the conversation comes back with this answer in its history."""
        if self._answers is None or built.history is None or not answer_text:
            return
        packed = pack(self._ids_for_text(answer_text, answer_ids))
        with self._answers_lock:
            self._answers.remember(answer_key(namespace, built.history, answer_text), packed)

    def _text(self, text: str, namespace: Namespace) -> BuiltPrompt:
        self._refuse_too_long("text", [text], allow_special=True)
        return self._checked("text", self._text_tokens(text, namespace))

    def _text_tokens(self, text: str, namespace: Namespace) -> bytes:
        bos = self._tokenizer.bos_token_id
        if self._tokenizer.cuts_at_specials:
            encoder = SpanEncoder(self._tokenizer, self._pieces, namespace)
            encoder.template(text)
            packed = encoder.finish()
        else:
            packed = pack(self._tokenizer.encode(text, allow_special=True, add_bos=False))
        if bos is not None and (
            not packed or (self._tokenizer.adds_bos and packed[:TOKEN_BYTES] != pack([bos]))
        ):
            packed = pack([bos]) + packed
        return packed

    def _tokens(self, packed: bytes) -> BuiltPrompt:
        size = count(packed)
        if len(packed) % TOKEN_BYTES or not size:
            raise InvalidRequestError(
                "tokens.ids", f"must be packed uint32 and not empty, got {len(packed)} bytes"
            )
        self._refuse_too_many("tokens.ids", size)
        ids = unpack(packed)
        highest = ids.item(ids.argmax())  # a reduction by ``max`` takes ten times as long to begin
        if highest >= self._vocab_size:
            raise InvalidRequestError("tokens.ids", f"ids must be below {self._vocab_size}, got {highest}")
        return BuiltPrompt(tokens=packed)

    def _chat(
        self,
        messages: Sequence[ChatMessage],
        namespace: Namespace,
        *,
        opens_answer: bool = True,
        recalls: bool = True,
    ) -> BuiltPrompt:
        if self._template is None:
            raise InvalidRequestError("chat", "this model has no chat template; send text or tokens.ids")
        self._refuse_too_long(CHAT_FIELD, [message.content for message in messages], allow_special=False)
        rendered = render_chat(self._template, messages, opens_answer=opens_answer)
        if rendered.spans is None:
            return self._chat_as_a_whole(rendered.text, messages)
        return self._chat_by_spans(rendered, messages, namespace, recalls=recalls)

    def _chat_beginning(self, messages: Sequence[ChatMessage], namespace: Namespace) -> bytes:
        """What the conversation has in common with longer ones; by itself it may be one that the template refuses."""
        tried: list[bytes] = []
        refusal: InvalidRequestError | None = None
        for more in ((), *((message,) for message in NEXT_MESSAGES)):
            try:
                built = self._chat([*messages, *more], namespace, opens_answer=False, recalls=False)
                tried.append(built.tokens)
            except InvalidRequestError as error:
                refusal = refusal or error
        if not tried:
            assert refusal is not None
            raise refusal
        return shared_tokens(tried[0], tried[1:])

    def _chat_by_spans(
        self, rendered: RenderedChat, messages: Sequence[ChatMessage], namespace: Namespace, *, recalls: bool
    ) -> BuiltPrompt:
        encoder, history = SpanEncoder(self._tokenizer, self._pieces, namespace), HistoryDigest()
        retokenized = at = 0
        for span in rendered.spans or ():
            own, content = rendered.text[at : span.start], rendered.text[span.start : span.end]
            at = span.end
            encoder.template(own)
            history.add(own)
            answer = None
            if recalls and messages[span.message].role == "assistant":
                answer = self._recall(namespace, history.digest(), content)
                # As if it stood alone: a token that reaches over its border makes no difference to what is told.
                retokenized += count(self._pieces.encode(namespace, content)) if answer is None else 0
            if answer is None:
                encoder.content(content)
            else:
                encoder.answer(answer)
            history.add(content)
        encoder.template(rendered.text[at:])
        history.add(rendered.text[at:])
        return self._checked(CHAT_FIELD, encoder.finish(), retokenized, history.digest())

    def _chat_as_a_whole(self, text: str, messages: Sequence[ChatMessage]) -> BuiltPrompt:
        """For a template that rewrites contents: nothing tells its words from the caller's, so the caller may spell no control token."""
        pattern = self._tokenizer.special_pattern
        if pattern is not None and any(pattern.search(message.content) for message in messages):
            raise InvalidRequestError(
                CHAT_FIELD, "this model's chat template does not allow control tokens' text in a message"
            )
        answers = (message.content for message in messages if message.role == "assistant")
        retokenized = sum(len(self._tokenizer.encode_plain(answer)) for answer in answers)
        ids = self._tokenizer.encode(text, allow_special=True, add_bos=False)
        return self._checked(CHAT_FIELD, pack(ids), retokenized)

    def _recall(self, namespace: Namespace, history: bytes, content: str) -> bytes | None:
        if self._answers is None:
            return None
        with self._answers_lock:
            return self._answers.recall(answer_key(namespace, history, content))

    def _ids_for_text(self, text: str, ids: Sequence[int]) -> Sequence[int]:
        """Ids whose text is the answer's. A stop string cuts the text inside a token: keep those before it, tokenise the rest."""
        if self._tokenizer.decode(ids) == text:
            return ids
        wanted = text.encode()
        begins_with_space = next(filter(None, map(self._tokenizer.piece, ids)), b"").startswith(b" ")
        if self._tokenizer.strips_first_space and begins_with_space:
            wanted = b" " + wanted
        kept: list[int] = []
        at = 0
        for token_id in ids:
            piece = self._tokenizer.piece(token_id)
            if not wanted.startswith(piece, at):
                break
            kept.append(token_id)
            at += len(piece)
        while kept and not _is_text(wanted[at:]):  # the cut fell inside a character
            at -= len(self._tokenizer.piece(kept.pop()))
        return kept + self._tokenizer.encode_plain(wanted[at:].decode(), continuing=True)

    def _checked(
        self, field: str, packed: bytes, retokenized: int = 0, history: bytes | None = None
    ) -> BuiltPrompt:
        if not packed:
            raise InvalidRequestError(field, "the prompt has no tokens")
        self._refuse_too_many(field, count(packed))
        return BuiltPrompt(tokens=packed, retokenized_tokens=retokenized, history=history)

    def _refuse_too_many(self, field: str, size: int) -> None:
        if size > self._context_length:
            raise InvalidRequestError(
                field, f"the prompt has {size} tokens, the model's context at most {self._context_length}"
            )

    def _refuse_too_long(self, field: str, texts: Sequence[str], *, allow_special: bool) -> None:
        """Refuse text that cannot fit without tokenising it whole: by its length in bytes, then by a bounded probe."""
        context, per_token = self._context_length, self._tokenizer.max_bytes_per_token
        size, unit = sum(map(len, texts)), "characters"
        too_long = per_token is not None and size > context * per_token
        if not too_long:  # a character has at least a byte, so what is far too long is not even encoded
            try:
                size, unit = sum(len(text.encode()) for text in texts), "bytes"
            except UnicodeEncodeError as error:
                raise InvalidRequestError(field, f"not valid Unicode: {error.reason}") from error
            too_long = per_token is not None and size > context * per_token
        if too_long:
            raise InvalidRequestError(
                field,
                f"{size} {unit} of text; the model's context of {context} tokens holds at most "
                f"{context * (per_token or 0)} bytes",
            )
        if size > context * PROBE_BYTES_PER_TOKEN and self._tokenizer.surely_exceeds(
            "".join(texts), context, allow_special=allow_special
        ):
            raise InvalidRequestError(
                field, f"{size} bytes of text have more tokens than the model's context of {context}"
            )


def _is_text(raw: bytes) -> bool:
    try:
        raw.decode()
    except UnicodeDecodeError:
        return False
    return True
