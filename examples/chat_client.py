"""Two chats at once with AsyncClient: the second turn of each finds its first turn in the cache.

Usage: python examples/chat_client.py [HOST:PORT]   (default: the fleet that `prefixmesh up` started last)
"""

import asyncio
import sys

from prefixmesh.client import AsyncClient, ChatMessage
from prefixmesh.errors import PrefixmeshError

QUESTIONS = ("Name a river in France.", "How long is it?")


async def chat(client: AsyncClient, persona: str) -> None:
    """Ask the questions in turn, each with all that was said before."""
    history = [ChatMessage("system", f"You are {persona}. Answer in one sentence.")]
    for question in QUESTIONS:
        history.append(ChatMessage("user", question))
        async with client.stream(history, temperature=0, max_tokens=48) as stream:
            text = "".join([delta.text async for delta in stream])
        history.append(ChatMessage("assistant", text))
        answer = stream.answer
        cached = f"{answer.cached_tokens}/{answer.prompt_tokens} cached on {answer.worker_id}"
        print(f"[{persona}] {question} -> {text.strip()} ({cached})")


async def main(address: str | None) -> None:
    """Run the chats side by side."""
    async with AsyncClient(address, tenant="example", timeout_s=120) as client:
        await asyncio.gather(chat(client, "a geographer"), chat(client, "a poet"))


if __name__ == "__main__":
    try:
        asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else None))
    except PrefixmeshError as error:
        sys.exit(f"Error: {error}")
