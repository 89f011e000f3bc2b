"""What an ideal prefix cache would have found, and so what a real one may have found: per tenant, from token ids alone. Pure.

The ideal cache is infinite, shared by the whole fleet, and remembers every prompt and answer of the tenant. Whatever a request finds
cached beyond that can only have come from somebody else: it is counted as a leak between tenants.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class Verdict:
    """One request's cached tokens against the oracle."""

    possible: int
    """The most prompt tokens an ideal cache of the tenant's own could have served; the last one is always computed."""

    leaked: int
    """Cached tokens that the tenant had never sent."""


class TenantOracle:
    """Remembers one tenant's token sequences. Costs O(sequences * length) a question, which is nothing at a demo's size."""

    def __init__(self) -> None:
        self._seen: list[npt.NDArray[np.int64]] = []

    def __repr__(self) -> str:
        return f"TenantOracle({len(self._seen)} sequences)"

    def judge(self, prompt: Sequence[int], cached: int) -> Verdict:
        """Compare what was cached of ``prompt`` with what the tenant had sent before."""
        ids = np.asarray(prompt, dtype=np.int64)
        known = max((_common_prefix(ids, seen) for seen in self._seen), default=0)
        return Verdict(possible=min(known, max(0, len(ids) - 1)), leaked=max(0, cached - known))

    def remember(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """Add a finished request."""
        self._seen.append(np.asarray([*prompt, *answer], dtype=np.int64))


def _common_prefix(one: npt.NDArray[np.int64], other: npt.NDArray[np.int64]) -> int:
    length = min(len(one), len(other))
    different = np.flatnonzero(one[:length] != other[:length])
    return int(different[0]) if len(different) else length
