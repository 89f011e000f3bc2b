"""Random LoRA adapters in PEFT's format: made by PEFT itself for a model of transformers, or written as it writes them."""

import json
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file

from prefixmesh.model_files.linear_sizes import HEAD, LinearSizes
from prefixmesh.model_files.peft_adapter import CONFIG_FILE, HEAD_LAYER, WEIGHTS_FILE, Place

LINEAR: Final = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def small_sizes(num_layers: int) -> LinearSizes:
    """The linear layers of a model in which no two kinds that could be mixed up have one shape."""
    layer = {
        "q_proj": (8, 12),
        "k_proj": (8, 6),
        "v_proj": (8, 6),
        "o_proj": (12, 8),
        "gate_proj": (8, 10),
        "up_proj": (8, 10),
        "down_proj": (10, 8),
    }
    return LinearSizes(num_layers=num_layers, layer=layer, head=(8, 20))


def make_peft_model(model: Any, *, seed: int = 0, **lora: Any) -> Any:
    """``model``, which is changed, with one adapter of random weights, by PEFT."""
    from peft import LoraConfig, get_peft_model

    with warnings.catch_warnings():
        # About what PEFT calls of transformers, and what it would do when it merged weights.
        warnings.simplefilter("ignore")
        wrapped = get_peft_model(model, LoraConfig(**{"r": 4, "lora_alpha": 8, **lora})).eval()
    rng = torch.Generator().manual_seed(seed)
    for name, tensor in wrapped.named_parameters():
        if "lora_" in name:  # B begins as zero, which would prove nothing
            tensor.data.copy_(torch.randn(tensor.shape, generator=rng) * 0.5 * tensor.shape[-1] ** -0.5)
    return wrapped


def save_peft_model(wrapped: Any, folder: Path) -> Path:
    """Write the adapter as PEFT does, without copies of the model's own weights."""
    wrapped.save_pretrained(folder, save_embedding_layers=False)
    return folder


def write_adapter(
    folder: Path,
    sizes: LinearSizes,
    *,
    rank: int = 4,
    seed: int = 0,
    modules: Sequence[str] = LINEAR,
    layers: Sequence[int] | None = None,
    strength: float = 0.5,
    dtype: torch.dtype = torch.float32,
    config: Mapping[str, Any] | None = None,
) -> Path:
    """Write a random adapter into ``folder``, made if missing, without PEFT. ``config`` replaces keys of its configuration."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        adapter_tensors(
            sizes, rank=rank, seed=seed, modules=modules, layers=layers, strength=strength, dtype=dtype
        ),
        folder / WEIGHTS_FILE,
        metadata={"format": "pt"},
    )
    write_config(folder, **{"rank": rank, "target_modules": list(modules), **(config or {})})
    return folder


def adapter_tensors(
    sizes: LinearSizes,
    *,
    rank: int = 4,
    seed: int = 0,
    modules: Sequence[str] = LINEAR,
    layers: Sequence[int] | None = None,
    strength: float = 0.5,
    dtype: torch.dtype = torch.float32,
) -> dict[str, torch.Tensor]:
    """The tensors of a random adapter by PEFT's names."""
    rng = torch.Generator().manual_seed(seed)
    places = [
        Place(layer, module)
        for layer in (range(sizes.num_layers) if layers is None else layers)
        for module in modules
        if module != HEAD
    ]
    if HEAD in modules:
        places.append(Place(HEAD_LAYER, HEAD))
    tensors = {}
    for place in places:
        size = sizes.of_module(place.module)
        assert size is not None
        for matrix, shape in (("A", (rank, size[0])), ("B", (size[1], rank))):
            noise = torch.randn(shape, generator=rng) * strength * shape[-1] ** -0.5
            tensors[f"base_model.model.{place}.lora_{matrix}.weight"] = noise.to(dtype)
    return tensors


def write_config(folder: Path, *, rank: int = 4, **changes: Any) -> None:
    """Write ``adapter_config.json`` with PEFT's keys."""
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "some/model",
        "r": rank,
        "lora_alpha": 2 * rank,
        "lora_dropout": 0.0,
        "target_modules": list(LINEAR),
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": None,
        "init_lora_weights": True,
        "rank_pattern": {},
        "alpha_pattern": {},
    }
    (folder / CONFIG_FILE).write_text(json.dumps(config | changes))
