"""What a worker that starts again finds on its disk: the part ``restart`` of the bench.

One engine computes prefixes and is closed; another one with the same folder is asked for each of them for the first time. A third, whose
model differs in its revision and in nothing else, must find none.
"""

import shutil
import statistics
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from prefixmesh.bench.engine_drive import Served
from prefixmesh.bench.tier_stage import Stage, TierEngine
from prefixmesh.model_files.source import resolve_model

POOL_PREFIXES: Final = 1.25
"""Of those asked for, in the device's pool: all of them, and their questions."""


def take_restart(stage: Stage) -> None:
    """Shares and first tokens after a restart."""
    effort = stage.effort
    pool = POOL_PREFIXES * effort.restart_prefixes * (effort.prefix_tokens + effort.own_tokens)
    with TemporaryDirectory(prefix="prefixmesh-bench-") as name:
        folder = Path(name)
        settings: dict[str, Any] = {
            "max_total_tokens": stage.whole_pages(pool),
            "hicache_ratio": 1.0,
            "disk_cache_dir": str(folder / "cache"),
        }
        with stage.engine(**settings) as engine:
            prefixes = [stage.draw(effort.prefix_tokens) for _ in range(effort.restart_prefixes)]
            cold = _ask(stage, engine, prefixes)
            engine.settle()
            disk_bytes = float(engine.drive.core.stats().tiers.disk_bytes)
        with stage.engine(**settings) as engine:
            warm = _ask(stage, engine, prefixes)
        model = other_revision(stage.config.model, folder / "other")
        with stage.engine(**settings, model=model) as engine:
            foreign = _ask(stage, engine, prefixes)
    whole = effort.prefix_tokens
    cold_s, warm_s = ([one.first_token_s for one in asked] for asked in (cold, warm))
    shares = [min(one.cached_tokens, whole) / whole for one in warm]
    stage.add("restart_share", shares, {"disk_bytes": disk_bytes})
    stage.add("restart_cold", [1e3 * value for value in cold_s])
    stage.add("restart_warm", [1e3 * value for value in warm_s])
    stage.add("restart_ratio", [statistics.median(warm_s) / statistics.median(cold_s)])
    stage.add("other_revision", [float(max(one.cached_tokens for one in foreign))])


def _ask(stage: Stage, engine: TierEngine, prefixes: Sequence[list[int]]) -> list[Served]:
    """Each prefix once, with a question of its own."""
    return [engine.answer(prefix + stage.draw(stage.effort.own_tokens)) for prefix in prefixes]


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
