"""KV copied between two workers through their sockets: the same bytes, the same answers, and whatever goes wrong is computed."""

from pathlib import Path

import pytest

from tests.support.copying_workers import ask, kv_of, source, two_workers
from tests.support.tiny_model import make_tiny_model

pytestmark = pytest.mark.asyncio(loop_scope="function")

PROMPT = [3 + i * 7 % 400 for i in range(200)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


async def test_a_request_whose_ticket_names_a_holder_computes_only_what_that_has_not(model: Path) -> None:
    async with two_workers(model) as (holder, taker):
        computed = await ask(holder, PROMPT)
        copied = await ask(taker, PROMPT, source(holder, len(PROMPT)))
        assert copied.token_ids == computed.token_ids
        for told in (copied.started.cached_tokens, copied.finished.usage.cached_tokens):
            assert (told.device, told.host, told.disk, told.peer) == (0, 0, 0, len(PROMPT) - 1)
        whole = PROMPT + computed.token_ids[:-1]
        assert await kv_of(taker, whole[:-1]) == (await kv_of(holder, whole[:-1]))
        again = await ask(taker, PROMPT, source(holder, len(PROMPT)), number=1)
        assert (again.started.cached_tokens.device, again.started.cached_tokens.peer) == (len(PROMPT) - 1, 0)
