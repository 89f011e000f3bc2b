"""What the runs of a command are to meet: kinds of mishaps, of which each seed draws its own, or one script that all of them go through."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Final

from prefixmesh.errors import ConfigError
from prefixmesh.sim.fault_draws import KINDS, draw_script
from prefixmesh.sim.fault_file import WrittenScript, parse_script
from prefixmesh.sim.fault_script import FleetScript
from prefixmesh.sim.kernel import Simulation

MIXED: Final = "mixed"
"""All kinds."""

LASTS_S: Final = 6.0
"""Of a run: in which requests come and mishaps begin that are drawn."""

MAX_FILE_BYTES: Final = 1 << 20
"""A thousand mishaps are a tenth of it."""

FLEET_WORKERS: Final = (2, 4)
FLEET_ROUTERS: Final = (1, 2)
"""How many a seed has, from and to: few, so that each mishap is much of the fleet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultPlan:
    """Kinds, or a script that was written."""

    kinds: tuple[str, ...] = KINDS
    written: WrittenScript | None = None

    def script(self, fork_rng: Callable[[str], Random], fleet_rng: Random, lasts_s: float) -> FleetScript:
        """Of one seed, which gives its sources of chance by name; the size of its fleet is drawn from ``fleet_rng``, whatever is written."""
        drawn = fleet_rng.randint(*FLEET_WORKERS), fleet_rng.randint(*FLEET_ROUTERS)
        if self.written is not None:
            return self.written.of_fleet(*self.written.names(*drawn))
        workers, routers = (
            [f"{kind}-{n}" for n in range(count)]
            for kind, count in zip(("worker", "router"), drawn, strict=True)
        )
        return draw_script(
            fork_rng("faults"), fork_rng("store faults"), workers, routers, lasts_s, self.kinds
        )


ALL_MIXED: Final = FaultPlan()


def script_of(seed: int, plan: FaultPlan) -> FleetScript:
    """What goes wrong in a seed's run."""
    fork_rng = Simulation(seed).fork_rng
    return plan.script(fork_rng, fork_rng("fleet"), LASTS_S)


def read_plan(given: str) -> FaultPlan:
    """``mixed``, kinds by their names with commas between, or a file's path. Raises ConfigError for what is none of them, and as
    ``parse_script``."""
    if given == MIXED:
        return ALL_MIXED
    names = tuple(dict.fromkeys(name.strip() for name in given.split(",")))
    if all(name in KINDS for name in names):
        return FaultPlan(kinds=names)
    path = Path(given)
    try:
        if not path.is_file():
            raise ConfigError(
                f"faults: {given!r:.200} is neither a file nor {MIXED} or some of {', '.join(KINDS)}"
            )
        with path.open("rb") as file:
            text = file.read(MAX_FILE_BYTES + 1)
        if len(text) > MAX_FILE_BYTES:
            raise ConfigError(f"faults {given}: must be at most {MAX_FILE_BYTES:,} bytes")
        return FaultPlan(written=parse_script(text.decode(), given))
    except UnicodeDecodeError as error:
        raise ConfigError(f"faults {given}: not JSON: it is no text in UTF-8") from error
    except OSError as error:
        raise ConfigError(f"faults {given:.200}: {error.strerror}") from error
