"""Same seed, same tokens, in bfloat16: wherever the best two candidates differ by more than the documented margin, the best one is the
same however the logits were computed. In float32 the logits themselves are."""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np
import pytest
import torch

from prefixmesh.bench.agreement import (
    BFLOAT16_MARGIN,
    WAYS,
    FloatArray,
    Runner,
    Texts,
    best_two,
    compare,
    logits_of,
    shared_prefix,
    whole,
)
from prefixmesh.model_files.model_config import read_model_config
from prefixmesh.model_files.source import ModelFiles, resolve_model
from prefixmesh.text.tokenizer import load_tokenizer
from prefixmesh.worker.batch_plan import IntArray
from prefixmesh.worker.cascade_plan import CascadeRule
from prefixmesh.worker.model.kv_pool import KVPool
from prefixmesh.worker.model.loader import load_weights
from prefixmesh.worker.model.runner import ModelRunner
from prefixmesh.worker.model.torch_attention import TorchAttention

CPU: Final = torch.device("cpu")
LICENSE: Final = Path(__file__).parents[2] / "LICENSE"
LAST: Final = 8


def make_runner(files: ModelFiles, size_tokens: int, dtype: torch.dtype) -> Runner:
    """Cascades wherever two sequences share anything worth mentioning."""
    config = read_model_config(files)
    pool = KVPool(config, size_tokens, 1, dtype, CPU)
    weights = load_weights(files, config, dtype, CPU)
    return ModelRunner(config, weights, pool, TorchAttention(config, pool, CascadeRule(min_reads=32)))


def every_way(runner: Runner, ids: IntArray) -> Iterator[tuple[str, FloatArray, FloatArray]]:
    """Name, reference and logits of each way; the last over a prefix that all share."""
    texts = Texts.of(ids, LAST)
    reference = logits_of(runner, texts, whole(texts))
    for name, way in WAYS.items():
        yield name, reference, logits_of(runner, texts, way(texts))
    shared = ids.shape[1] // 2
    alike = ids.copy()
    alike[:, :shared] = ids[0, :shared]
    own, together = Texts.of(alike, LAST), Texts.of(alike, LAST, shared)
    reference = logits_of(runner, own, whole(own))
    yield "through a cascade", reference, logits_of(runner, together, shared_prefix(together))


def test_in_float32_every_way_gives_the_same_logits(tiny_model_folder: Path) -> None:
    """So what is compared in bfloat16 is the same thing, computed in other ways."""
    ids = np.random.default_rng(0).integers(3, 512, (4, 100)).astype(np.int32)
    runner = make_runner(resolve_model(str(tiny_model_folder)), ids.size, torch.float32)
    for name, reference, found in every_way(runner, ids):
        np.testing.assert_allclose(found, reference, atol=1e-4, rtol=0, err_msg=name)


@pytest.mark.slow
def test_in_bfloat16_the_best_candidate_is_the_same_beyond_the_documented_margin(
    smollm2_files: ModelFiles,
) -> None:
    """Real text on the real model; most places are that clear, so that the test means something."""
    tokenizer = load_tokenizer(smollm2_files)
    text = np.array(tokenizer.encode(LICENSE.read_text(), allow_special=False, add_bos=False), dtype=np.int32)
    ids = np.stack([text[start : start + 64] for start in range(0, 64 * 4, 64)])
    runner = make_runner(smollm2_files, ids.size, torch.bfloat16)
    changes = []
    for name, reference, found in every_way(runner, ids):
        first, second = best_two(reference)
        margin = (
            np.take_along_axis(reference, first[..., None], -1)
            - np.take_along_axis(reference, second[..., None], -1)
        )[..., 0]
        clear = margin > BFLOAT16_MARGIN
        assert clear.mean() > 0.4, name
        assert (found.argmax(axis=-1) == first)[clear].all(), name
        changes.append(compare(reference, found).change_most)
    assert max(changes) > 0, "nothing was computed in another way"


def test_a_comparison_tells_the_widest_margin_at_which_another_was_best() -> None:
    reference = np.array([[[5.0, 4.5, 0.0], [3.0, 0.0, 2.0], [1.0, 0.0, 0.0]]], dtype=np.float32)
    other = np.array([[[4.75, 5.0, 0.0], [3.0, 0.5, 2.0], [1.0, 0.0, 0.0]]], dtype=np.float32)
    found = compare(reference, other)
    assert found.widest_margin == 0.5
    assert found.differing_share == pytest.approx(1 / 3)
    assert found.change_most == 0.5
    assert found.margin_change_most == 0.75
    assert compare(reference, reference).widest_margin == 0.0
