"""Models of a known shape with random weights: as fast as real ones, and no file is needed to measure with them."""

from dataclasses import dataclass

import torch

from prefixmesh.model_files.model_config import ModelConfig
from prefixmesh.worker.model.linear import Linear, make_gated, make_linear
from prefixmesh.worker.model.weights import LayerWeights, LlamaWeights


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """What a model's speed depends on."""

    name: str
    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int


TINY = ModelShape(
    name="tiny", layers=2, hidden=64, inner=128, heads=4, kv_heads=2, head_dim=16, vocabulary=256
)  # fmt: skip
SMALL = ModelShape(
    name="SmolLM2-135M", layers=30, hidden=576, inner=1536, heads=9, kv_heads=3, head_dim=64, vocabulary=49_152
)  # fmt: skip
LARGE = ModelShape(
    name="Llama-3-8B", layers=32, hidden=4096, inner=14_336, heads=32, kv_heads=8, head_dim=128, vocabulary=128_256
)  # fmt: skip


def config_of(shape: ModelShape, context_length: int) -> ModelConfig:
    """The configuration of a Llama of that shape."""
    return ModelConfig(
        architecture="llama",
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_layers=shape.layers,
        num_heads=shape.heads,
        num_kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocabulary,
        rope_theta=1e4,
        rms_norm_eps=1e-5,
        context_length=context_length,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_ids=(),
    )


def random_weights(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> LlamaWeights:
    """Seeded weights, scaled so that activations neither grow nor vanish."""
    generator = torch.Generator(device).manual_seed(0)
    hidden, inner = config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim

    def matrix(rows: int, columns: int) -> torch.Tensor:
        weight = torch.empty(rows, columns, dtype=dtype, device=device)
        return weight.normal_(std=columns**-0.5, generator=generator)

    def linear(rows: int, columns: int) -> Linear:
        return make_linear(matrix(rows, columns))

    def norm() -> torch.Tensor:
        return torch.ones(hidden, device=device)

    layers = tuple(
        LayerWeights(
            attention_norm=norm(),
            qkv=linear(q + 2 * kv, hidden),
            attention_out=linear(hidden, q),
            mlp_norm=norm(),
            gate_up=make_gated(matrix(2 * inner, hidden)),
            down=linear(hidden, inner),
        )
        for _ in range(config.num_layers)
    )
    embedding = matrix(config.vocab_size, hidden)
    head = linear(config.vocab_size, hidden)
    return LlamaWeights(embedding=embedding, layers=layers, final_norm=norm(), lm_head=head)
