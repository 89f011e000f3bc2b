"""What `lpm` buys and what it costs: a mix of requests with much and with little in the cache, under `lpm` and under `fcfs`.

The scheduler and the prefix cache are the ones that serve; the model is a step time on a virtual clock, so a run is exact, repeats
to the microsecond, and says nothing about this machine. Half of the requests (*warm*) continue one of ``--prefixes`` long prefixes
and so find 95 % of their prompt, when it has not been evicted; the other half (*cold*) share only their first 5 %. Arrivals are
Poisson. The load is a share of what the same requests would take with nothing evicted and every step full.

    python benchmarks/schedule_policies.py [--requests 2000] [--load 0.8 --load 1.1 ...] [--pool 65536] [--prefixes 64] [--bound 32 ...]
        [--seeds 3] [--json FILE]
"""

import argparse
import json
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from prefixmesh import tokens
from prefixmesh.cache.factory import make_prefix_cache
from prefixmesh.cache.pages import PageAllocator
from prefixmesh.config import SchedulePolicy
from prefixmesh.worker.messages import Admitted, Ended, EngineSampling, Submit, TokensOut
from prefixmesh.worker.scheduler import Scheduler, SchedulerConfig, Step

Group = Literal["warm", "cold"]

PROMPT_TOKENS = 2000
WARM_SHARE, COLD_SHARE = 0.95, 0.05
ANSWER_TOKENS = 64
CHUNK_TOKENS = 2048
MAX_RUNNING = 64
VOCABULARY = 32000

STEP_MS = 8.0
"""A step that computes next to nothing: reading the weights of a model of 8 billion parameters once."""

