"""Log-probabilities against the definition, and independence of what other rows want."""

import math

import pytest
import torch

from prefixmesh.worker.logprobs import model_logprobs, read_logprobs


def test_each_row_gets_as_many_as_it_wants_in_falling_order() -> None:
    logits = torch.randn((4, 30), generator=torch.Generator().manual_seed(2)) * 3
    wanted = {3: 0, 0: 5, 2: 20}
    table = model_logprobs(logits, wanted)
    logits.fill_(-1.0)  # what rules do later changes nothing
    read = read_logprobs(table, wanted, [7, -1, 8, 9])
    assert {row: len(one.top_ids) for row, one in read.items()} == wanted
    again = torch.randn((4, 30), generator=torch.Generator().manual_seed(2)) * 3
    for row, token in ((3, 9), (0, 7), (2, 8)):
        values = again[row].tolist()
        total = math.log(sum(map(math.exp, values)))
        assert read[row].logprob == pytest.approx(values[token] - total, abs=1e-5)
        ranked = sorted(range(30), key=lambda token, v=values: -v[token])[: wanted[row]]  # type: ignore[misc]
        assert list(read[row].top_ids) == ranked
        assert read[row].top_logprobs == pytest.approx([values[one] - total for one in ranked], abs=1e-5)


def test_more_than_the_vocabulary_is_the_vocabulary() -> None:
    table = model_logprobs(torch.zeros((1, 3)), {0: 20})
    assert len(read_logprobs(table, {0: 20}, [1])[0].top_ids) == 3


def test_a_large_vocabulary_is_told_as_torch_would() -> None:
    """Where only candidates are sorted; a row that is no number has anything and spoils no other."""
    logits = torch.randn((3, 5_003), generator=torch.Generator().manual_seed(5))
    logits[1, 17] = math.nan
    wanted = {0: 20, 1: 20, 2: 7}
    read = read_logprobs(model_logprobs(logits, wanted), wanted, [1, 2, 3])
    for row in (0, 2):
        expected = logits[row].log_softmax(-1).topk(wanted[row])
        assert list(read[row].top_ids) == expected.indices.tolist()
        assert read[row].top_logprobs == pytest.approx(expected.values.tolist(), abs=1e-5)
