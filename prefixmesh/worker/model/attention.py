"""What the forward pass asks of attention: the interface of all backends.

A backend reads K and V from the pool it was made with, through the page tables of a ``BatchPlan``; the forward pass has
written the new tokens' K and V there before it asks. Everything that is the same for all layers (index arrays, masks,
grouping) is worked out once per step, in ``prepare``.
"""

from typing import Protocol

import torch

from prefixmesh.worker.batch_plan import BatchPlan


class AttentionBackend(Protocol):
    """Causal grouped-query attention over a paged pool, one step at a time."""

    def prepare(self, plan: BatchPlan) -> None:
        """Get ready for the step ``plan``; replaces the step before."""
        ...

    def forward(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        """Attend with the rotated, unscaled queries ``q`` [T, num_heads, head_dim] of the prepared step.

        Each token sees itself and all tokens before it in its own sequence. Returns [T, num_heads, head_dim], contiguous. On a CPU
        ``q`` may have further rows, which belong to no token: what is returned for them is finite, and means nothing.
        """
        ...
