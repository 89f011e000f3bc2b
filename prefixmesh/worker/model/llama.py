"""The Llama forward pass over a ragged batch: embedding, RMSNorm, RoPE, paged attention, SwiGLU, logits.

All sequences' new tokens are rows of one matrix; only attention knows where one sequence ends. Architecture: Touvron et al.,
"LLaMA" (2023); the order of operations follows Hugging Face's implementation. It serves every family of that shape: biases
and norms of queries and keys are there where the weights are.

A step of very few rows is filled up, once, to the number that this machine's products are quickest for (``linear.least_rows``). The rows
so added compute token 0 at position 0, read and write no K and V, and are left out of the logits.

In bfloat16 the products are bfloat16, but the residual stream, the norms and the rotation are float32: it costs next to nothing
and halves the error of the logits (SmolLM2-135M: rms against float32 0.10-0.19 with a bfloat16 stream, 0.04-0.10 so).
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional

from prefixmesh.model_files.model_config import ModelConfig
from prefixmesh.worker.batch_plan import BatchPlan, IntArray
from prefixmesh.worker.model.attention import AttentionBackend
from prefixmesh.worker.model.kv_pool import KVPool
from prefixmesh.worker.model.linear import activate, least_rows
from prefixmesh.worker.model.lora import StepLora
from prefixmesh.worker.model.rope import RopeTable, rotate
from prefixmesh.worker.model.weights import LayerWeights, LlamaWeights


@dataclass(frozen=True, slots=True)
class StepTensors:
    """What the forward pass itself needs of a ``BatchPlan``, on the device; int64."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    out_slots: torch.Tensor
    """[T], while the two before may be filled up with further rows."""

    logit_rows: torch.Tensor
    """The wanted rows first; may be filled up too."""

    num_logits: int
    """Rows whose logits are wanted."""

    @classmethod
    def of(cls, plan: BatchPlan, device: torch.device, least: int = 0) -> "StepTensors":
        """Copy the arrays of ``plan`` to the device, rows filled up until there are ``least``."""
        arrays = (
            _filled(plan.token_ids, least),
            _filled(plan.positions, least),
            plan.out_slots,
            _filled(plan.logit_rows, least if len(plan.logit_rows) else 0),
        )
        ids, positions, slots, rows = (torch.tensor(x, dtype=torch.int64, device=device) for x in arrays)
        return cls(ids, positions, slots, rows, len(plan.logit_rows))


