"""The KV pool's layout."""

import pytest
import torch

from prefixmesh.errors import ConfigError
from prefixmesh.worker.model.kv_pool import KVPool
from tests.support.paged_attention import config_of

CPU = torch.device("cpu")


def test_slots_and_pages_are_views_of_the_same_memory() -> None:
    """What is written to slot page*size+offset is read at [page, offset] of the layer's paged layout, and nowhere else."""
    pool = KVPool(config_of(4, 2), num_pages=3, page_size=4, dtype=torch.float32, device=CPU)
    keys, values = torch.full((2, 2, 8), 5.0), torch.full((2, 2, 8), 7.0)
    pool.write(1, keys, values, torch.tensor([6, 8]))
    assert pool.storage.shape == (2, 2, 3, 4, 2, 8)
    assert (pool.storage[1, 0, 1, 2] == 5).all()
    assert (pool.storage[1, 1, 2, 0] == 7).all()
    assert pool.storage.count_nonzero() == 2 * 2 * 2 * 8
    assert (pool.keys(1)[6] == 5).all()
    by_page = pool.pages(1)
    assert (by_page[0][1, 2] == 5).all()
    assert (by_page[1][2, 0] == 7).all()


def test_a_new_pool_is_zero_and_knows_its_size() -> None:
    """No NaN of earlier owners of the memory; sizes as computed from the configuration."""
    config = config_of(4, 2)
    pool = KVPool(config, num_pages=5, page_size=16, dtype=torch.bfloat16, device=CPU)
    assert not pool.storage.any()
    assert pool.total_tokens == 80
    assert pool.num_bytes == 80 * config.kv_bytes_per_token(2)
    assert repr(pool) == "KVPool(5 pages of 16, torch.bfloat16, 0 MiB)"


def test_an_empty_pool_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least one page"):
        KVPool(config_of(4, 2), num_pages=0, page_size=16, dtype=torch.float32, device=CPU)


def test_scratch_pages_lie_behind_those_that_can_be_owned() -> None:
    """They count for memory and not for tokens; slots and pages reach them."""
    config = config_of(4, 2)
    pool = KVPool(config, num_pages=3, page_size=4, dtype=torch.float32, device=CPU, scratch_pages=1)
    assert (pool.num_pages, pool.total_tokens) == (3, 12)
    assert pool.num_bytes == 16 * config.kv_bytes_per_token(4)
    ones = torch.ones(1, 2, 8)
    pool.write(0, ones, ones, torch.tensor([12]))
    assert (pool.pages(0)[0][3, 0] == 1).all()
    assert not pool.storage[:, :, :3].any()
