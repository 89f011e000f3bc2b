"""Choosing the next token of every sequence in a batch from its logits.

Each row's choice depends on that row alone: a filter is a threshold on the row's own values (no order among equals is ever
used), and each token has noise that comes from (seed, index, token id). So the batch a request shares never changes its tokens, beyond
the arithmetic that made the logits. Equals at a threshold are all kept.

Filters apply in the customary order: temperature, ``top_k``, ``top_p`` of what ``top_k`` left, ``min_p`` of the likeliest. Of what is
left, the token is chosen for which logit / temperature + noise is the largest. With noise of the standard Gumbel distribution that
draws by the tokens' probabilities, and the arithmetic changes a choice only where the best two of these sums are as close as it is
inexact: one border a draw, where a walk through the running sums of probabilities has as many as there are tokens.

``sampling_host`` does so on a CPU, in numpy; ``sampling_device`` on other devices, in torch, where the logits are.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from prefixmesh.worker.messages import EngineSampling
from prefixmesh.worker.sampling_device import choose_on_device, noisy_scores
from prefixmesh.worker.sampling_host import Filters, choose


@dataclass(frozen=True, slots=True)
class Sampled:
    """One token for each row."""

    token_ids: list[int]
    failures: dict[int, str]
    """Rows whose logits were not numbers; their token means nothing."""


def sample(logits: torch.Tensor, params: Sequence[EngineSampling], indices: Sequence[int]) -> Sampled:
    """The next token for each row of ``logits`` [R, vocab] float32; ``indices[r]`` is the token's place in its answer.

    Greedy rows cost one argmax; others one to three passes over their row.
    """
    if not params:
        return Sampled([], {})
    return (
        sample_on_host(logits, params, indices)
        if logits.device.type == "cpu"
        else sample_on_device(logits, params, indices)
    )


def sample_on_host(logits: torch.Tensor, params: Sequence[EngineSampling], indices: Sequence[int]) -> Sampled:
    """``sample`` in numpy."""
    values = logits.numpy()
    chosen = values.argmax(axis=-1)
    # An argmax takes a NaN for the largest, so one look at the largest finds any.
    largest = values[np.arange(len(values)), chosen]
    finite = np.isfinite(largest)
    rows = [row for row, param in enumerate(params) if param.temperature > 0.0]
    if rows and not finite.all():
        rows = [row for row in rows if finite[row]]
    if rows:
        filters = Filters.of([params[row] for row in rows], [indices[row] for row in rows], values.shape[1])
        if len(rows) == len(params):
            chosen = choose(values, largest, filters)
        else:
            chosen[rows] = choose(values[rows], largest[rows], filters)
    return Sampled(chosen.tolist(), _failures(np.flatnonzero(~finite).tolist()))


def sample_on_device(
    logits: torch.Tensor, params: Sequence[EngineSampling], indices: Sequence[int]
) -> Sampled:
    """``sample`` in torch, on any device."""
    chosen = logits.argmax(dim=-1)
    finite = logits.gather(1, chosen.unsqueeze(1)).squeeze(1).isfinite()
    rows = [row for row, param in enumerate(params) if param.temperature > 0.0]
    if rows:
        places = torch.tensor(rows, device=logits.device)
        some = logits if len(rows) == len(params) else logits.index_select(0, places)
        filters = Filters.of([params[row] for row in rows], [indices[row] for row in rows], logits.shape[1])
        chosen.index_copy_(0, places, choose_on_device(some, filters))
    bad_rows = [] if bool(finite.all()) else (~finite).nonzero().flatten().tolist()
    return Sampled(chosen.tolist(), _failures(bad_rows))


def margins(logits: torch.Tensor, params: Sequence[EngineSampling], indices: Sequence[int]) -> list[float]:
    """For each row of ``sample``, by how much logits may be wrong, one against another, before another of the tokens that the filters
    keep is chosen: the distance of the best two sums, times the temperature. O(vocab) a row; for measures and tests.

    Infinite where nothing else is kept. That filters may then keep another token is not in it.
    """
    found = []
    for row, (param, index) in enumerate(zip(params, indices, strict=True)):
        sums = logits[row : row + 1].double()
        if param.temperature > 0.0:
            filters = Filters.of([param], [index], logits.shape[1])
            sums = noisy_scores(logits[row : row + 1], filters).mul_(param.temperature)
        best, second = sums[0].topk(2).values.tolist()
        found.append(best - second)
    return found


def _failures(rows: Sequence[int]) -> dict[int, str]:
    return dict.fromkeys(rows, "the model's logits are not numbers")
