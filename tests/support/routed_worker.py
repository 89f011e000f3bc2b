"""A router in front of a worker of the same process, for tests that look at both ends."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from prefixmesh.router.model import RouterModel
from prefixmesh.router.server import RouterServer
from prefixmesh.router_config import DEFAULT_MAX_WAIT_S, RouterConfig
from prefixmesh.rpc.channel import open_channel
from prefixmesh.text.answer_memory import AnswerMemory
from prefixmesh.text.prompts import PromptBuilder, text_digest
from tests.support.router_kit import Router
from tests.support.scripted_engine import INFO
from tests.support.servers import Worker, byte_text

TEXT = (
    "a prompt that is long enough to fill more than one block of the router, which has 64 tokens to a block"
)


def scripted_model(context_length: int = INFO.context_length) -> RouterModel:
    """The model that goes with ``byte_text``: of a scripted engine, or of a fake one with another context."""
    text = byte_text()
    return RouterModel(
        name=INFO.model,
        revision=INFO.model_revision,
        tokenizer_digest=text_digest(text.tokenizer, text.template),
        context_length=context_length,
        prompts=PromptBuilder(
            text.tokenizer, text.template, AnswerMemory(2**20), context_length=context_length
        ),
    )


@asynccontextmanager
async def router_before(
    worker: Worker, model: RouterModel | str, *, max_wait_s: float = DEFAULT_MAX_WAIT_S
) -> AsyncIterator[Router]:
    """A router in front of one worker, with a model of the test's or the files of one."""
    name = model if isinstance(model, str) else model.name
    server = RouterServer(
        RouterConfig(workers=(worker.bound.address,), model=name, max_wait_s=max_wait_s),
        worker.secret,
        model=None if isinstance(model, str) else model,
    )
    bound = await server.start()
    try:
        async with open_channel(bound.address) as channel:
            router = Router(
                server=server, address=bound.address, secret=worker.secret, workers=[], channel=channel
            )
            await router.until_ready(1)
            yield router
    finally:
        await server.stop(0.0)
