"""What it costs a worker to tell its cache and its load: the engine, of a step; the front, of a block, a reader and a report.

The engine is a real one with a real model, its recorder timed: what the cache's calls take, packing once a step, and encoding for the
front. Two steps are looked at: *decode* with 32 requests, whose answers are stored when they end (after ``--steps`` tokens, counted in), and
*prefill* of 512-token chunks, each of which is eight new blocks. The share is of this machine's own step, and beside it of the same step
by the arithmetic of ``sim.timing`` for a model of 8 billion parameters on an H100, where a step is short and the CPU much the same.

    python benchmarks/publisher_cost.py [--model smollm2] [--steps 128] [--json FILE] [--check]
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter, thread_time
from typing import Any, Final

import msgspec

from prefixmesh import tokens
from prefixmesh.cache.packed_names import pack_names
from prefixmesh.cache.publisher import CachePublisher
from prefixmesh.cache.tier import Tier
from prefixmesh.config import EngineConfig
from prefixmesh.ids import Epoch, Fingerprint, RequestId
from prefixmesh.proto.cache_news import EventBatch, encode_news
from prefixmesh.sim.timing import H100_8B
from prefixmesh.worker.cache_recorder import CacheRecorder
from prefixmesh.worker.cache_watchers import apply_changes
from prefixmesh.worker.engine import EngineCore
from prefixmesh.worker.engine_builder import build_engine
from prefixmesh.worker.front_load import FrontLoad
from prefixmesh.worker.messages import Abort, CacheChange, CacheChanges, EngineSampling, Submit

BATCH, PROMPT_TOKENS, CHUNK_TOKENS = 32, 256, 512
MOST_SHARE: Final = 0.01
"""Of a step, by issue: what telling may cost the engine."""

NAMESPACE: Final = b"n" * 16
EVENT_BLOCKS: Final = 8
ROUNDS: Final = 20


class TimedRecorder(CacheRecorder):
    """A recorder that adds up its own time on the processor, with the encoding of what it hands over and with the clock's."""

    __slots__ = ("blocks", "encode", "spent_s")

    def __init__(self) -> None:
        super().__init__()
        self.spent_s = 0.0
        self.blocks = 0
        self.encode = msgspec.msgpack.Encoder().encode

    def stored(self, tier: Tier, parent: Fingerprint | None, fingerprints: Sequence[Fingerprint]) -> None:
        began = thread_time()
        super().stored(tier, parent, fingerprints)
        self.spent_s += thread_time() - began
        self.blocks += len(fingerprints)

    def removed(self, tier: Tier, fingerprints: Sequence[Fingerprint]) -> None:
        began = thread_time()
        super().removed(tier, fingerprints)
        self.spent_s += thread_time() - began
        self.blocks += len(fingerprints)

    def take(self) -> list[CacheChange]:
        began = thread_time()
        changes = super().take()
        if changes:
            self.encode(CacheChanges(changes=changes))
        self.spent_s += thread_time() - began
        return changes


def submit(core: EngineCore, name: str, prompt: list[int], max_tokens: int) -> None:
    sampling = EngineSampling(
        temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, max_tokens=max_tokens, stop_token_ids=()
    )
    command = Submit(request_id=name, namespace=NAMESPACE, tokens=tokens.pack(prompt), sampling=sampling)
    core.handle(command, perf_counter())


def measure_steps(
    core: EngineCore, recorder: TimedRecorder, steps: int, ended: Sequence[str] = ()
) -> dict[str, float]:
    """Milliseconds of a step (the median: a machine that does other things makes some of them long), microseconds of the recorder in it (the
    mean, of time on the processor), and of the engine's figures for a report. The ends of the requests ``ended`` are
    counted in: an answer's blocks come with its end."""
    recorder.spent_s, recorder.blocks = 0.0, 0
    taken: list[float] = []
    for _ in range(steps):
        began = perf_counter()
        core.step(began)
        taken.append(perf_counter() - began)
    for name in ended:
        core.handle(Abort(request_id=name), perf_counter())
    encode = msgspec.msgpack.Encoder().encode
    return {
        "steps": steps,
        "step_ms": statistics.median(taken) * 1e3,
        "recorder_us": recorder.spent_s / steps * 1e6,
        "blocks_per_step": recorder.blocks / steps,
        "figures_us": median_us(lambda: encode(core.stats())),
    }


