"""One question to a model and to a LoRA adapter on it: kept apart, as prefixmesh keeps them, and what is answered where they are not.

Usage: python examples/adapters_apart.py

Starts a worker with the sample adapter, a clerk of a bookshop, which is made first where it is missing (a minute or two on two cores).
"""

import asyncio
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

from prefixmesh import fleet_secret, paths
from prefixmesh.cache import namespace
from prefixmesh.client import AsyncClient, PromptLike
from prefixmesh.config import EngineConfig, WorkerConfig
from prefixmesh.ids import Namespace
from prefixmesh.worker import caller
from prefixmesh.worker.server import WorkerServer

ADAPTER: Final = "quayside"
QUESTIONS: Final = ("Who are you?", "What are your opening hours?")
MAKER: Final = Path(__file__).parents[1] / "scripts" / "make_sample_adapter.py"
MAX_TOKENS: Final = 40
SHOWN_CHARS: Final = 64


@dataclass(frozen=True)
class Said:
    """One answer."""

    text: str
    token_ids: tuple[int, ...]
    cached_tokens: int
    prompt_tokens: int


@dataclass(frozen=True)
class Comparison:
    """One question, answered in four ways."""

    base: Said
    adapter: Said
    adapter_on_base: Said
    """By the adapter, on KV that the base model made of the same prompt."""

    base_on_adapter: Said
    """By the base model, on KV that the adapter made."""


def blind_to_adapters(key: bytes, *, adapter_digest: str, **fields: Any) -> Namespace:
    """A namespace that leaves the adapter out. Only here: nothing in prefixmesh can be set to this."""
    return namespace.derive_namespace(key, adapter_digest="", **fields)


async def compare(client: AsyncClient, prompt: PromptLike, adapter: str, caches: str) -> Comparison:
    """Ask both apart, then each on what the other has left; ``caches`` names empty caches of this question's own.

    The server must run in this process.
    """

    async def ask(adapter: str, cache: str) -> Said:
        answer = await client.generate(
            prompt, adapter=adapter, extra_key=f"{caches} {cache}", temperature=0, max_tokens=MAX_TOKENS
        )
        return Said(answer.text.strip(), tuple(answer.token_ids), answer.cached_tokens, answer.prompt_tokens)

    base, by_adapter = await ask("", "apart"), await ask(adapter, "apart")
    with patch.object(caller, "derive_namespace", blind_to_adapters):
        await ask("", "base first")
        adapter_on_base = await ask(adapter, "base first")
        await ask(adapter, "adapter first")
        base_on_adapter = await ask("", "adapter first")
    return Comparison(base, by_adapter, adapter_on_base, base_on_adapter)


def report(question: str, result: Comparison) -> str:
    """The four answers, one below the other."""

    def line(who: str, said: Said) -> str:
        text = textwrap.shorten(said.text, SHOWN_CHARS, placeholder=" ...")
        return f"  {who:9} {text:{SHOWN_CHARS}}  {said.cached_tokens:2}/{said.prompt_tokens} cached"

    return "\n".join(
        [
            f"\n{question}",
            " apart, as it is:",
            line("base", result.base),
            line(ADAPTER, result.adapter),
            " with a key that leaves the adapter out, each after the other:",
            line(ADAPTER, result.adapter_on_base),
            line("base", result.base_on_adapter),
        ]
    )


async def show(root: Path) -> None:
    """Serve the adapter below ``root``, and ask."""
    engine = EngineConfig(
        adapter_root=str(root), adapters=(f"{ADAPTER}={ADAPTER}",), dtype="float32", max_total_tokens=8192
    )
    server = WorkerServer(WorkerConfig(engine=engine, in_process=True), fleet_secret.generate())
    bound = await server.start()
    try:
        async with AsyncClient(bound.address, tenant="example", timeout_s=300) as client:
            for question in QUESTIONS:
                prompt = [{"role": "user", "content": question}]
                print(report(question, await compare(client, prompt, ADAPTER, caches=question)))
    finally:
        await server.stop(0.0)


def main() -> None:
    """Make the adapter where it is missing, and show what it says."""
    root = paths.home() / "adapters"
    if not (root / ADAPTER / "adapter_model.safetensors").exists():
        subprocess.run([sys.executable, str(MAKER), str(root / ADAPTER)], check=True)
    asyncio.run(show(root))


if __name__ == "__main__":
    main()
