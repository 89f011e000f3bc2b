"""Rotary position embedding, half-split convention: element ``i`` of a head turns together with element ``i + head_dim/2``.

Source: Su et al., "RoFormer" (2021); the half-split order is the one of Hugging Face's Llama.
"""

import torch

from prefixmesh.model_files.model_config import ModelConfig


class RopeTable:
    """Cosines and sines of every position, precomputed in float32; ``8 * head_dim`` bytes a position."""

    def __init__(self, config: ModelConfig, positions: int, device: torch.device) -> None:
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=device) / config.head_dim
        frequencies = 1.0 / (config.rope_theta**exponents)
        angles = torch.outer(torch.arange(positions, dtype=torch.float32, device=device), frequencies)
        self._cos = torch.cat((angles.cos(), angles.cos()), dim=-1)
        # The sign of the rotation's first half lives here, so that applying it needs no negation.
        self._sin = torch.cat((-angles.sin(), angles.sin()), dim=-1)

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and signed sines of ``positions`` [T]: two of [T, 1, head_dim]."""
        return self._cos[positions].unsqueeze(1), self._sin[positions].unsqueeze(1)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn ``x`` [T, heads, head_dim] by the angles from ``RopeTable.at``; computed in float32, returned in x's dtype."""
    half = x.shape[-1] // 2
    exact = x.float()
    swapped = torch.cat((exact[..., half:], exact[..., :half]), dim=-1)
    return (exact * cos).addcmul_(swapped, sin).to(x.dtype)
