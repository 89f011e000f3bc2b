"""What a replay's worker reads once: as much as the engine's own plan of the same sequences does, and never what the cache does not share."""

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixmesh.ids import Fingerprint
from prefixmesh.sim.replay import replay
from prefixmesh.sim.replay_cache import CACHE_KINDS, CacheKind
from prefixmesh.sim.replay_cascade import CASCADE_HEAD_READS, SharedReads, cascade_min_reads
from prefixmesh.sim.replay_fleet import chained
from prefixmesh.sim.replay_job import Job
from prefixmesh.sim.replay_spec import ReplaySpec
from prefixmesh.sim.timing import TimingModel
from prefixmesh.sim.workload import Workload, WorkloadRequest
from prefixmesh.sim.workloads.catalogue import make_workload
from prefixmesh.worker.batch_plan import BatchPlan
from prefixmesh.worker.cascade_plan import MAX_SHARED_LEVELS, CascadeRule, build_cascade

BLOCK = 4
TIMING = TimingModel(step_ms=1.0, prefill_ms_per_token=0.001, decode_ms_per_kv_token=0.01)

Ids = tuple[int, ...]
prompts = st.lists(st.lists(st.integers(0, 1), max_size=6).map(tuple), min_size=1, max_size=7)
"""Walks down a tree of two branches a level: most share something, some are equal, some end in another's middle."""


def make_job(number: int, ids: Ids) -> Job:
    length = BLOCK * len(ids) + 1  # and a rest that fills no block
    request = WorkloadRequest(arrival_ms=0, input_length=length, output_length=5, block_ids=ids)
    job = Job(number, request, chained(ids, None), ())
    job.locked = job.names
    return job


def decoding(walks: Sequence[Ids], rule: CascadeRule, leavers: Sequence[int] = ()) -> SharedReads:
    shared = SharedReads(BLOCK, rule)
    jobs = [make_job(number, ids) for number, ids in enumerate(walks)]
    for job in jobs:
        shared.add(job)
    for number in leavers:
        shared.remove(jobs[number])
    return shared


def engine_saves(walks: Sequence[Ids], rule: CascadeRule) -> int:
    """Tokens that the engine's plan reads less than all sequences have, each with a page of its own behind its prompt's."""
    page_of: dict[Fingerprint, int] = {}
    tables = []
    for number, ids in enumerate(walks):
        shared = [page_of.setdefault(name, len(page_of)) for name in chained(ids, None)]
        tables.append([*shared, 1000 + number])
    counts = np.cumsum([0, *map(len, tables)], dtype=np.int32)
    sequences, ints = len(tables), np.int32
    plan = BatchPlan(
        token_ids=np.zeros(sequences, ints),
        positions=np.array([BLOCK * (len(table) - 1) for table in tables], ints),
        out_slots=np.zeros(sequences, ints),
        qo_indptr=np.arange(sequences + 1, dtype=ints),
        kv_indptr=counts,
        kv_indices=np.array([page for table in tables for page in table], ints),
        last_page_len=np.ones(sequences, ints),
        logit_rows=np.arange(sequences, dtype=ints),
    )
    cascade = build_cascade(plan, BLOCK, rule)
    if cascade is None:
        return 0
    return BLOCK * (len(plan.kv_indices) - sum(len(level.kv_indices) for level in cascade.levels))


@settings(derandomize=True, deadline=None)
@given(walks=prompts, least=st.integers(1, 60), levels=st.integers(1, 4))
def test_saves_what_the_engines_own_plan_saves(walks: list[Ids], least: int, levels: int) -> None:
    rule = CascadeRule(least, levels)
    assert decoding(walks, rule).saved_tokens == engine_saves(walks, rule)


@settings(derandomize=True, deadline=None)
@given(walks=prompts)
def test_without_bounds_every_block_is_read_once(walks: list[Ids]) -> None:
    unique = {name for ids in walks for name in chained(ids, None)}
    saved = decoding(walks, CascadeRule(1, 100)).saved_tokens
    assert saved == BLOCK * (sum(map(len, walks)) - len(unique))


@settings(derandomize=True, deadline=None)
@given(walks=prompts, data=st.data())
def test_who_has_left_shares_nothing_any_more(walks: list[Ids], data: st.DataObject) -> None:
    leavers = data.draw(st.lists(st.sampled_from(range(len(walks))), unique=True))
    left = [ids for number, ids in enumerate(walks) if number not in leavers]
    rule = CascadeRule(1, MAX_SHARED_LEVELS)
    assert decoding(walks, rule, leavers).saved_tokens == decoding(left, rule).saved_tokens


def test_bound_is_the_engines_for_cpus() -> None:
    from prefixmesh.worker.model.cascade_bound import CPU_HEAD_READS, cpu_rule

    assert CASCADE_HEAD_READS == CPU_HEAD_READS
    assert [cascade_min_reads(heads) for heads in (8, 3, 1)] == [1536, 4096, 12_288]
    assert cpu_rule(7).min_reads == cascade_min_reads(7)


def test_steps_read_the_shared_prompt_once_and_what_each_has_of_its_own() -> None:
    """Four answers of 101 tokens from one prompt of 400: steps read 400 + 4 x n in the place of 4 x (400 + n). The first is a step before
    the others, so that in the last step three are left, who do not reach the bound."""
    requests = [
        WorkloadRequest(arrival_ms=0, input_length=400, output_length=101, block_ids=tuple(range(100)))
        for _ in range(4)
    ]
    workload = Workload(name="fork", block_size=BLOCK, requests=requests)
    spec = ReplaySpec(workers=1, device_tokens=4000, timing=TIMING, cascade_min_reads=1600)
    each, once, not_yet = (
        replay(workload, one, "round_robin").token_ms.p50
        for one in (
            spec,
            replace(spec, cascade=True),
            replace(spec, cascade=True, cascade_min_reads=1601),
        )
    )
    assert each - once == pytest.approx(0.99 * 0.01 * 3 * 400)
    assert not_yet == each


@pytest.mark.parametrize("at_once", [False, True])
def test_what_is_not_shared_in_the_cache_is_not_read_once_either(*, at_once: bool) -> None:
    workload = make_workload("fork", Random(0).random, requests=80, block_size=8)
    spec = ReplaySpec(workers=2, device_tokens=60_000, timing=TIMING, cascade_min_reads=1000, at_once=at_once)
    read_each = {kind: replay(workload, replace(spec, cache=kind), "cost") for kind in CACHE_KINDS}
    read_once = {
        kind: replay(workload, replace(spec, cache=kind, cascade=True), "cost") for kind in CACHE_KINDS
    }
    assert read_once["off"] == read_each["off"]
    shared: tuple[CacheKind, ...] = ("radix", "hash")
    for kind in shared:
        assert read_once[kind].token_ms.p50 < 0.8 * read_each[kind].token_ms.p50
        assert read_once[kind].cached_share == pytest.approx(read_each[kind].cached_share, abs=0.05)
