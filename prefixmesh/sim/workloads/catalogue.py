"""The workloads by name. Pure."""

import math
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

from prefixmesh.errors import ConfigError
from prefixmesh.sim.workload import MAX_REQUESTS, Workload
from prefixmesh.sim.workloads.adversarial import AllUnique, Bursts, HotPrefix
from prefixmesh.sim.workloads.agents import Agents
from prefixmesh.sim.workloads.branching import Fork, TreeOfThought
from prefixmesh.sim.workloads.conversations import Chat, CustomerService
from prefixmesh.sim.workloads.documents import Retrieval
from prefixmesh.sim.workloads.draws import Draws
from prefixmesh.sim.workloads.tenants import AdapterTenants


class Generator(Protocol):
    """What makes a workload; its fields are the workload's lengths and rates, all with defaults that its docstring states. People read it
    too: `prefixmesh traces list` shows it."""

    @property
    def requests(self) -> int:
        """About so many."""
        ...

    def make(self, draws: Draws) -> Workload:
        """The workload that these numbers give."""
        ...


GENERATORS: Final[Mapping[str, Callable[..., Generator]]] = {
    "customer-service": CustomerService,
    "agents": Agents,
    "fork": Fork,
    "tree-of-thought": TreeOfThought,
    "rag": Retrieval,
    "lora-tenants": AdapterTenants,
    "chat": Chat,
    "all-unique": AllUnique,
    "hot-prefix": HotPrefix,
    "bursts": Bursts,
}


def make_workload(name: str, random: Callable[[], float], **settings: Any) -> Workload:
    """A workload by its name. ``random`` as in ``Draws``; ``settings`` are fields of its generator. Raises ConfigError for a name that is
    none, and for a setting that is below 1."""
    generator = GENERATORS.get(name)
    if generator is None:
        raise ConfigError(f"no workload is called {name!r}; there are: {', '.join(GENERATORS)}")
    for field, value in settings.items():
        most = MAX_REQUESTS if field == "requests" else math.inf
        if not 1 <= value <= most:
            limit = f"from 1 to {most}" if math.isfinite(most) else "at least 1"
            raise ConfigError(f"{field} must be {limit}, got {value}")
    return generator(**settings).make(Draws(random))
