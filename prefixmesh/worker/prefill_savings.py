"""What a cache hit saves of a prompt's prefill, as shares of the arithmetic. Pure.

A prompt of ``L`` tokens of which ``hit`` are cached leaves two kinds of work out. Products with weights cost the same for every
token: ``hit / L`` of them. Attention is causal, so a token costs as much as there are tokens before it: ``hit^2 / L^2``.
The total weighs both by the model's shape::

    all(n) = n * linear_flops_per_token + n^2 / 2 * attention_flops_per_pair
    total  = all(hit) / all(L)

It counts arithmetic and not time: short prompts are bound by what the processor reads, and a step has costs of its own. The last
position's logits are computed in any case and are in neither sum.
"""

from dataclasses import dataclass
from typing import NamedTuple

from prefixmesh.model_files.model_config import ModelConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillShape:
    """What a token of a prompt costs a model. A multiplication with its addition counts as two operations."""

    linear_flops_per_token: int
    """Products with weights, all layers together."""

    attention_flops_per_pair: int
    """Scores and weighted values for one query and one key, all heads and layers together."""

    @classmethod
    def of(cls, config: ModelConfig) -> "PrefillShape":
        """The shape of a dense model; norms, activations and RoPE are left out, being some thousandths."""
        attention_width = config.num_heads * config.head_dim
        kv_width = 2 * config.num_kv_heads * config.head_dim
        projections = config.hidden_size * (2 * attention_width + kv_width)
        feed_forward = 3 * config.hidden_size * config.intermediate_size
        return cls(
            linear_flops_per_token=2 * config.num_layers * (projections + feed_forward),
            attention_flops_per_pair=4 * config.num_layers * attention_width,
        )

    def flops(self, tokens: int) -> float:
        """Operations to prefill so many tokens from nothing."""
        return tokens * self.linear_flops_per_token + tokens * tokens / 2 * self.attention_flops_per_pair


class PrefillSavings(NamedTuple):
    """Shares that were not computed, 0 to 1."""

    linear: float
    attention: float
    total: float


def prefill_savings(prompt_tokens: int, hit_tokens: int, shape: PrefillShape) -> PrefillSavings:
    """What ``hit_tokens`` of ``prompt_tokens`` save. O(1).

    A prompt's last token is always computed, for its logits, so that a hit is at most ``prompt_tokens - 1``; only the prompt of an
    answer that is resumed can be found whole.
    """
    assert 0 <= hit_tokens <= prompt_tokens
    assert prompt_tokens >= 1
    linear = hit_tokens / prompt_tokens
    return PrefillSavings(linear, linear * linear, shape.flops(hit_tokens) / shape.flops(prompt_tokens))
