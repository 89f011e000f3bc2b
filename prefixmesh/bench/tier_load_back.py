"""When a prompt whose prefix is on the host gets its first token, against computing it: the part ``load_back`` of the bench.

Several prefixes take turns in a pool of somewhat more than two, so that each has left the device when it is asked for again. Beside each
such request the same prompt is computed by an engine without a host tier, in turns.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from prefixmesh.bench.tier_stage import Stage, TierEngine
from prefixmesh.bench.timed_mover import TimedMover

POOL_PREFIXES: Final = 2.25
"""Of those that take turns, in the device's pool: one that runs, one that is still locked by its copy, and what is theirs alone."""

HOST_PREFIXES: Final = 1.25
"""Of those that take turns, in the host's: all of them, and their questions."""


@dataclass(slots=True)
class _FirstTokens:
    """Seconds, one for each repeat."""

    computed: list[float] = field(default_factory=list)
    loaded: list[float] = field(default_factory=list)
    on_device: list[float] = field(default_factory=list)


def take_load_back(stage: Stage) -> None:
    """First tokens three ways, and the rates behind them."""
    effort = stage.effort
    pool = stage.whole_pages(POOL_PREFIXES * effort.prefix_tokens)
    ratio = HOST_PREFIXES * effort.prefixes * effort.prefix_tokens / pool
    with (
        stage.engine(max_total_tokens=pool, hicache_ratio=ratio) as tiered,
        stage.engine(max_total_tokens=pool) as plain,
    ):
        prefixes = [stage.draw(effort.prefix_tokens) for _ in range(effort.prefixes)]
        cold = [_compute(stage, tiered, prefix) for prefix in prefixes]
        taken = _FirstTokens()
        for turn in range(effort.load_back_repeats):
            _ask(stage, tiered, plain, prefixes[turn % effort.prefixes], taken)
    _tell(stage, taken, cold, tiered.timed)


def _compute(stage: Stage, engine: TierEngine, prefix: list[int]) -> float:
    """Compute a prefix for the first time, and wait for its backup."""
    served = engine.answer(prefix + stage.draw(stage.effort.own_tokens))
    engine.settle()
    return served.first_token_s


def _ask(stage: Stage, tiered: TierEngine, plain: TierEngine, prefix: list[int], taken: _FirstTokens) -> None:
    """A prefix three times, each with a question of its own but that the first two are equal: computed, loaded back, on the device."""
    effort = stage.effort
    whole = effort.prefix_tokens
    prompt = prefix + stage.draw(effort.own_tokens)
    plain.drive.clear()
    taken.computed.append(plain.answer(prompt).first_token_s)
    taken.loaded.append(tiered.answer(prompt, cached=whole, host=whole // 2).first_token_s)
    again = prefix + stage.draw(effort.own_tokens)
    taken.on_device.append(tiered.answer(again, cached=whole).first_token_s)
    tiered.settle()


def _tell(stage: Stage, taken: _FirstTokens, cold: Sequence[float], mover: TimedMover) -> None:
    effort = stage.effort
    sizes = {"prefix_tokens": float(effort.prefix_tokens), "own_tokens": float(effort.own_tokens)}
    with_backups = {"with_backups_ms": 1e3 * statistics.median(cold)}
    stage.add("recompute", [1e3 * value for value in taken.computed], sizes | with_backups)
    stage.add("load_back", [1e3 * value for value in taken.loaded])
    stage.add("device_hit", [1e3 * value for value in taken.on_device])
    stage.add("load_back_ratio", [statistics.median(taken.loaded) / statistics.median(taken.computed)])
    stage.add("load_back_rate", [mover.rate("restore") / 1e9], {"page_bytes": float(mover.page_bytes)})
    stage.add("offload_rate", [mover.rate("offload") / 1e9])
    whole = effort.prefix_tokens + effort.own_tokens
    stage.add("prefill_rate", [whole / value for value in taken.computed])
    stage.add("overlap", [mover.overlapped_s / mover.copying_s["restore"]])
