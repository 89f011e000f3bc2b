"""Time to first token of the whole path, on real processes: cold against warm, and through the router against direct.

Starts one worker and one router on loopback with the default model, as processes of their own, and measures from a client:

- a 1,500-token prompt cold, and again with another last 100 tokens (1,400 cached): median of each, and their ratio;
- a cached 65-token prompt through the router and to the worker directly, in turns: the median of the pairs' differences.

    python benchmarks/first_token.py [--repeats 7] [--pairs 200] [--json FILE]
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from grpc_health.v1 import health_pb2, health_pb2_grpc

from prefixmesh import tokens
from prefixmesh.client import Client
from prefixmesh.requests import TokenPrompt
from prefixmesh.rpc.channel import open_sync_channel

LONG_TOKENS = 1500
SHARED_TOKENS = 1400
SHORT_TOKENS = 65
VOCABULARY = range(1000, 40000)


@contextmanager
def server(module: str, *arguments: str) -> Iterator[str]:
    """Run ``python -m module``; yields the address it says it listens on, and ends it at the end."""
    process = subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if " listening on " in line:
                yield line.rsplit(" ", 1)[1].strip()
                break
        else:
            raise RuntimeError(f"{module} ended with {process.wait()} before it was ready")
    finally:
        process.terminate()
        process.wait(timeout=30)


def wait_until_serving(address: str) -> None:
    """Returns when the server's health says SERVING: a router listens before it has heard from its workers."""
    with open_sync_channel(address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        for answer in stub.Watch(health_pb2.HealthCheckRequest(), timeout=60):
            if answer.status == health_pb2.HealthCheckResponse.SERVING:
                return


def first_token_ms(client: Client, ids: list[int]) -> float:
    """Milliseconds from sending a prompt to its first token."""
    answer = client.generate(TokenPrompt(tokens.pack(ids)), max_tokens=1, temperature=0, ignore_eos=True)
    assert answer.first_token_s is not None
    return answer.first_token_s * 1000


def cold_and_warm(client: Client, repeats: int, rng: random.Random) -> tuple[list[float], list[float]]:
    """First-token times of new prompts, and of prompts of which all but the last 100 tokens were sent before."""
    cold, warm = [], []
    for _ in range(repeats):
        ids = rng.choices(VOCABULARY, k=LONG_TOKENS)
        cold.append(first_token_ms(client, ids))
        tail = rng.choices(VOCABULARY, k=LONG_TOKENS - SHARED_TOKENS)
        warm.append(first_token_ms(client, ids[:SHARED_TOKENS] + tail))
    return cold, warm


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rng = random.Random(0)
    with ExitStack() as stack:
        secret = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "secret"
        common = ("--fleet-secret-file", str(secret), "--port", "0")
        worker_address = stack.enter_context(
            server("prefixmesh.worker", *common, "--max-total-tokens", "65536")
        )
        router_address = stack.enter_context(server("prefixmesh.router", *common, "--worker", worker_address))
        direct = stack.enter_context(Client(worker_address))
        routed = stack.enter_context(Client(router_address))
        wait_until_serving(router_address)
        routed.generate("hello", max_tokens=1, timeout_s=60)
        cold, warm = cold_and_warm(routed, options.repeats, rng)
        short = rng.choices(VOCABULARY, k=SHORT_TOKENS)
        for client in (direct, routed):
            first_token_ms(client, short)
        pairs = [(first_token_ms(direct, short), first_token_ms(routed, short)) for _ in range(options.pairs)]
    figures = {
        "cold_ms": statistics.median(cold),
        "warm_ms": statistics.median(warm),
        "warm_over_cold": statistics.median(warm) / statistics.median(cold),
        "direct_ms": statistics.median(a for a, _ in pairs),
        "routed_ms": statistics.median(b for _, b in pairs),
        "router_adds_ms": statistics.median(b - a for a, b in pairs),
    }
    for name, value in figures.items():
        print(f"{name:>16} {value:10.3f}")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
