"""LoRA adapters in PEFT's format: looked at without reading a weight, and named by what they do.

``inspect_adapter`` reads the configuration and the header of the weights, both of bounded size, and refuses whatever is not a LoRA
that fits the model. ``AdapterReader`` then reads the weights, one matrix at a time, and hashes them on the way: the digest is over
what an adapter does (each module's scale, types, shapes and bytes), not over how its folder is written. Two folders with one digest
answer alike; whatever changes an answer changes the digest.

No torch, and never a pickle: the only bytes that are interpreted are two JSON objects.
"""

import hashlib
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from prefixmesh.adapter_names import NAME_RULE, is_adapter_name
from prefixmesh.errors import InvalidRequestError, ModelFileError
from prefixmesh.model_files.adapter_folder import AdapterRoot
from prefixmesh.model_files.linear_sizes import FUSED, HEAD, LinearSizes
from prefixmesh.model_files.peft_config import MAX_RANK, PeftConfig, parse_peft_config
from prefixmesh.model_files.safetensors_header import SHOWN_CHARACTERS, TensorEntry, read_header

CONFIG_FILE: Final = "adapter_config.json"
WEIGHTS_FILE: Final = "adapter_model.safetensors"

MAX_CONFIG_BYTES: Final = 256 * 2**10
"""PEFT writes some thousands; patterns with a rank for each module of a large model take forty thousand. More of them would take longer
to look through than a refusal may."""

MAX_WEIGHTS_BYTES: Final = 4 * 2**30
"""Rank 256 on every linear layer of a 70B model, in bfloat16."""

DIGEST_BYTES: Final = 32
"""256 bits: an adapter made to look like another one would be served that one's KV."""

_FORMAT: Final = b"prefixmesh/adapter/v1"
_KEY: Final = re.compile(
    r"base_model\.model\.(?:(?P<head>lm_head)|model\.layers\.(?P<layer>0|[1-9]\d{0,5})\.(?:self_attn|mlp)\.(?P<module>\w{1,32}))"
    r"\.lora_(?P<matrix>[AB])\.weight"
)
_BLOCKS: Final = {
    "self_attn": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "mlp": ("gate_proj", "up_proj", "down_proj"),
}
_NUMPY: Final[Mapping[str, "np.dtype[Any]"]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
}

HEAD_LAYER: Final = -1
"""The layer of ``lm_head``, which is in none."""


class Place(NamedTuple):
    """A linear layer of the model."""

    layer: int
    module: str

    def __str__(self) -> str:
        if self.layer == HEAD_LAYER:
            return self.module
        block = next(block for block, modules in _BLOCKS.items() if self.module in modules)
        return f"model.layers.{self.layer}.{block}.{self.module}"


@dataclass(frozen=True, slots=True)
class LoraPart:
    """What an adapter adds to one linear layer: ``scale * B @ A``."""

    place: Place
    rank: int
    scale: float
    a: TensorEntry
    """[rank, in_features]"""

    b: TensorEntry
    """[out_features, rank]"""


@dataclass(frozen=True, slots=True)
class PeftAdapter:
    """An adapter that fits the model, its weights not yet read."""

    path: str
    """Of its folder, relative to the adapter root."""

    parts: tuple[LoraPart, ...]
    """In the order of their places."""

    elements: int
    """Numbers that it keeps in memory when resident."""

    @property
    def rank(self) -> int:
        """The largest of any of its modules."""
        return max(part.rank for part in self.parts)


def check_adapter_name(name: str) -> None:
    """Raises InvalidRequestError for what is no name."""
    if not is_adapter_name(name):
        raise InvalidRequestError("name", f"must have {NAME_RULE}")


def inspect_adapter(root: AdapterRoot, path: str, sizes: LinearSizes) -> PeftAdapter:
    """Look at the adapter in the folder ``path``; milliseconds, whatever lies there. InvalidRequestError (``path``) says why not."""
    try:
        with root.open(path, CONFIG_FILE) as file:
            raw = file.read(MAX_CONFIG_BYTES + 1)
        if len(raw) > MAX_CONFIG_BYTES:
            raise ModelFileError(f"{path}/{CONFIG_FILE} has more than {MAX_CONFIG_BYTES} bytes")
        config = parse_peft_config(raw, Path(path) / CONFIG_FILE)
        with root.open(path, WEIGHTS_FILE) as file:
            parts = _parts(read_header(file, MAX_WEIGHTS_BYTES), config, sizes)
    except ModelFileError as error:
        raise InvalidRequestError("path", str(error)) from error
    return PeftAdapter(path, parts, resident_elements(parts, sizes))


def resident_elements(parts: tuple[LoraPart, ...], sizes: LinearSizes) -> int:
    """Numbers in memory: the modules of one fused product share its input and its output (``worker.model.lora``)."""
    ranks: dict[tuple[int, str], int] = {}
    for part in parts:
        product = HEAD if part.place.module == HEAD else product_of(part.place.module)
        key = part.place.layer, product
        ranks[key] = ranks.get(key, 0) + part.rank
    return sum(rank * sum(product_size(product, sizes)) for (_, product), rank in ranks.items())


def product_of(module: str) -> str:
    """The fused product that computes a module of a layer."""
    return next(product for product, modules in FUSED.items() if module in modules)


def product_size(product: str, sizes: LinearSizes) -> tuple[int, int]:
    """``(in_features, out_features)`` of a fused product, or of ``lm_head``."""
    if product == HEAD:
        return sizes.head
    modules = [sizes.layer[module] for module in FUSED[product]]
    return modules[0][0], sum(out for _, out in modules)


