"""From where on a cascade pays: the documented figure, and the measurement, told by a backend that takes the time it is told to."""

import time

import pytest
import torch

from prefixmesh.worker.batch_plan import BatchPlan
from prefixmesh.worker.cascade_plan import CascadeRule, build_cascade
from prefixmesh.worker.model import cascade_bound
from prefixmesh.worker.model.attention_groups import kv_lengths
from prefixmesh.worker.model.cascade_bound import MEASURED_SEQUENCES, cpu_rule, measured_rule, sharing_plan
from prefixmesh.worker.model.kv_pool import KVPool
from tests.support.paged_attention import config_of


class TimedBackend:
    """Plain: a second for each KV token read. Cascade: the same for its reads, and ``cost`` seconds."""

    def __init__(self, now: list[float], rule: CascadeRule | None, cost: float) -> None:
        self._now, self._rule, self._cost = now, rule, cost
        self._seconds = 0.0

    def prepare(self, plan: BatchPlan) -> None:
        self._seconds = float(kv_lengths(plan, 1).sum())
        cascade = None if self._rule is None else build_cascade(plan, 1, self._rule)
        if cascade is not None:
            self._seconds = sum(float(kv_lengths(level, 1).sum()) for level in cascade.levels) + self._cost

    def forward(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        assert layer == 0
        self._now[0] += self._seconds
        return q


def measure(
    monkeypatch: pytest.MonkeyPatch, cost: float, pool_tokens: int, lost_s: float = 0.0
) -> CascadeRule | None:
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    pool = KVPool(config_of(6, 2), pool_tokens, 1, torch.float32, torch.device("cpu"))
    return measured_rule(lambda rule: TimedBackend(now, rule, cost), pool, 6, lost_s)


@pytest.mark.parametrize(("cost", "tokens"), [(0.0, 64), (1000.0, 256), (4000.0, 1024)])
def test_the_bound_is_where_the_cost_is_won_back(
    monkeypatch: pytest.MonkeyPatch, cost: float, tokens: int
) -> None:
    """Seven of eight readings of the prefix are saved: that must be more than what a cascade costs."""
    rule = measure(monkeypatch, cost, 8192)
    assert rule is not None
    assert rule.min_reads == MEASURED_SEQUENCES * tokens


def test_what_a_step_gives_up_besides_raises_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay that is lost counts like any other cost, however quick the cascade itself."""
    rule = measure(monkeypatch, 0.0, 8192, lost_s=4000.0)
    assert rule is not None
    assert rule.min_reads == MEASURED_SEQUENCES * 1024
    assert measure(monkeypatch, 0.0, 8192, lost_s=1e9) is None


def test_a_cascade_that_never_pays_is_never_used(monkeypatch: pytest.MonkeyPatch) -> None:
    assert measure(monkeypatch, 1e9, 8192) is None


def test_a_small_pool_is_measured_as_far_as_it_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing reads beyond the pool: 300 tokens hold 128 shared ones and eight times 16."""
    rule = measure(monkeypatch, 0.0, 300)
    assert rule is not None
    assert rule.min_reads == MEASURED_SEQUENCES * 64
    assert measure(monkeypatch, 1000.0, 300) is None
    assert measure(monkeypatch, 0.0, 100) is None


def test_the_bound_for_cpus_goes_down_with_kv_heads() -> None:
    """What a token costs to read grows with them; the rest of a cascade's cost does not."""
    assert cpu_rule(8).min_reads * 8 == cascade_bound.CPU_HEAD_READS
    assert cpu_rule(5).min_reads == 2458


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_sharing_plan_shares_what_it_says(page_size: int) -> None:
    plan = sharing_plan(5, 64 // page_size, 20, page_size)
    assert kv_lengths(plan, page_size).tolist() == [84] * 5
    cascade = build_cascade(plan, page_size, CascadeRule(min_reads=1, max_shared_levels=1))
    assert cascade is not None
    assert cascade.in_order
    assert len(cascade.shared[0].kv_indices) * page_size == 64
    assert len(set(cascade.own.kv_indices.tolist())) == len(cascade.own.kv_indices)
    assert kv_lengths(cascade.own, page_size).tolist() == [20] * 5
