"""What a step of the scheduler costs while thousands wait: everything but the model, with 2,000-token prompts.

Three crowds: *strangers* share nothing; *families* are 64 system prompts of 1,800 tokens, each cached; *one prompt* is a single
system prompt of 1,800 tokens that the first to run computes. Every step admits while it may, and each admitted request ends with
its first token, so that every step makes room for the next ones; ``full`` steps have no room, and only decode.

    python benchmarks/waiting_queue.py [--waiting 4096] [--steps 200] [--policy lpm] [--json FILE]
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from prefixmesh import tokens
from prefixmesh.cache.factory import make_prefix_cache
from prefixmesh.cache.pages import PageAllocator
from prefixmesh.cache.radix_cache import RadixOptions
from prefixmesh.config import SchedulePolicy
from prefixmesh.worker.messages import EngineSampling, Submit
from prefixmesh.worker.scheduler import Scheduler, SchedulerConfig

PROMPT_TOKENS, SYSTEM_TOKENS, VOCABULARY = 2000, 1800, 32000
POOL_TOKENS = 400_000
FAMILIES = 64
MAX_RUNNING = 64
NAMESPACE = b"n" * 16


def make_scheduler(waiting: int, policy: SchedulePolicy) -> Scheduler:
    """An empty one with room for all."""
    allocator = PageAllocator(POOL_TOKENS)
    config = SchedulerConfig(
        max_running_requests=MAX_RUNNING,
        max_queued_requests=waiting + FAMILIES,
        chunked_prefill_size=2048,
        schedule_policy=policy,
        context_length=8192,
        vocab_size=VOCABULARY,
    )
    return Scheduler(config, allocator, make_prefix_cache("radix", allocator, 1, RadixOptions()))


def submit(scheduler: Scheduler, request_id: str, prompt: list[int], max_tokens: int) -> None:
    sampling = EngineSampling(
        temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, max_tokens=max_tokens, stop_token_ids=()
    )
    scheduler.submit(
        Submit(request_id=request_id, namespace=NAMESPACE, tokens=tokens.pack(prompt), sampling=sampling), 0.0
    )


def draw(rng: random.Random, size: int) -> list[int]:
    return rng.choices(range(VOCABULARY), k=size)


def run_step(scheduler: Scheduler) -> float:
    """One step without a model; its milliseconds."""
    began = time.thread_time()
    step = scheduler.next_step(0.0)
    if step is not None:
        scheduler.complete(step, [1] * len(step.sampled), 0.0)
    scheduler.take_events()
    return (time.thread_time() - began) * 1e3


def fill(scheduler: Scheduler, crowd: str, waiting: int, max_tokens: int) -> float:
    """Submit the crowd; milliseconds for each submit."""
    rng = random.Random(4)
    systems = [draw(rng, SYSTEM_TOKENS) for _ in range(1 if crowd == "one prompt" else FAMILIES)]
    if crowd == "families":
        for index, system in enumerate(systems):
            submit(scheduler, f"system{index}", system, 0)
        while scheduler.has_work:
            run_step(scheduler)
    prompts = []
    for _ in range(waiting):
        head = [] if crowd == "strangers" else rng.choice(systems)
        prompts.append(head + draw(rng, PROMPT_TOKENS - len(head)))
    began = time.thread_time()
    for index, prompt in enumerate(prompts):
        submit(scheduler, f"r{index}", prompt, max_tokens)
    return (time.thread_time() - began) * 1e3 / waiting


def measure(crowd: str, waiting: int, steps: int, policy: SchedulePolicy) -> dict[str, Any]:
    """Milliseconds of steps that admit, and of steps that only decode beside a full queue."""
    scheduler = make_scheduler(waiting, policy)
    submit_ms = fill(scheduler, crowd, waiting, max_tokens=1)
    admitting = [run_step(scheduler) for _ in range(min(steps, waiting // 16))]
    full = make_scheduler(waiting, policy)
    fill(full, crowd, waiting, max_tokens=1000)
    while len(full.running) < MAX_RUNNING:
        run_step(full)
    while any(request.computed < request.length - 1 for request in full.running):
        run_step(full)
    decoding = [run_step(full) for _ in range(steps)]
    figures: dict[str, Callable[[list[float]], float]] = {"median": statistics.median, "max": max}
    row: dict[str, Any] = {"crowd": crowd, "waiting": waiting, "submit_ms": round(submit_ms, 3)}
    for name, times in (("admitting", admitting), ("decoding", decoding)):
        row |= {f"{name}_{figure}_ms": round(of(times), 3) for figure, of in figures.items()}
    return row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--waiting", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--policy", choices=("lpm", "fcfs", "priority"), default="lpm")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    for crowd in ("strangers", "families", "one prompt"):
        rows.append(measure(crowd, options.waiting, options.steps, options.policy))
        print(rows[-1])
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
