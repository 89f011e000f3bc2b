"""The rules by name. Pure."""

from collections.abc import Mapping
from typing import Final

from prefixmesh.sim.rivals.backlog import backlog
from prefixmesh.sim.rivals.block_cost import block_cost
from prefixmesh.sim.rivals.match_gate import match_gate
from prefixmesh.sim.rivals.plain import at_random, least_loaded, round_robin
from prefixmesh.sim.rivals.view import Rule
from prefixmesh.sim.rivals.weighted_scores import weighted_scores

RULES: Final[Mapping[str, Rule]] = {
    "match_gate": match_gate,
    "block_cost": block_cost,
    "weighted_scores": weighted_scores,
    "backlog": backlog,
    "least_loaded": least_loaded,
    "round_robin": round_robin,
    "random": at_random,
}