PREFILL_TOKENS_PER_MS = 20.0
DECODE_MS = 0.05
"""What one decoding sequence adds to a step."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of the workload."""

    at: float
    request_id: str
    group: Group
    prompt: bytes


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one policy made of one workload."""

    hit_share: float
    """Prompt tokens found in the cache, of all."""

    requests_per_s: float
    first_token_p50_s: dict[Group, float]
    first_token_p99_s: dict[Group, float]


def workload(count: int, rate: float, prefixes: int, rng: random.Random) -> Iterator[Arrival]:
    """Requests at ``rate`` a second."""

    def fresh(size: int) -> list[int]:
        return rng.choices(range(VOCABULARY), k=size)

    long_size, short_size = int(PROMPT_TOKENS * WARM_SHARE), int(PROMPT_TOKENS * COLD_SHARE)
    hot = [fresh(long_size) for _ in range(prefixes)]
    opening = fresh(short_size)
    now = 0.0
    for index in range(count):
        now += rng.expovariate(rate)
        group: Group = "warm" if rng.random() < 0.5 else "cold"
        start = rng.choice(hot) if group == "warm" else opening
        prompt = tokens.pack(start + fresh(PROMPT_TOKENS - len(start)))
        yield Arrival(now, f"{group}-{index}", group, prompt)


def full_rate() -> float:
    """Requests a second with everything cached that can be, and every step full."""
    own = PROMPT_TOKENS * (1 - (WARM_SHARE + COLD_SHARE) / 2)
    per_request_ms = own / PREFILL_TOKENS_PER_MS + ANSWER_TOKENS * (DECODE_MS + STEP_MS / MAX_RUNNING)
    return 1000.0 / per_request_ms


def step_s(step: Step) -> float:
    """How long the model takes for it."""
    return (STEP_MS + step.prefill_tokens / PREFILL_TOKENS_PER_MS + step.decoding * DECODE_MS) / 1000.0


def submit_of(arrival: Arrival) -> Submit:
    sampling = EngineSampling(
        temperature=0.0,
        top_k=0,
        top_p=1.0,
        min_p=0.0,
        seed=0,
        max_tokens=ANSWER_TOKENS,
        stop_token_ids=(),
    )
    return Submit(
        request_id=arrival.request_id, namespace=b"n" * 16, tokens=arrival.prompt, sampling=sampling
    )


def simulate(arrivals: Sequence[Arrival], policy: SchedulePolicy, pool: int, bound: int) -> Outcome:
    """Serve a workload to its end."""
    allocator = PageAllocator(pool)
    scheduler = Scheduler(
        SchedulerConfig(
            max_running_requests=MAX_RUNNING,
            max_queued_requests=len(arrivals),
            chunked_prefill_size=CHUNK_TOKENS,
            schedule_policy=policy,
            context_length=PROMPT_TOKENS + ANSWER_TOKENS,
            vocab_size=VOCABULARY,
            max_passed_over=bound,
        ),
        allocator,
        make_prefix_cache("radix", allocator, 1),
    )
    arrived_at = {arrival.request_id: arrival.at for arrival in arrivals}
    first_token_at: dict[str, float] = {}
    hits = 0
    now, upcoming = 0.0, 0
    while upcoming < len(arrivals) or scheduler.has_work:
        if not scheduler.has_work:
            now = max(now, arrivals[upcoming].at)
        while upcoming < len(arrivals) and arrivals[upcoming].at <= now:
            scheduler.submit(submit_of(arrivals[upcoming]), arrivals[upcoming].at)
            upcoming += 1
        step = scheduler.next_step(now)
        if step is not None:
            now += step_s(step)
            scheduler.complete(step, [1] * len(step.sampled), now)
        for event in scheduler.take_events():
            match event:
                case Admitted(cached_tokens=cached):
                    hits += cached
                case TokensOut(request_id=request_id, position=0):
                    first_token_at[request_id] = now
                case Ended(reason=reason):
                    assert reason == "length", event
                case _:
                    pass
    waits = {
        group: [
            first_token_at[one.request_id] - arrived_at[one.request_id]
            for one in arrivals
            if one.group == group
        ]
        for group in ("warm", "cold")
    }
    return Outcome(
        hit_share=hits / (len(arrivals) * PROMPT_TOKENS),
        requests_per_s=len(arrivals) / now,
        first_token_p50_s={group: float(np.quantile(some, 0.5)) for group, some in waits.items()},
        first_token_p99_s={group: float(np.quantile(some, 0.99)) for group, some in waits.items()},
    )


def median_outcome(outcomes: Sequence[Outcome]) -> Outcome:
    """Figure by figure."""

    def median(read: Callable[[Outcome], float]) -> float:
        return statistics.median(read(one) for one in outcomes)

    groups: tuple[Group, Group] = ("warm", "cold")
    return Outcome(
        hit_share=median(lambda one: one.hit_share),
        requests_per_s=median(lambda one: one.requests_per_s),
        first_token_p50_s={group: median(lambda one, g=group: one.first_token_p50_s[g]) for group in groups},
        first_token_p99_s={group: median(lambda one, g=group: one.first_token_p99_s[g]) for group in groups},
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument(
        "--load", type=float, action="append", help="repeatable; 0.7, 0.9 and 1.2 unless given"
    )
    parser.add_argument(
        "--bound", type=int, action="append", help="max_passed_over of lpm; repeatable; 32 unless given"
    )
    parser.add_argument("--pool", type=int, default=98304, help="tokens of KV")
    parser.add_argument("--prefixes", type=int, default=16)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    cases: list[tuple[SchedulePolicy, int]] = [
        ("fcfs", 32),
        *(("lpm", bound) for bound in options.bound or [32]),
    ]
    rows = []
    print("load policy bound   hit share   requests/s   first token, s: warm p50   p99   cold p50   p99")
    for load in options.load or [0.7, 0.9, 1.2]:
        for policy, bound in cases:
            outcomes = []
            for seed in range(options.seeds):
                rng = random.Random(seed)
                arrivals = list(workload(options.requests, load * full_rate(), options.prefixes, rng))
                outcomes.append(simulate(arrivals, policy, options.pool, bound))
            one = median_outcome(outcomes)
            p50, p99 = one.first_token_p50_s, one.first_token_p99_s
            print(
                f"{load:4.2f} {policy:>6} {bound:5d} {one.hit_share:11.3f} {one.requests_per_s:12.2f} "
                f"{p50['warm']:24.2f} {p99['warm']:5.2f} {p50['cold']:10.2f} {p99['cold']:5.2f}"
            )
            rows.append(
                {
                    "load": load,
                    "policy": policy,
                    "max_passed_over": bound,
                    "hit_share": one.hit_share,
                    "requests_per_s": one.requests_per_s,
                    "first_token_p50_s": p50,
                    "first_token_p99_s": p99,
                }
            )
    if options.json:
        options.json.write_text(json.dumps({"full_rate": full_rate(), "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
