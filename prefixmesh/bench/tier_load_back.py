"""When a prompt whose prefix is on the host gets its first token, against computing it: the part ``load_back`` of the bench.

Several prefixes take turns in a pool of somewhat more than two, so that each has left the device when it is asked for again. Beside each
such request the same prompt is computed by an engine without a host tier, in turns.
"""

import statistics
from typing import Final

from prefixmesh.bench.tier_stage import Stage, TierEngine

POOL_PREFIXES: Final = 2.25
"""Of those that take turns, in the device's pool: one that runs, one that is still locked by its copy, and what is theirs alone."""


def take_load_back(stage: Stage) -> None:
    """First tokens three ways, and the rates behind them."""
    effort = stage.effort
    pool = stage.whole_pages(POOL_PREFIXES * effort.prefix_tokens)
    ratio = 1.25 * effort.prefixes * effort.prefix_tokens / pool
    computed: list[float] = []
    loaded: list[float] = []
    hits: list[float] = []
    with (
        stage.engine(max_total_tokens=pool, hicache_ratio=ratio) as tiered,
        stage.engine(max_total_tokens=pool) as plain,
    ):
        prefixes = [stage.draw(effort.prefix_tokens) for _ in range(effort.prefixes)]
        cold = [_cold(stage, tiered, prefix) for prefix in prefixes]
        for turn in range(effort.load_back_repeats):
            prefix = prefixes[turn % effort.prefixes]
            ask = prefix + stage.draw(effort.own_tokens)
            plain.drive.clear()
            computed.append(plain.answer(ask).first_token_s)
            whole = effort.prefix_tokens
            loaded.append(tiered.answer(ask, cached=whole, host=whole // 2).first_token_s)
            again = prefix + stage.draw(effort.own_tokens)
            hits.append(tiered.answer(again, cached=whole).first_token_s)
            tiered.settle()
        rates = {kind: tiered.timed.rate(kind) / 1e9 for kind in ("restore", "offload")}
        overlap = tiered.timed.overlapped_s / tiered.timed.copying_s["restore"]
        page_bytes = float(tiered.timed.page_bytes)
    sizes = {"prefix_tokens": float(effort.prefix_tokens), "own_tokens": float(effort.own_tokens)}
    ms = [[1e3 * value for value in values] for values in (computed, loaded, hits, cold)]
    stage.add("recompute", ms[0], sizes | {"with_backups_ms": statistics.median(ms[3])})
    stage.add("load_back", ms[1])
    stage.add("device_hit", ms[2])
    stage.add("load_back_ratio", [statistics.median(loaded) / statistics.median(computed)])
    stage.add("load_back_rate", [rates["restore"]], {"page_bytes": page_bytes})
    stage.add("offload_rate", [rates["offload"]])
    whole = effort.prefix_tokens + effort.own_tokens
    stage.add("prefill_rate", [whole / value for value in computed])
    stage.add("overlap", [overlap])


def _cold(stage: Stage, engine: TierEngine, prefix: list[int]) -> float:
    """Compute a prefix for the first time, and wait for its backup."""
    served = engine.answer(prefix + stage.draw(stage.effort.own_tokens))
    engine.settle()
    return served.first_token_s
