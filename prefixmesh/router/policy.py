"""The policies by name: each picks one of the rows that are able to take a request. Pure.

``cost`` is the product's own. The others stand beside it to be compared with, and each does what its name says and nothing else.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from prefixmesh.ids import Fingerprint
from prefixmesh.router.cost import Costs, Demand
from prefixmesh.router.fleet_columns import FleetColumns, Mask
from prefixmesh.router.matched_tokens import MatchedTokens
from prefixmesh.router.measured_rates import Column
from prefixmesh.router_config import (
    DEFAULT_MAX_WAIT_S,
    DEFAULT_SLOW_START_S,
    DEFAULT_SPILL_WEIGHT,
    RoutingPolicy,
)

TIE_SHARE: Final = 0.1
"""Costs do not tell workers apart that hold equally much, and the adapter or not, where they are closer than this share of what computing
the request costs: measured rates wobble by a few percent, and the fastest of equals would otherwise get every request, busy or not,
and do all the evicting. Waiting is left out of the share: half a second more of a queue of five is no wobble. Among such workers the
one with the shortest wait is taken."""

HASH_LOAD_FACTOR: Final = 1.25
"""``prefix_hash``: no worker gets a request that has this many times the mean of requests already (Mirrokni et al., "Consistent
hashing with bounded loads", 2018). Lower spreads more evenly and moves more prefixes."""

HASHED_BLOCKS: Final = 4
"""``prefix_hash`` goes by so many leading blocks, 256 tokens of 64 each: enough to tell system prompts apart, few enough that prompts with
the same one stay together."""

_MIX_1: Final = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2: Final = np.uint64(0x94D049BB133111EB)
"""The finisher of SplitMix64 (Steele et al., 2014): every bit of the input moves every bit of the output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyConfig:
    """How a router decides."""

    policy: RoutingPolicy = "cost"
    spill_weight: float = DEFAULT_SPILL_WEIGHT
    """How much the work that a choice adds for everyone else counts beside the request's own wait."""

    slow_start_s: float = DEFAULT_SLOW_START_S
    """How long a worker that joins is a newcomer (``slow_start``); 0 knows none."""

    affinity_ms: float = 0.0
    """Milliseconds that the worker of a caller's last request may cost more and still be taken; 0 knows no sessions. At most as many as
    would not tell workers apart anyway, so that it never beats a real difference."""

    max_wait_s: float = DEFAULT_MAX_WAIT_S
    """Who would wait longer is refused, and who would end after its deadline (``overload``); 0 refuses nobody."""


class Choice(NamedTuple):
    """What a policy may look at. At least one row is able."""

    columns: FleetColumns
    able: Mask
    matches: MatchedTokens
    costs: Costs
    demand: Demand
    affinity_ms: float
    turn: int
    chance: int


class Pick(NamedTuple):
    """A row, and whether the turn decided between equals."""

    row: int
    was_tie: bool


def cheapest(choice: Choice) -> Pick:
    """Least cost; among those that it does not tell apart, the shortest wait, then fewest requests; among those, by turn. The caller's last
    worker is taken if what is taken off for that makes it the cheapest."""
    costs = choice.costs
    compared, best = costs.compared, int(costs.compared.argmin())
    home = choice.demand.home_row
    if home is not None and choice.affinity_ms and compared[home] - choice.affinity_ms <= compared[best]:
        return Pick(home, was_tie=False)
    margin = TIE_SHARE * (1.0 + costs.spill_weight) * costs.prefill.item(best)
    rows = (compared <= np.array(compared.item(best) + margin)).nonzero()[0]
    if len(rows) > 1:
        counted = costs.counted[rows]
        rows = rows[counted == np.array(costs.counted.item(best))]
        if costs.adapter_load is not None:
            rows = rows[(costs.adapter_load[rows] > 0.0) == (costs.adapter_load.item(best) > 0.0)]
    if len(rows) == 1:
        return Pick(best, was_tie=False)
    wait = costs.wait[rows]
    rows = rows[wait == wait[wait.argmin()]]
    return _least(choice.columns.in_flight[rows], rows, choice.turn)


def round_robin(choice: Choice) -> Pick:
    """Everyone in turn."""
    rows = choice.able.nonzero()[0]
    return _in_turn(rows, choice.turn)


def at_random(choice: Choice) -> Pick:
    """Anyone."""
    rows = choice.able.nonzero()[0]
    return Pick(int(rows[choice.chance % len(rows)]), was_tie=False)


def least_loaded(choice: Choice) -> Pick:
    """Fewest requests; equals in turn."""
    rows = choice.able.nonzero()[0]
    return _least(choice.columns.in_flight[rows], rows, choice.turn)


def power_of_two(choice: Choice) -> Pick:
    """Of two drawn at random, the one with fewer requests."""
    rows = choice.able.nonzero()[0]
    count = len(rows)
    high, low = divmod(choice.chance, 1 << 32)
    first = high % count
    second = (first + 1 + low % (count - 1)) % count if count > 1 else first
    load = choice.columns.in_flight
    return Pick(int(min(rows[first], rows[second], key=lambda row: load[row])), was_tie=False)


def longest_match(choice: Choice) -> Pick:
    """Most tokens held, on whatever tier; equals in turn."""
    rows = choice.able.nonzero()[0]
    return _least(-choice.matches.total[rows], rows, choice.turn)


def prefix_key(fingerprints: Sequence[Fingerprint], whole_name: int) -> int:
    """What ``prefix_hash`` goes by: the name of a prompt's first blocks, or of all of it where it has no whole block. O(1)."""
    return fingerprints[min(len(fingerprints), HASHED_BLOCKS) - 1] if fingerprints else whole_name


def prefix_hash(choice: Choice) -> Pick:
    """Consistent hashing of the prompt's first blocks with bounded load: of the workers that are not too busy, the one that draws the
    highest number for the prefix (rendezvous hashing: Thaler and Ravishankar, 1998). A worker that comes or goes moves its own
    share of the prefixes only."""
    columns, able = choice.columns, choice.able
    loads = np.where(able, columns.in_flight, np.inf)
    bound = np.ceil(HASH_LOAD_FACTOR * (np.sum(loads, where=able) + 1.0) / np.count_nonzero(able))
    drawn = _mixed(columns.name_hash ^ np.uint64(choice.demand.prefix_key))
    # The least busy is always below the bound, which is above the mean.
    drawn[loads >= bound] = 0
    return Pick(int(drawn.argmax()), was_tie=False)


def _mixed(numbers: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    numbers ^= numbers >> np.uint64(30)
    numbers *= _MIX_1
    numbers ^= numbers >> np.uint64(27)
    numbers *= _MIX_2
    numbers ^= numbers >> np.uint64(31)
    return numbers


def _least(values: Column, rows: npt.NDArray[np.intp], turn: int) -> Pick:
    return _in_turn(rows[values == values[values.argmin()]], turn)


def _in_turn(rows: npt.NDArray[np.intp], turn: int) -> Pick:
    return Pick(int(rows[turn % len(rows)]), was_tie=len(rows) > 1)


PICKS: Final[dict[RoutingPolicy, Callable[[Choice], Pick]]] = {
    "cost": cheapest,
    "round_robin": round_robin,
    "random": at_random,
    "least_loaded": least_loaded,
    "power_of_two": power_of_two,
    "longest_match": longest_match,
    "prefix_hash": prefix_hash,
}
