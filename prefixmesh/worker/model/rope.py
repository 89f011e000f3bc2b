"""Rotary position embedding, half-split convention: element ``i`` of a head turns together with element ``i + head_dim/2``.

Source: Su et al., "RoFormer" (2021); the half-split order is the one of Hugging Face's Llama, and so is the order of the
float32 operations: at a position of 100,000 a frequency's last bit is a hundredth of a radian.
"""

import math

import torch

from prefixmesh.model_files.model_config import ModelConfig
from prefixmesh.model_files.rope_scaling import FrequencyFactors, LinearScaling, Llama3Scaling, YarnScaling


class RopeTable:
    """Cosines and sines of every position, precomputed in float32; ``8 * head_dim`` bytes a position."""

    def __init__(self, config: ModelConfig, positions: int, device: torch.device) -> None:
        frequencies, magnitude = rope_frequencies(config)
        angles = torch.outer(
            torch.arange(positions, dtype=torch.float32, device=device), frequencies.to(device)
        )
        cos, sin = angles.cos(), angles.sin()
        if magnitude != 1.0:
            cos, sin = cos * magnitude, sin * magnitude
        self._cos = torch.cat((cos, cos), dim=-1)
        # The sign of the rotation's first half lives here, so that applying it needs no negation.
        self._sin = torch.cat((-sin, sin), dim=-1)

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and signed sines of ``positions`` [T]: two of [T, 1, head_dim]."""
        return self._cos[positions].unsqueeze(1), self._sin[positions].unsqueeze(1)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Turn ``x`` [T, heads, head_dim] by the angles from ``RopeTable.at``; computed in float32, returned in ``dtype``."""
    half = x.shape[-1] // 2
    exact = x.float()
    swapped = torch.cat((exact[..., half:], exact[..., :half]), dim=-1)
    turned = exact * cos if exact is x else exact.mul_(cos)  # the copy is ours to change
    return turned.addcmul_(swapped, sin).to(dtype)


def rope_frequencies(config: ModelConfig) -> tuple[torch.Tensor, float]:
    """Radians per position of each pair, [head_dim / 2] float32, and what cosines and sines are multiplied by."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    periods = config.rope_theta**exponents
    frequencies = 1.0 / periods
    match config.rope_scaling:
        case None:
            return frequencies, 1.0
        case LinearScaling(factor=factor):
            return frequencies / factor, 1.0
        case FrequencyFactors(factors=factors):
            return frequencies / torch.tensor(factors, dtype=torch.float32), 1.0
        case Llama3Scaling() as scaling:
            return _llama3(frequencies, scaling), 1.0
        case YarnScaling() as scaling:
            return _yarn(periods, config, scaling), scaling.attention_factor


def _llama3(frequencies: torch.Tensor, scaling: Llama3Scaling) -> torch.Tensor:
    """Meta's own: wavelengths beyond the original context over ``low_freq_factor`` are stretched, short ones are not."""
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    wavelengths = 2 * math.pi / frequencies
    stretched = torch.where(
        wavelengths > scaling.original_context / low, frequencies / scaling.factor, frequencies
    )
    share = (scaling.original_context / wavelengths - low) / (high - low)
    mixed = (1 - share) * stretched / scaling.factor + share * stretched
    between = (wavelengths >= scaling.original_context / high) & (
        wavelengths <= scaling.original_context / low
    )
    return torch.where(between, mixed, stretched)


def _yarn(periods: torch.Tensor, config: ModelConfig, scaling: YarnScaling) -> torch.Tensor:
    """Peng et al., "YaRN" (2023): a ramp over the pairs, from those kept to those stretched."""
    dim = config.head_dim

    def pair_that_turns(times: float) -> float:
        """Which pair turns so many times in the original context."""
        return (dim * math.log(scaling.original_context / (times * 2 * math.pi))) / (
            2 * math.log(config.rope_theta)
        )

    first, last = pair_that_turns(scaling.beta_fast), pair_that_turns(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    if first == last:
        last += 0.001  # as the source does: no division by zero
    stretched = torch.clamp((torch.arange(dim // 2, dtype=torch.float32) - first) / (last - first), 0, 1)
    kept = 1 - stretched
    return 1.0 / (scaling.factor * periods) * (1 - kept) + 1.0 / periods * kept
