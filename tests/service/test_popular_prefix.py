"""F9 for real: a router with heat on before three processes that are workers but for their model."""

import asyncio
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from prefixmesh.client import AsyncClient
from tests.support.failure_fleet import FailureFleet
from tests.support.pinning import some_ids

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SHARED_TOKENS, OWN_TOKENS = 640, 64
REQUESTS, AT_A_TIME = 600, 12
WORKER = ("--max-total-tokens", "65536", "--step-ms", "2", "--prefill-ms-per-token", "0.2")


@pytest.fixture
def fleet(tmp_path: Path, tiny_model_folder: Path) -> Iterator[FailureFleet]:
    with FailureFleet(tmp_path, model=str(tiny_model_folder), worker_arguments=WORKER) as fleet:
        fleet.start(3)
        yield fleet


async def test_popular_prefix_is_spread_over_three_workers_and_stays_cached(fleet: FailureFleet) -> None:
    """80 % share one prefix → max/mean load at most 1.3, and 95 % of what one worker alone would find cached."""
    await fleet.until_ready()
    shared = some_ids(1, SHARED_TOKENS, fleet.vocab_size)
    numbers, rng = iter(range(REQUESTS)), random.Random(4)
    taken, found, possible = Counter[str](), 0, 0

    async def ask(client: AsyncClient) -> None:
        nonlocal found, possible
        for number in numbers:
            is_popular = rng.random() < 0.8
            own = some_ids(100 + number, OWN_TOKENS, fleet.vocab_size)
            answer = await client.generate(
                [*shared, *own] if is_popular else own, max_tokens=8, temperature=0.0
            )
            taken[answer.worker_id] += 1
            found += answer.cached_tokens
            possible += SHARED_TOKENS if is_popular and number else 0

    async with AsyncClient(fleet.router.address, timeout_s=60) as client:
        await asyncio.gather(*(ask(client) for _ in range(AT_A_TIME)))
    print(f"requests by worker {dict(taken)}, found {found} of {possible}")
    assert max(taken.values()) <= 1.3 * REQUESTS / 3
    assert found >= 0.95 * possible
