"""How long a step takes: what stands in for a model where only time matters. Pure.

A step reads the weights once, computes the new tokens of those who prefill (attention makes a token dearer the more stand before it), and
for each who decodes reads all its KV::

    step = step_ms + sum over prefilled tokens at position p of (prefill_ms_per_token + 2 * p * prefill_ms_per_token2)
                   + sum over decoding sequences of (decode_ms_per_sequence + kv tokens * decode_ms_per_kv_token)

So a prefill from ``a`` to ``b`` takes ``prefill_ms_per_token * (b - a) + prefill_ms_per_token2 * (b**2 - a**2)``, less a token's bend: the
curve that workers measure and report, by the same names. KV that is copied between the device and the host takes its time beside the steps
(``fake_mover``), in proportion to its tokens.

Sums and not the larger of them: a real step overlaps some of it, never all. The profiles below are by arithmetic from a roofline and
are not measured: half of a card's 990 TFLOP/s (bf16) and half of its 3.35 TB/s reached, two operations per parameter and token, and
``4 * layers * attention width`` per token and token before it, half of which is the curve's part. Copies: half of the 64 GB/s which 16
lanes of PCI Express 5 carry each way, as the data sheet of the card tells (128 GB/s both ways together). LoRA adapters are copied as
quickly: ``2 bytes * rank * (inputs + outputs)`` of each linear map of a layer, all seven of them, of rank 16; that their files are in the
host's memory is assumed.
"""

import math
from dataclasses import dataclass, fields
from typing import Final

import numpy as np

from prefixmesh.errors import ConfigError
from prefixmesh.worker.batch_plan import BatchPlan


@dataclass(frozen=True, kw_only=True, slots=True)
class TimingModel:
    """Milliseconds; see the module for the sum."""

    step_ms: float
    """Of every step, whatever is in it: reading the weights."""

    prefill_ms_per_token: float
    prefill_ms_per_token2: float = 0.0
    """Half of what each token before it adds to a prefilled token."""

    decode_ms_per_sequence: float = 0.0
    decode_ms_per_kv_token: float = 0.0
    load_back_ms_per_token: float = 0.0
    """Of KV that is copied from the host to the device, or from a buffer."""

    offload_ms_per_token: float = 0.0
    """Of KV that is copied from the device to the host."""

    adapter_load_ms: float = 0.0
    """Of a LoRA adapter's weights, from the host's memory to the device's."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not 0.0 <= value < math.inf:  # NaN, which compares false to all, is refused too
                raise ConfigError(f"{field.name} must be milliseconds from 0 on, got {value}")

    def prefill_ms(self, tokens: int, before: int = 0) -> float:
        """Of ``tokens`` tokens after ``before`` ones, without the steps' own time. O(1)."""
        doubled_positions = tokens * (2 * before + tokens - 1)
        return tokens * self.prefill_ms_per_token + doubled_positions * self.prefill_ms_per_token2

    def decode_step_ms(self, sequences: int, kv_tokens: int) -> float:
        """A step of so many sequences that have so many tokens of KV together. O(1)."""
        return (
            self.step_ms + sequences * self.decode_ms_per_sequence + kv_tokens * self.decode_ms_per_kv_token
        )

    def plan_ms(self, plan: BatchPlan, page_size: int) -> float:
        """A step of this plan. Whoever computes one token decodes; it costs what one prefilled token would, or next to. O(sequences)."""
        new = np.diff(plan.qo_indptr)
        kv = (np.diff(plan.kv_indptr) - 1) * page_size + plan.last_page_len
        decodes = new == 1
        time_ms = self.decode_step_ms(int(decodes.sum()), int(kv[decodes].sum()))
        for tokens, total in zip(new[~decodes].tolist(), kv[~decodes].tolist(), strict=True):
            time_ms += self.prefill_ms(tokens, total - tokens)
        return time_ms


H100_8B: Final = TimingModel(
    step_ms=9.6,
    prefill_ms_per_token=0.0323,
    prefill_ms_per_token2=0.53e-6,
    decode_ms_per_sequence=0.0323,
    decode_ms_per_kv_token=7.8e-5,
    load_back_ms_per_token=4.1e-3,
    offload_ms_per_token=4.1e-3,
    adapter_load_ms=2.6,
)
"""A model of 8 billion parameters in bfloat16 on one H100: 32 layers, attention 4,096 wide, 128 KiB of KV a token. An adapter has 84 MB:
32 layers of 4,096 to 4,096 twice, to 1,024 twice, to 14,336 twice, and from there back."""

H100X2_70B: Final = TimingModel(
    step_ms=41.8,
    prefill_ms_per_token=0.1414,
    prefill_ms_per_token2=1.325e-6,
    decode_ms_per_sequence=0.1414,
    decode_ms_per_kv_token=9.8e-5,
    load_back_ms_per_token=5.1e-3,
    offload_ms_per_token=5.1e-3,
    adapter_load_ms=6.5,
)
"""A model of 70 billion parameters in bfloat16 on two H100: 80 layers, attention 8,192 wide, 320 KiB of KV a token, of which
either card copies half over lanes of its own, and half of an adapter's 414 MB. By the same arithmetic, with what the two cards have to tell each other left out."""

QUICK: Final = TimingModel(
    step_ms=2.0,
    prefill_ms_per_token=0.02,
    prefill_ms_per_token2=0.5e-6,
    decode_ms_per_sequence=0.05,
    load_back_ms_per_token=2e-3,
    offload_ms_per_token=2e-3,
)
"""Of no model: short steps, so that a test of processes is over soon and a long prompt is still seen to take its time."""
