"""What a router needs of the model that its workers serve: its text side and its identity, never its weights."""

from dataclasses import dataclass

from prefixmesh.model_files.model_config import read_model_config
from prefixmesh.model_files.revision import model_revision
from prefixmesh.model_files.source import resolve_model
from prefixmesh.router_config import RouterConfig
from prefixmesh.text.answer_memory import AnswerMemory
from prefixmesh.text.chat_template import load_chat_template
from prefixmesh.text.prompts import PromptBuilder, text_digest
from prefixmesh.text.tokenizer import load_tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterModel:
    """A model as a router knows it."""

    name: str
    revision: str
    tokenizer_digest: str
    context_length: int
    """The model's own; a worker may have less."""

    prompts: PromptBuilder


def load_router_model(config: RouterConfig) -> RouterModel:
    """Read the model's text files; blocks for about a second, and longer when a known model has to be fetched first.

    Raises ModelFileError.
    """
    files = resolve_model(config.model)
    tokenizer, template = load_tokenizer(files), load_chat_template(files)
    model_config = read_model_config(files)
    return RouterModel(
        name=files.name,
        revision=model_revision(files),
        tokenizer_digest=text_digest(tokenizer, template),
        context_length=model_config.context_length,
        prompts=PromptBuilder(
            tokenizer,
            template,
            AnswerMemory(config.answer_memory_bytes),
            context_length=model_config.context_length,
            vocab_size=model_config.vocab_size,
        ),
    )
