"""Log-probabilities of chosen tokens and of the likeliest ones, by the model alone: taken before any rule changes the logits."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from prefixmesh.worker.messages import TokenLogprobs
from prefixmesh.worker.sampling_host import FloatArray, IndexArray, likeliest


@torch.inference_mode()
def model_logprobs(logits: torch.Tensor, wanted: Mapping[int, int]) -> torch.Tensor:
    """[n, vocab] natural logarithms of the rows that are keys of ``wanted``, in its order. O(n * vocab).

    On a CPU by numpy, for the reasons of ``sampling_host``.
    """
    if logits.device.type == "cpu":
        return torch.from_numpy(_log_softmax(logits.numpy()[list(wanted)]))
    rows = torch.tensor(list(wanted), device=logits.device)
    return logits.index_select(0, rows).log_softmax(dim=-1)


@torch.inference_mode()
def read_logprobs(
    table: torch.Tensor, wanted: Mapping[int, int], token_ids: Sequence[int]
) -> dict[int, TokenLogprobs]:
    """By row, what ``model_logprobs`` says of the row's chosen token (``token_ids[row]``) and of its ``wanted[row]`` likeliest."""
    chosen = torch.tensor([[token_ids[row]] for row in wanted], device=table.device)
    logprobs = table.gather(1, chosen).squeeze(1).tolist()
    ids, values = _top(table, min(max(wanted.values()), table.shape[1]))
    top_ids, top_logprobs = ids.tolist(), values.tolist()
    return {
        row: TokenLogprobs(logprobs[place], tuple(top_ids[place][:count]), tuple(top_logprobs[place][:count]))
        for place, (row, count) in enumerate(wanted.items())
    }


def _top(table: torch.Tensor, count: int) -> tuple[IndexArray, FloatArray]:
    if table.device.type == "cpu":
        return likeliest(table.numpy(), count)
    top = table.topk(count, dim=-1)
    return top.indices.cpu().numpy(), top.values.cpu().numpy()


def _log_softmax(values: FloatArray) -> FloatArray:
    """Changes ``values``, and returns them. Rows that are not numbers stay none."""
    with np.errstate(invalid="ignore"):
        values -= values.max(axis=-1, keepdims=True)
        sums = np.exp(values).sum(axis=-1, dtype=np.float64, keepdims=True)
        values -= np.log(sums).astype(np.float32)
    return values