def measure_engine(model: str, steps: int) -> list[dict[str, Any]]:
    recorder = TimedRecorder()
    rng = random.Random(5)
    config = EngineConfig(
        model=model,
        dtype="bfloat16",
        device="cpu",
        max_running_requests=BATCH,
        chunked_prefill_size=CHUNK_TOKENS,
        max_total_tokens=BATCH * (PROMPT_TOKENS + 2 * steps) + 64 * CHUNK_TOKENS,
    )
    core = build_engine(config, recorder=recorder)

    def draw(size: int) -> list[int]:
        return rng.choices(range(core.info.vocab_size), k=size)

    for index in range(BATCH):
        submit(core, f"d{index}", draw(PROMPT_TOKENS), 2 * steps)
    while core.stats().uncached_tokens:
        core.step(perf_counter())
    decode = measure_steps(core, recorder, steps, [f"d{index}" for index in range(BATCH)])
    card_ms = H100_8B.decode_step_ms(BATCH, BATCH * (PROMPT_TOKENS + steps // 2))
    rows = [row("decode, batch 32", decode, card_ms)]
    chunks = max(steps // 8, 4)
    for index in range(chunks):
        submit(core, f"p{index}", draw(CHUNK_TOKENS), 0)
    prefill = measure_steps(core, recorder, chunks)
    card_ms = H100_8B.step_ms + H100_8B.prefill_ms(CHUNK_TOKENS)
    rows.append(row("prefill, 512 tokens", prefill, card_ms))
    return rows


def row(name: str, figures: dict[str, float], card_ms: float) -> dict[str, Any]:
    share = figures["recorder_us"] / 1e3 / figures["step_ms"]
    return (
        {"name": name}
        | figures
        | {"share": share, "share_of_h100_step": figures["recorder_us"] / 1e3 / card_ms}
    )


def median_us(call: Callable[[], Any], calls: int = 200) -> float:
    """Microseconds on the processor of one call: the median over rounds of their means."""
    rounds = []
    for _ in range(ROUNDS):
        began = thread_time()
        for _ in range(calls):
            call()
        rounds.append((thread_time() - began) / calls)
    return statistics.median(rounds) * 1e6


def measure_front() -> dict[str, float]:
    """Microseconds of the front's loop."""
    publisher = CachePublisher(lambda: Epoch(1))
    names = iter(range(1, 2**62))
    stored: list[list[Fingerprint]] = []

    def changes(kind: Any, blocks: list[Fingerprint]) -> CacheChanges:
        return CacheChanges(changes=[CacheChange(kind, Tier.DEVICE, None, pack_names(blocks))])

    def come_and_go() -> None:
        blocks = [Fingerprint(next(names) * 2**20) for _ in range(EVENT_BLOCKS)]
        stored.append(blocks)
        apply_changes(changes("stored", blocks), publisher)
        if len(stored) > 100:
            apply_changes(changes("removed", stored.pop(0)), publisher)

    def only_pack() -> None:
        blocks = [Fingerprint(next(names) * 2**20) for _ in range(EVENT_BLOCKS)]
        changes("stored", blocks)
        changes("removed", blocks)

    books_us = (median_us(come_and_go) - median_us(only_pack)) / (2 * EVENT_BLOCKS)
    place = (publisher.epoch, publisher.sequence - 20)
    events = publisher.events_since(*place)
    assert events is not None
    batch = EventBatch(events)
    reader_us = median_us(lambda: encode_news(batch).SerializeToString()) / (20 * EVENT_BLOCKS)
    return {"books_us_per_block": books_us, "reader_us_per_block": reader_us} | asyncio.run(measure_load())


async def measure_load() -> dict[str, float]:
    """A request's whole passage through the front's counts, with nobody reading."""
    load = FrontLoad()
    numbers = iter(range(10**9))

    def passage() -> None:
        with load.enter("router", RequestId(str(next(numbers))), 1) as place:
            place.submitted(1000)
            place.admitted(0, 500)
            place.token()

    return {"load_us_per_request": median_us(passage)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--steps", type=int, default=128, help="of decoding; an eighth of prefill")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--check", action="store_true", help=f"fail where a share is above {MOST_SHARE:.0%}")
    options = parser.parse_args()
    engine, front = measure_engine(options.model, options.steps), measure_front()
    for one in engine:
        print(
            f"{one['name']:20} step {one['step_ms']:8.2f} ms  recorder {one['recorder_us']:6.1f} us  "
            f"blocks {one['blocks_per_step']:5.2f}  share {one['share']:.4%}  of an H100's {one['share_of_h100_step']:.4%}  "
            f"figures for a report {one['figures_us']:5.1f} us"
        )
    print("front: " + "  ".join(f"{name} {value:.3f}" for name, value in front.items()))
    if options.json:
        options.json.write_text(json.dumps({"engine": engine, "front": front}, indent=1))
    if options.check and any(max(one["share"], one["share_of_h100_step"]) > MOST_SHARE for one in engine):
        sys.exit(f"telling takes more than {MOST_SHARE:.0%} of a step")


if __name__ == "__main__":
    main()
