"""The plan of one forward pass: which tokens of which sequences, and where their KV lies. Pure numpy, no torch.

Both attention backends read the very same arrays, in the layout FlashInfer's paged wrappers take, so that a CPU proves the
plan that a GPU runs.

For a sequence with ``kv_len`` tokens of KV after this step, of which the last ``qo_len`` are computed in it::

    |<------------ kv_len ------------------------->|
    |<-- already in the pool -->|<----- qo_len ---->|
    | page 0 | page 1 | ...              | last page (last_page_len tokens used)
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """One step's work for ``B`` sequences and ``T`` new tokens in all; every array is int32."""

    token_ids: IntArray
    """[T] ids to compute, sequence after sequence."""

    positions: IntArray
    """[T] position of each id in its sequence, from 0."""

    out_slots: IntArray
    """[T] where each id's K and V are written: ``page * page_size + offset``."""

    qo_indptr: IntArray
    """[B+1] sequence ``b`` computes ``token_ids[qo_indptr[b]:qo_indptr[b+1]]``."""

    kv_indptr: IntArray
    """[B+1] sequence ``b`` reads pages ``kv_indices[kv_indptr[b]:kv_indptr[b+1]]``."""

    kv_indices: IntArray
    """Page indices of all sequences, one after the other, the pages written in this step among them."""

    last_page_len: IntArray
    """[B] tokens used in each sequence's last page, this step's included; 1 to page_size."""

    logit_rows: IntArray
    """[R] rows of ``token_ids`` whose logits are wanted: the last row of each sequence that samples in this step."""

    adapter_slots: IntArray | None = None
    """[B] where the weights of each sequence's LoRA adapter are, -1 for the base model; None when all are the base model's."""