def _parts(entries: dict[str, TensorEntry], config: PeftConfig, sizes: LinearSizes) -> tuple[LoraPart, ...]:
    pairs: dict[Place, dict[str, TensorEntry]] = {}
    for name, entry in entries.items():
        place, matrix = _place(name, sizes)
        pairs.setdefault(place, {})[matrix] = entry
    return tuple(_part(place, pairs[place], config, sizes) for place in sorted(pairs))


def _place(name: str, sizes: LinearSizes) -> tuple[Place, str]:
    found = _KEY.fullmatch(name)
    if found is None:
        raise ModelFileError(f"tensor {name[:SHOWN_CHARACTERS]} is not supported: {_why_not(name)}")
    if found["head"]:
        return Place(HEAD_LAYER, HEAD), found["matrix"]
    place = Place(int(found["layer"]), found["module"])
    if place.layer >= sizes.num_layers or place.module not in sizes.layer or f"{place}." not in name:
        raise ModelFileError(f"tensor {name[:SHOWN_CHARACTERS]} belongs to no linear layer of the model")
    return place, found["matrix"]


def _why_not(name: str) -> str:
    if "lora_embedding" in name:
        return "adapters of embeddings (embed_tokens) are not"
    if "lora_magnitude" in name:
        return "DoRA is not"
    if "embed_tokens" in name or "lm_head" in name:
        return "it is a copy of the model's own weights, save the adapter with save_embedding_layers=False"
    return "only lora_A and lora_B of linear layers are"


def _part(place: Place, pair: dict[str, TensorEntry], config: PeftConfig, sizes: LinearSizes) -> LoraPart:
    for matrix in "AB":
        if matrix not in pair:
            raise ModelFileError(f"{place} has no lora_{matrix}")
    size = sizes.of_module(place.module)
    assert size is not None, place
    rank = pair["A"].shape[0] if pair["A"].shape else 0
    if not 1 <= rank <= MAX_RANK:
        raise ModelFileError(f"{place} has the rank {rank}, 1 to {MAX_RANK} are supported")
    if rank != config.rank_of(str(place)):
        raise ModelFileError(
            f"{place} has the rank {rank} where {CONFIG_FILE} says {config.rank_of(str(place))}"
        )
    for matrix, shape in (("A", (rank, size[0])), ("B", (size[1], rank))):
        if pair[matrix].shape != shape:
            raise ModelFileError(
                f"lora_{matrix} of {place} must have the shape {shape}, it has {pair[matrix].shape}"
            )
    return LoraPart(place, rank, config.scale_of(str(place)), pair["A"], pair["B"])


class AdapterReader:
    """Iterates over ``(part, A, B)`` in the parts' order; when it has ended, ``digest`` names all that was read.

    The matrices are numpy arrays of the file's own type, bfloat16 as uint16; the next step may use their memory again. Raises
    ModelFileError for numbers that are not finite, which would make every answer of a batch NaN, and when the file ends early.
    """

    def __init__(self, root: AdapterRoot, adapter: PeftAdapter) -> None:
        self._root = root
        self._adapter = adapter
        self._hash = hashlib.blake2b(_FORMAT, digest_size=DIGEST_BYTES)

    @property
    def digest(self) -> str:
        """In hexadecimal."""
        return self._hash.hexdigest()

    def __iter__(self) -> Iterator[tuple[LoraPart, npt.NDArray[Any], npt.NDArray[Any]]]:
        with self._root.open(self._adapter.path, WEIGHTS_FILE) as file:
            for part in self._adapter.parts:
                self._add(str(part.place).encode(), struct.pack("<d", part.scale))
                yield part, self._read(file, part.a), self._read(file, part.b)

    def _read(self, file: BinaryIO, entry: TensorEntry) -> npt.NDArray[Any]:
        file.seek(entry.offset)
        raw = bytearray(entry.size_bytes)  # torch wants memory that it could write to
        if file.readinto(raw) != entry.size_bytes:  # type: ignore[attr-defined]  # typing.BinaryIO forgets it
            raise ModelFileError(f"{self._adapter.path}/{WEIGHTS_FILE} ended while it was being read")
        self._add(entry.dtype.encode(), repr(entry.shape).encode(), raw)
        array = np.frombuffer(raw, _NUMPY[entry.dtype]).reshape(entry.shape)
        if not is_finite(array):
            raise ModelFileError(f"tensor {entry.name} holds numbers that are not finite")
        return array

    def _add(self, *fields: bytes | bytearray) -> None:
        """Length-prefixed, so that no two different lists of fields read the same."""
        for field in fields:
            self._hash.update(len(field).to_bytes(8, "little"))
            self._hash.update(field)


def read_digest(root: AdapterRoot, adapter: PeftAdapter) -> str:
    """Read everything once and name it. O(bytes), about a GB/s; raises InvalidRequestError (``path``)."""
    reader = AdapterReader(root, adapter)
    try:
        for _ in reader:
            pass
    except ModelFileError as error:
        raise InvalidRequestError("path", str(error)) from error
    return reader.digest


def is_finite(array: npt.NDArray[Any]) -> bool:
    """Whether no element is infinite or NaN; bfloat16 comes as uint16."""
    if array.dtype == _NUMPY["BF16"]:
        return not bool(((array.astype(np.uint16) & 0x7F80) == 0x7F80).any())
    return bool(np.isfinite(array).all())
