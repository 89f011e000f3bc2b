"""Log-probabilities of chosen tokens and of the likeliest ones, by the model alone: taken before any rule changes the logits."""

from collections.abc import Mapping, Sequence

import torch

from prefixmesh.worker.messages import TokenLogprobs


@torch.inference_mode()
def model_logprobs(logits: torch.Tensor, wanted: Mapping[int, int]) -> torch.Tensor:
    """[n, vocab] natural logarithms of the rows that are keys of ``wanted``, in its order. O(n * vocab)."""
    rows = torch.tensor(list(wanted), device=logits.device)
    return logits.index_select(0, rows).log_softmax(dim=-1)


@torch.inference_mode()
def read_logprobs(
    table: torch.Tensor, wanted: Mapping[int, int], token_ids: Sequence[int]
) -> dict[int, TokenLogprobs]:
    """By row, what ``model_logprobs`` says of the row's chosen token (``token_ids[row]``) and of its ``wanted[row]`` likeliest."""
    chosen = torch.tensor([[token_ids[row]] for row in wanted], device=table.device)
    logprobs = table.gather(1, chosen).squeeze(1).tolist()
    top = table.topk(min(max(wanted.values()), table.shape[1]), dim=-1)
    top_ids, top_logprobs = top.indices.tolist(), top.values.tolist()
    return {
        row: TokenLogprobs(logprobs[place], tuple(top_ids[place][:count]), tuple(top_logprobs[place][:count]))
        for place, (row, count) in enumerate(wanted.items())
    }
