"""What a worker that starts again finds on its disk: the part ``restart`` of the bench.

One engine computes prefixes and is closed; another one with the same folder is asked for each of them for the first time. A third, whose
model differs in its revision and in nothing else, must find none.
"""

import shutil
import statistics
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from prefixmesh.bench.tier_stage import Stage, TierEngine
from prefixmesh.model_files.source import resolve_model

POOL_PREFIXES: Final = 2.25
"""Of those asked for, in the device's pool: at most half of its pages are fetched for one prompt."""


def take_restart(stage: Stage) -> None:
    """Shares and first tokens after a restart."""
    effort = stage.effort
    prefix_tokens = effort.prefix_tokens
    pool = stage.whole_pages(POOL_PREFIXES * effort.restart_prefixes * (prefix_tokens + effort.own_tokens))
    with TemporaryDirectory(prefix="prefixmesh-bench-") as name:
        folder = str(Path(name) / "cache")
        tiers = {"max_total_tokens": pool, "hicache_ratio": 1.25, "disk_cache_dir": folder}
        with stage.engine(**tiers) as engine:
            prefixes = [stage.draw(prefix_tokens) for _ in range(effort.restart_prefixes)]
            cold = [
                engine.answer(prefix + stage.draw(effort.own_tokens)).first_token_s for prefix in prefixes
            ]
            engine.settle()
            written = float(engine.drive.core.stats().tiers.disk_bytes)
        with stage.engine(**tiers) as engine:
            asked = [engine.answer(prefix + stage.draw(effort.own_tokens)) for prefix in prefixes]
        shares = [min(one.cached_tokens, prefix_tokens) / prefix_tokens for one in asked]
        model = other_revision(stage.config.model, Path(name) / "other")
        with stage.engine(**tiers, model=model) as engine:
            found = [_cached(engine, prefix + stage.draw(effort.own_tokens)) for prefix in prefixes]
    warm = [one.first_token_s for one in asked]
    stage.add("restart_share", shares, {"disk_bytes": written})
    stage.add("restart_cold", [1e3 * value for value in cold])
    stage.add("restart_warm", [1e3 * value for value in warm])
    stage.add("restart_ratio", [statistics.median(warm) / statistics.median(cold)])
    stage.add("other_revision", [float(max(found))])


def _cached(engine: TierEngine, prompt: list[int]) -> int:
    return engine.answer(prompt).cached_tokens


def other_revision(model: str, folder: Path) -> str:
    """A copy of a model's files that says and computes the same, under another revision; returns its path."""
    files = resolve_model(model)
    if files.kind == "gguf":
        folder.mkdir()
        copied = Path(shutil.copy(files.path, folder))
        with copied.open("ab") as file:
            file.write(b"\0" * 32)  # behind the last tensor, where nobody reads
        return str(copied)
    copied = Path(shutil.copytree(files.path, folder))
    config = copied / "config.json"
    config.write_text(config.read_text() + "\n")
    return str(copied)
