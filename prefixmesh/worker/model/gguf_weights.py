"""Weights of a GGUF file under their Hugging Face names, dequantised piece by piece.

Formats are dequantised by the ``gguf`` package. The file is read, not mapped, so that the quantised bytes never stay in
memory beside the result.

For Llama, converters to GGUF reorder the rows of the query and key projections from the half-split rotary convention of Hugging Face
(first all first halves of the pairs, then all second ones) to interleaved pairs; here the order is turned back. Source:
``LlamaModel.permute`` in llama.cpp's ``convert_hf_to_gguf.py``.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize, quant_shape_to_byte_shape

from prefixmesh.errors import ModelFileError
from prefixmesh.model_files.families import FAMILIES
from prefixmesh.model_files.gguf_metadata import GgufTensor, read_gguf_header
from prefixmesh.model_files.model_config import ROPE_FACTORS, ModelConfig
from prefixmesh.worker.model.tensor_source import row_pieces

_TOP_LEVEL: Final[Mapping[str, str]] = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_IN_LAYER: Final[Mapping[str, str]] = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_NAME: Final = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_REORDERED: Final = re.compile(r"\.self_attn\.[qk]_proj\.")


class GgufTensors:
    """The tensors of one GGUF file."""

    def __init__(self, path: Path, config: ModelConfig) -> None:
        self._path = path
        self._head_dim = config.head_dim
        self._interleaved = FAMILIES[config.architecture].gguf_interleaves
        self._tensors = {
            _hf_name(tensor.name): tensor
            for tensor in read_gguf_header(path).tensors.values()
            if tensor.name != ROPE_FACTORS
        }

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of each tensor by its Hugging Face name; a name that has none is kept as the file writes it."""
        return {name: tensor.shape for name, tensor in self._tensors.items()}

    def read_into(self, name: str, out: torch.Tensor) -> None:
        """Dequantise a tensor into ``out``; ModelFileError naming it when its format is unknown or its bytes are cut."""
        tensor = self._tensors[name]
        kind, row_bytes = self._storage(tensor)
        reordered = self._interleaved and _REORDERED.search(name) is not None
        try:
            with self._path.open("rb") as file:
                for start, end in row_pieces(tensor.shape, self._head_dim if reordered else 1):
                    raw = self._read(file, tensor, start, end, row_bytes)
                    piece = torch.from_numpy(dequantize(raw, kind))
                    if reordered:
                        _copy_half_split(piece, out[start:end], self._head_dim)
                    else:
                        out[start:end].copy_(piece.view(out[start:end].shape))
        except NotImplementedError as error:
            raise ModelFileError(
                f"{self._path}: tensor {tensor.name} is stored as {kind.name}: {error}"
            ) from error
        except OSError as error:
            raise ModelFileError(f"cannot read tensor {tensor.name} of {self._path}: {error}") from error

    def _storage(self, tensor: GgufTensor) -> tuple[Any, int]:
        """The tensor's format and how many bytes a row (an element, of a vector) takes in it."""
        try:
            kind = GGMLQuantizationType(tensor.ggml_type)
            row_shape = quant_shape_to_byte_shape(tensor.shape[1:] or (1,), kind)
        except ValueError as error:
            raise ModelFileError(f"{self._path}: tensor {tensor.name}: {error}") from error
        return kind, int(np.prod(row_shape))

    def _read(self, file: BinaryIO, tensor: GgufTensor, start: int, end: int, row_bytes: int) -> Any:
        file.seek(tensor.offset + start * row_bytes)
        size = (end - start) * row_bytes
        raw = np.fromfile(file, dtype=np.uint8, count=size)
        if raw.size != size:
            raise ModelFileError(f"{self._path} ends within the data of tensor {tensor.name}")
        return raw.reshape(end - start, row_bytes)


def _hf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem in _TOP_LEVEL:
        return f"{_TOP_LEVEL[stem]}.{kind}"
    found = _LAYER_NAME.fullmatch(name)
    if found and found[2] in _IN_LAYER:
        return f"model.layers.{int(found[1])}.{_IN_LAYER[found[2]]}.{found[3]}"
    return name


def _copy_half_split(piece: torch.Tensor, out: torch.Tensor, head_dim: int) -> None:
    """Copy rows of whole heads, ``piece`` holding interleaved pairs, into half-split order."""
    heads = out.shape[0] // head_dim
    pairs = piece.view(heads, head_dim // 2, 2, -1)
    out.view(heads, 2, head_dim // 2, -1).copy_(pairs.transpose(1, 2))
