"""Which backend a model gets."""

import torch

from prefixmesh.worker.model.attention_choice import choose_attention
from prefixmesh.worker.model.cascade_bound import cpu_rule
from prefixmesh.worker.model.torch_attention import TorchAttention
from tests.support.paged_attention import PagedSetting, Sharer, alone


def test_a_cpu_gets_torch_with_the_documented_bound() -> None:
    """Two requests stay plain below it, and read together from it on."""
    bound = cpu_rule(2).min_reads
    for shared, cascades in ((bound // 2 - 1, False), (bound // 2, True)):
        setting = PagedSetting([alone(shared + 3, 1), Sharer(0, shared, shared + 1, 1)], head_dim=2)
        backend = choose_attention(setting.config, setting.pool)
        assert isinstance(backend, TorchAttention)
        backend.prepare(setting.plan)
        assert (backend._cascade is not None) == cascades
        assert setting.pool.device == torch.device("cpu")
