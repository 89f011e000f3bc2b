"""What a hit saves of a prefill: the two shares, and their sum by the model's shape."""

import dataclasses

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixmesh.model_files.model_config import ModelConfig
from prefixmesh.worker.messages import EngineInfo
from prefixmesh.worker.prefill_savings import PrefillShape, prefill_savings
from tests.support.scripted_engine import INFO

SMOLLM2 = ModelConfig(
    architecture="llama",
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    vocab_size=49152,
    rope_theta=100_000.0,
    rms_norm_eps=1e-5,
    context_length=8192,
    tie_word_embeddings=True,
    bos_token_id=1,
    eos_token_ids=(2,),
)


def test_the_figures_of_a_hit_of_3900_in_4096() -> None:
    """95.2 % of the products with weights, 90.7 % of attention; the total lies between, by the model's shape."""
    shape = PrefillShape.of(SMOLLM2)
    saved = prefill_savings(4096, 3900, shape)
    assert (round(saved.linear, 3), round(saved.attention, 3)) == (0.952, 0.907)
    assert round(saved.total, 3) == 0.934
    narrow = PrefillShape.of(dataclasses.replace(SMOLLM2, num_heads=3))
    assert saved.attention < saved.total < prefill_savings(4096, 3900, narrow).total < saved.linear


def test_the_shape_counts_every_weight_of_the_layers_twice() -> None:
    """A multiplication and an addition for each; attention has two products over the heads' width."""
    shape = PrefillShape.of(SMOLLM2)
    weights = 576 * 576 + 2 * 576 * 192 + 576 * 576 + 3 * 576 * 1536
    assert shape.linear_flops_per_token == 2 * 30 * weights == 212_336_640
    assert shape.attention_flops_per_pair == 2 * 2 * 30 * 576


@given(st.integers(1, 10**6), st.data())
@settings(derandomize=True)
def test_shares_are_shares_and_agree_with_counting_the_work(prompt_tokens: int, data: st.DataObject) -> None:
    """Nothing cached saves nothing; a hit's total and what is left to compute are the whole."""
    hit = data.draw(st.integers(0, prompt_tokens - 1))
    shape = PrefillShape(linear_flops_per_token=7, attention_flops_per_pair=3)
    saved = prefill_savings(prompt_tokens, hit, shape)
    assert all(0.0 <= share < 1.0 for share in saved)
    assert (saved.total == 0.0) is (hit == 0)
    left = (prompt_tokens - hit) * 7 + (prompt_tokens**2 - hit**2) * 3 / 2
    assert saved.total == pytest.approx(1.0 - left / shape.flops(prompt_tokens), abs=1e-9)


def test_a_shape_travels_with_the_engines_description() -> None:
    """It crosses from the engine's process to the front like everything else that the engine tells."""
    packed = msgspec.msgpack.encode(INFO)
    assert msgspec.msgpack.decode(packed, type=EngineInfo).prefill_shape == INFO.prefill_shape
