"""Whom a worker is to copy a prompt's KV from. Pure.

A decision weighs copies by what workers hold *or are expected to*, since that is what it has at hand. What is only expected cannot be copied
yet; so once a copy was chosen, those are looked for who hold it by their own word.
"""

from collections.abc import Sequence
from typing import Final

from prefixmesh.ids import Fingerprint
from prefixmesh.kv_source import KvSource
from prefixmesh.router.cost import CandidateTerms
from prefixmesh.router.decision import Decision
from prefixmesh.router.fleet_state import FleetState
from prefixmesh.router.placement import RouteRequest

MAX_SOURCES: Final = 2
"""The second is asked when the first has left or evicted it meanwhile; by then a third would be slower than to compute."""


def with_sources(fleet: FleetState, request: RouteRequest, decision: Decision) -> Decision | None:
    """The decision with whom to copy from, under the first of the request's chains of which somebody can give what is counted on; None where
    nobody can. Cost as ``find_sources`` for each chain."""
    for number, chain in enumerate(request.public, 1):
        boundary = chain.prefix.boundary_tokens
        if sources := find_sources(fleet, chain.fingerprints, decision.terms, boundary):
            return decision._replace(chain=number, sources=sources)
    sources = find_sources(fleet, request.fingerprints, decision.terms)
    return decision._replace(sources=sources) if sources else None


def find_sources(
    fleet: FleetState, fingerprints: Sequence[Fingerprint], terms: CandidateTerms, boundary_tokens: int = 0
) -> tuple[KvSource, ...]:
    """Who can give what ``terms`` count on copying of a prompt with these blocks, the best first: who holds most, of those the least busy.
    Empty: nobody can, as far as they have told. O(blocks walked + rows).

    ``boundary_tokens`` is of the public prefix that the blocks' names are made behind; 0 without one.
    """
    columns, view = fleet.columns, fleet.view
    copies = columns.copies
    held = view.slot_rows.spread(view.find_told(fingerprints), fleet.block_size, columns.rows).total
    able = copies.gives & (copies.layout == copies.layout[terms.row]) & (held >= terms.cached_tokens)
    able[terms.row] = False
    rows = sorted(able.nonzero()[0].tolist(), key=lambda row: (-held.item(row), columns.in_flight.item(row)))
    entries = [fleet.at_row(row) for row in rows[:MAX_SOURCES]]
    return tuple(
        KvSource(
            address=entry.endpoint,
            incarnation=entry.load.incarnation,
            tokens=int(held.item(entry.row)),
            boundary_tokens=boundary_tokens,
        )
        for entry in entries
    )