class Llama:
    """One model on one device. Call it under ``torch.inference_mode``."""

    def __init__(self, config: ModelConfig, weights: LlamaWeights, pool: KVPool) -> None:
        self._config = config
        self._weights = weights
        self._pool = pool
        positions = min(config.context_length, pool.total_tokens)
        self._rope = RopeTable(config, positions, weights.embedding.device)
        self.least_rows = least_rows(weights.embedding.device, weights.embedding.dtype)
        """Give ``StepTensors.of`` this; steps of fewer rows are slower."""

        # A norm is |x| / sqrt(n): with the root in the weights, few passes over the rows are left.
        self._root = math.sqrt(config.hidden_size)
        self._root_eps = torch.tensor(self._root * math.sqrt(config.rms_norm_eps))

    def __call__(
        self, step: StepTensors, attention: AttentionBackend, lora: StepLora | None = None
    ) -> torch.Tensor:
        """Compute ``T`` new tokens, write their K/V to the pool; float32 logits of the wanted rows, [R, vocab_size].

        ``attention`` must have prepared the same plan, and ``lora`` be the same plan's adapters. LoadBackError when KV that the step reads
        did not come; some of the new tokens' K/V are written then.
        """
        weights, tokens = self._weights, len(step.out_slots)
        angles = self._rope.at(step.positions)
        hidden = functional.embedding(step.token_ids, weights.embedding).float()
        last = len(weights.layers) - 1
        for index, layer in enumerate(weights.layers):
            normed = self._norm(hidden, layer.attention_norm)
            q = self._queries(index, layer, normed, angles, step.out_slots, lora)
            self._pool.await_layer(index)  # not later: at a step's end all that it reads has come
            if index == last and not step.num_logits:
                return hidden.new_empty(
                    (0, self._config.vocab_size)
                )  # its K and V were all that was left to do
            attended = attention.forward(index, q).view(len(hidden), -1)
            rows_lora = lora
            if index == last and step.num_logits < tokens:
                # Nobody reads what the last layer makes of other rows.
                hidden, attended = hidden[step.logit_rows], attended[step.logit_rows]
                rows_lora = None if lora is None else lora.wanted
                tokens = step.num_logits
            hidden += _attention_out(index, layer, attended, rows_lora)
            normed = self._norm(hidden, layer.mlp_norm)
            hidden += _feed_forward(index, layer, normed, tokens, rows_lora)
        normed = self._norm(hidden, weights.final_norm)
        logits = weights.lm_head(normed)[: step.num_logits]
        if lora is not None:
            lora.add_head(normed[: step.num_logits], logits)
        return logits.float()

    def _norm(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        dtype, eps = self._weights.embedding.dtype, self._config.rms_norm_eps
        if hidden.device.type != "cpu":
            return functional.rms_norm(hidden, weight.shape, weight, eps).to(dtype)
        # On a CPU rms_norm is not fused, but a pass over the rows for each of its steps. sqrt(sum + n eps) is a hypotenuse.
        lengths = torch.linalg.vector_norm(hidden, dim=-1, keepdim=True).hypot_(self._root_eps)
        return hidden.mul(lengths.reciprocal_().mul_(self._root)).mul_(weight).to(dtype)

    def _queries(
        self,
        index: int,
        layer: LayerWeights,
        hidden: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor],
        out_slots: torch.Tensor,
        lora: StepLora | None,
    ) -> torch.Tensor:
        """Write the new tokens' K and V; the queries of all rows, [rows, num_heads, head_dim]."""
        config = self._config
        q_heads, kv_heads = config.num_heads, config.num_kv_heads
        qkv = layer.qkv(hidden)
        if lora is not None:
            lora.add(index, "qkv", hidden, qkv)
        heads = qkv.view(-1, q_heads + 2 * kv_heads, config.head_dim)
        turned = heads[:, : q_heads + kv_heads]
        if layer.qk_norm is not None:
            turned = functional.rms_norm(turned.float(), turned.shape[-1:], None, config.rms_norm_eps)
            turned = turned * layer.qk_norm
        rotated = rotate(turned, *angles, heads.dtype)
        tokens = len(out_slots)
        self._pool.write(index, rotated[:tokens, q_heads:], heads[:tokens, q_heads + kv_heads :], out_slots)
        return rotated[:, :q_heads]


def _attention_out(
    index: int, layer: LayerWeights, attended: torch.Tensor, lora: StepLora | None
) -> torch.Tensor:
    out = layer.attention_out(attended)
    if lora is not None:
        lora.add(index, "attention_out", attended, out)
    return out


def _feed_forward(
    index: int, layer: LayerWeights, hidden: torch.Tensor, tokens: int, lora: StepLora | None
) -> torch.Tensor:
    if lora is not None and lora.covers(index, "gate_up", tokens):
        gate_up = layer.gate_up(hidden)
        lora.add(index, "gate_up", hidden, gate_up)
        inner = activate(gate_up)
    else:
        inner = layer.gate_up.gated(hidden)
        if lora is not None:
            # Once more for the rows of adapters; those of the base model stay bit for bit what they are.
            lora.regate(index, layer.gate_up, hidden, inner)
    down = layer.down(inner)
    if lora is not None:
        lora.add(index, "down", inner, down)
    return down


def _filled(array: IntArray, least: int) -> IntArray:
    missing = least - len(array)
    return array if missing <= 0 else np.concatenate([array, np.zeros(missing, dtype=array.dtype)])
