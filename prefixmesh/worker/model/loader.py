"""From a model's files to weights in their final dtype, on their device, fused as the forward pass wants them.

Every tensor is converted piece by piece straight into its final place, so the peak is the finished weights plus one fused
matrix. What is missing, unexpected or of another shape than the configuration says is an error that names the tensor:
a model that loads is complete.
"""

import logging
import time
from collections.abc import Sequence

import torch

from prefixmesh.errors import ModelFileError
from prefixmesh.model_files.model_config import ModelConfig
from prefixmesh.model_files.source import ModelFiles
from prefixmesh.worker.model.gguf_weights import GgufTensors
from prefixmesh.worker.model.hf_weights import HfTensors
from prefixmesh.worker.model.linear import Linear, PlainLinear, can_pack, make_gated, make_linear
from prefixmesh.worker.model.tensor_source import TensorSource
from prefixmesh.worker.model.weights import LayerWeights, LlamaWeights

logger = logging.getLogger(__name__)

_EMBEDDING = "model.embed_tokens.weight"
_FINAL_NORM = "model.norm.weight"
_HEAD = "lm_head.weight"


def load_weights(
    files: ModelFiles, config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> LlamaWeights:
    """Load a model's weights; O(their size). Raises ModelFileError naming the tensor at fault."""
    started = time.monotonic()
    source: TensorSource = GgufTensors(files.path, config) if files.kind == "gguf" else HfTensors(files.path)
    _check_shapes(source, _expected_shapes(config), config)
    weights = _Assembler(source, config, dtype, device).assemble()
    logger.info(
        "weights_loaded model=%s bytes=%d dtype=%s seconds=%.2f",
        files.name,
        weights.num_bytes,
        dtype,
        time.monotonic() - started,
    )
    return weights


def _expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor the forward pass needs."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        _EMBEDDING: (config.vocab_size, hidden),
        _FINAL_NORM: (hidden,),
    }
    if not config.tie_word_embeddings:
        shapes[_HEAD] = (config.vocab_size, hidden)
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        shapes[prefix + "input_layernorm.weight"] = (hidden,)
        shapes[prefix + "post_attention_layernorm.weight"] = (hidden,)
        for name, rows in (("q", q), ("k", kv), ("v", kv)):
            shapes[f"{prefix}self_attn.{name}_proj.weight"] = (rows, hidden)
            if config.qkv_bias:
                shapes[f"{prefix}self_attn.{name}_proj.bias"] = (rows,)
        shapes[prefix + "self_attn.o_proj.weight"] = (hidden, q)
        if config.out_bias:
            shapes[prefix + "self_attn.o_proj.bias"] = (hidden,)
        if config.qk_norm:
            shapes[prefix + "self_attn.q_norm.weight"] = (config.head_dim,)
            shapes[prefix + "self_attn.k_norm.weight"] = (config.head_dim,)
        shapes[prefix + "mlp.gate_proj.weight"] = (inner, hidden)
        shapes[prefix + "mlp.up_proj.weight"] = (inner, hidden)
        shapes[prefix + "mlp.down_proj.weight"] = (hidden, inner)
    return shapes


def _check_shapes(source: TensorSource, expected: dict[str, tuple[int, ...]], config: ModelConfig) -> None:
    found = source.shapes
    for name, shape in expected.items():
        if name not in found:
            raise ModelFileError(f"the model's files lack the tensor {name}")
        if tuple(found[name]) != shape:
            raise ModelFileError(f"tensor {name} must have the shape {shape}, it has {tuple(found[name])}")
    # Tied models are sometimes saved with their head all the same.
    allowed = {_HEAD} if config.tie_word_embeddings else set()
    unexpected = sorted(found.keys() - expected.keys() - allowed)
    if unexpected:
        raise ModelFileError(
            f"the model's files hold {len(unexpected)} tensors that {config.architecture} models "
            f"have no use for, such as {unexpected[0]}"
        )


class _Assembler:
    """Reads tensors by name and puts them together."""

    def __init__(
        self, source: TensorSource, config: ModelConfig, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._source = source
        self._config = config
        self._dtype = dtype
        self._device = device

    def assemble(self) -> LlamaWeights:
        layers = tuple(self._layer(f"model.layers.{i}.") for i in range(self._config.num_layers))
        embedding = self._tensor([_EMBEDDING])
        return LlamaWeights(
            embedding=embedding,
            layers=layers,
            final_norm=self._norm(_FINAL_NORM),
            lm_head=self._head(embedding),
        )

    def _layer(self, prefix: str) -> LayerWeights:
        attention = [f"{prefix}self_attn.{x}_proj" for x in "qkv"]
        return LayerWeights(
            attention_norm=self._norm(prefix + "input_layernorm.weight"),
            qkv=self._linear(attention, has_bias=self._config.qkv_bias),
            attention_out=self._linear([prefix + "self_attn.o_proj"], has_bias=self._config.out_bias),
            mlp_norm=self._norm(prefix + "post_attention_layernorm.weight"),
            gate_up=make_gated(
                self._tensor([prefix + "mlp.gate_proj.weight", prefix + "mlp.up_proj.weight"])
            ),
            down=self._linear([prefix + "mlp.down_proj"]),
            qk_norm=self._qk_norm(prefix + "self_attn.") if self._config.qk_norm else None,
        )

    def _head(self, embedding: torch.Tensor) -> Linear:
        if not self._config.tie_word_embeddings:
            return make_linear(self._tensor([_HEAD]))
        # Where weights cannot be packed this shares the storage; a packed head is worth its copy (see LlamaWeights).
        return make_linear(embedding) if can_pack(self._device, self._dtype) else PlainLinear(embedding)

    def _linear(self, modules: Sequence[str], *, has_bias: bool = False) -> Linear:
        bias = self._tensor([f"{module}.bias" for module in modules]) if has_bias else None
        return make_linear(self._tensor([f"{module}.weight" for module in modules]), bias)

    def _qk_norm(self, prefix: str) -> torch.Tensor:
        """One row a head, so that queries and keys are normed together."""
        query, key = self._norm(prefix + "q_norm.weight"), self._norm(prefix + "k_norm.weight")
        return torch.cat(
            (query.expand(self._config.num_heads, -1), key.expand(self._config.num_kv_heads, -1))
        )

    def _norm(self, name: str) -> torch.Tensor:
        return self._tensor([name], torch.float32)

    def _tensor(self, names: Sequence[str], dtype: torch.dtype | None = None) -> torch.Tensor:
        """The named tensors, one below the other, as one."""
        shapes = [self._source.shapes[name] for name in names]
        rows = sum(shape[0] for shape in shapes)
        out = torch.empty((rows, *shapes[0][1:]), dtype=dtype or self._dtype, device=self._device)
        start = 0
        for name, shape in zip(names, shapes, strict=True):
            self._source.read_into(name, out[start : start + shape[0]])
            start += shape[0]
        return out
