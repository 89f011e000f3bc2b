"""The weights of a model as the forward pass uses them."""

from dataclasses import dataclass

import torch

from prefixmesh.worker.model.linear import GatedLinear, Linear, PlainLinear


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer. Query, key and value are one product, gate and up another."""

    attention_norm: torch.Tensor
    """[hidden_size] float32"""

    qkv: Linear
    """hidden_size -> (num_heads + 2 * num_kv_heads) * head_dim: queries, then keys, then values."""

    attention_out: Linear
    """num_heads * head_dim -> hidden_size"""

    mlp_norm: torch.Tensor
    """[hidden_size] float32"""

    gate_up: GatedLinear
    """hidden_size -> 2 * intermediate_size: gate, then up."""

    down: Linear
    """intermediate_size -> hidden_size"""

    qk_norm: torch.Tensor | None = None
    """[num_heads + num_kv_heads, head_dim] float32, a row for each head of queries and keys; None in families without."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors of the layer."""
        linears = (self.qkv, self.attention_out, self.gate_up, self.down)
        norms = self.attention_norm.nbytes + self.mlp_norm.nbytes
        return (
            sum(x.num_bytes for x in linears) + norms + (0 if self.qk_norm is None else self.qk_norm.nbytes)
        )


@dataclass(frozen=True, slots=True)
class LlamaWeights:
    """A whole model's weights, on one device; matrices in one dtype, norms in float32."""

    embedding: torch.Tensor
    """[vocab_size, hidden_size]"""

    layers: tuple[LayerWeights, ...]
    final_norm: torch.Tensor
    """[hidden_size] float32"""

    lm_head: Linear
    """hidden_size -> vocab_size. With tied embeddings it shares the embedding's storage where the plain layout is used; a
    packed head (see ``linear``) is a second copy, since rows cannot be looked up in a packed weight."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors, shared ones once."""
        head = self.lm_head.num_bytes
        if isinstance(self.lm_head, PlainLinear) and self.lm_head.weight is self.embedding:
            head = 0
        return (
            self.embedding.nbytes
            + sum(layer.num_bytes for layer in self.layers)
            + self.final_norm.nbytes
            + head
        )
