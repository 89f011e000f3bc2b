"""What backups cost those who decode meanwhile: the part ``backups`` of the bench.

A batch decodes; every few steps a new prompt is computed, whose KV is then copied to the host while the batch goes on. The same with the
host tier and without, in turns. The steps in which nothing but the batch was computed are compared, and of them those right after a prompt,
in which most of it is copied. Of all steps the longest time outside the model is told: if a step waited for a copy, it would be in it.
"""

import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from prefixmesh.bench.engine_drive import Served, greedy
from prefixmesh.bench.tier_stage import Stage, TierEngine

MS_PER_S: Final = 1_000.0


@dataclass(slots=True)
class _Run:
    """Seconds of one batch's steps."""

    decodes: list[float] = field(default_factory=list)
    """In which only the batch was computed."""

    after_arrivals: list[float] = field(default_factory=list)
    """Of those, the first after each prompt."""

    all: list[float] = field(default_factory=list)
    beside: list[float] = field(default_factory=list)
    """Of all, the time outside the model."""


def take_backups(stage: Stage) -> None:
    """Steps with backups and without, in turns."""
    effort = stage.effort
    arrivals = -(-effort.decode_steps // effort.arrival_every)
    batch = effort.decoders * (effort.decoder_prompt_tokens + effort.decode_steps)
    pool = stage.whole_pages(2 * (batch + arrivals * (effort.arrival_tokens + effort.page_size)))
    plain: list[_Run] = []
    tiered: list[_Run] = []
    with (
        stage.engine(max_total_tokens=pool) as without,
        stage.engine(max_total_tokens=pool, hicache_ratio=2.0) as with_host,
    ):
        for turn in range(effort.backup_repeats):
            both = ((without, plain), (with_host, tiered))
            for engine, runs in both[::-1] if turn % 2 else both:
                runs.append(_run(stage, engine))
        copied = float(with_host.timed.copied_bytes["offload"])
    _tell(stage, plain, tiered, copied)


def _tell(stage: Stage, plain: list[_Run], tiered: list[_Run], copied_bytes: float) -> None:
    steps = stage.effort.decode_steps
    off, on = ([_median_ms(one.decodes) for one in runs] for runs in (plain, tiered))
    after_off, after_on = (_median_ms(_all(one.after_arrivals for one in runs)) for runs in (plain, tiered))
    stage.add("decode_off", off, {"after_a_prompt_ms": after_off}, calls=steps)
    stage.add("decode_backups", on, {"after_a_prompt_ms": after_on}, calls=steps)
    ratios = [with_host / without for with_host, without in zip(on, off, strict=True)]
    stage.add("decode_ratio", ratios, {"after_a_prompt": after_on / after_off})
    notes = {
        "without_s": max(_all(one.beside for one in plain)),
        "longest_step_s": max(_all(one.all for one in tiered)),
        "longest_step_without_s": max(_all(one.all for one in plain)),
        "backed_up_bytes": copied_bytes,
    }
    stage.add("longest_beside", [max(one.beside) for one in tiered], notes)


def _run(stage: Stage, engine: TierEngine) -> _Run:
    """One batch from its first token to its last; everything is copied and nothing cached afterwards."""
    effort, drive = stage.effort, engine.drive
    sampling = greedy(effort.decode_steps)
    batch = [drive.submit(stage.draw(effort.decoder_prompt_tokens), sampling) for _ in range(effort.decoders)]
    while not all(one.generated for one in batch):
        drive.step()
    run = _Run()
    arrived: list[Served] = []
    was_alone = True
    while not any(one.ended for one in batch):
        if len(run.decodes) >= len(arrived) * effort.arrival_every:
            arrived.append(drive.submit(stage.draw(effort.arrival_tokens), greedy(1)))
        alone = all(one.ended for one in arrived)
        cost = drive.step()
        run.all.append(cost.forward_s + cost.loop_s)
        run.beside.append(cost.loop_s)
        if alone:
            run.decodes.append(run.all[-1])
            if not was_alone:
                run.after_arrivals.append(run.all[-1])
        was_alone = alone
    drive.finish()
    engine.settle()
    drive.clear()
    return run


def _median_ms(steps_s: list[float]) -> float:
    return MS_PER_S * statistics.median(steps_s)


def _all(lists: Iterable[list[float]]) -> list[float]:
    return [value for each in lists for value in each]
