"""LoRA in the forward pass: the weights of resident adapters by slot, and what they add to the products of a step.

An adapter adds ``scale * B @ A @ x`` to a linear layer (Hu et al., "LoRA", 2021). The modules of one fused product (queries, keys and
values; gate and up) read the same input, so their ``A`` are stacked, and their ``B`` are blocks of one matrix, zero elsewhere: two
small products do for all of them, whatever number of them an adapter has. ``scale`` is multiplied into ``B`` once, in float32.

A step's rows are grouped by slot, and each group's rows are gathered, multiplied, and added to the output in place. Rows of the base
model are never touched, so their answers are bit for bit those of a step without adapters; a step without any costs nothing.

**Recorded steps.** Which rows belong to which slot differs from step to step, and so do the shapes and the places of what is
multiplied. A step whose plan has ``adapter_slots`` must therefore be computed, never replayed; one without any
(``plan.adapter_slots is None``) is the base model's and may be.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from prefixmesh.errors import InvalidRequestError, ModelFileError
from prefixmesh.model_files.adapter_folder import AdapterRoot
from prefixmesh.model_files.linear_sizes import FUSED, HEAD, LinearSizes
from prefixmesh.model_files.peft_adapter import (
    HEAD_LAYER,
    AdapterReader,
    LoraPart,
    PeftAdapter,
    Place,
    inspect_adapter,
    product_of,
    product_size,
)
from prefixmesh.worker.batch_plan import BatchPlan, IntArray
from prefixmesh.worker.model.linear import Linear, activate

TYPICAL_RANK: Final = 32
"""Memory is set aside for adapters of this rank. Most are of 8 to 32; one of a higher rank takes the room of several."""

CHANGED: Final = "the adapter's files have changed since it was loaded: load it again"


@dataclass(frozen=True, slots=True)
class LoraProduct:
    """What an adapter adds to one product of the forward pass: ``x @ a.T @ b``."""

    a: torch.Tensor
    """[rank, in_features]; the ranks of the product's modules one below the other."""

    b: torch.Tensor
    """[rank, out_features], scaled; each module's ranks reach its own outputs only."""


LoraWeights = Mapping[tuple[int, str], LoraProduct]
"""One adapter's products by layer and name; ``(HEAD_LAYER, HEAD)`` is ``lm_head``."""


class StepLora:
    """The adapters of one step's rows."""

    def __init__(
        self, groups: Sequence["tuple[LoraWeights, slice | torch.Tensor]"], head: "StepLora | None"
    ) -> None:
        """Weights, and which rows they are for. ``head`` is the same for the rows whose logits are wanted."""
        self._groups = groups
        self._head = head

    def add(self, layer: int, product: str, x: torch.Tensor, out: torch.Tensor) -> None:
        """Add to ``out`` [rows, out_features], in place, what the rows' adapters make of ``x`` [rows, in_features]."""
        for weights, rows in self._groups:
            found = weights.get((layer, product))
            if found is None:
                continue
            if isinstance(rows, slice):
                out[rows].addmm_(x[rows] @ found.a.T, found.b)
            else:
                out.index_add_(0, rows, (x[rows] @ found.a.T) @ found.b)

    def covers(self, layer: int, product: str, rows: int) -> bool:
        """Whether the adapters of all of so many rows, which is the whole step, change this product."""
        return rows == sum(
            len(which) if isinstance(which, torch.Tensor) else which.stop - which.start
            for weights, which in self._groups
            if (layer, product) in weights
        )

    def regate(self, layer: int, gate_up: Linear, x: torch.Tensor, inner: torch.Tensor) -> None:
        """Compute ``inner`` [rows, inner] again, in place, for the rows whose adapters change gate or up: the base model's product ends
        in the activation, and what an adapter adds comes before it."""
        for weights, rows in self._groups:
            found = weights.get((layer, "gate_up"))
            if found is not None:
                chosen = x[rows]
                inner[rows] = activate(gate_up(chosen).addmm_(chosen @ found.a.T, found.b))

    @property
    def wanted(self) -> "StepLora | None":
        """The same for the rows whose logits are wanted, counted among them."""
        return self._head

    def add_head(self, x: torch.Tensor, logits: torch.Tensor) -> None:
        """``add`` for ``lm_head``, whose rows are those of the plan's ``logit_rows``."""
        if self._head is not None:
            self._head.add(HEAD_LAYER, HEAD, x, logits)


class LoraSlots:
    """Weights by slot. ``read`` may run on any thread; everything else is the engine's loop's."""

    def __init__(
        self,
        root: AdapterRoot,
        sizes: LinearSizes,
        dtype: torch.dtype,
        device: torch.device,
        *,
        max_resident: int,
    ) -> None:
        self.root = root
        self.sizes = sizes
        self.max_resident = max_resident
        self._dtype = dtype
        self._device = device
        self._slots: dict[int, LoraWeights] = {}

    @property
    def element_bytes(self) -> int:
        """Of each number."""
        return self._dtype.itemsize

    @property
    def budget_bytes(self) -> int:
        """What is set aside for all resident adapters together."""
        return self.max_resident * typical_elements(self.sizes) * self.element_bytes

    @property
    def num_bytes(self) -> int:
        """Of all weights."""
        return sum(x.a.nbytes + x.b.nbytes for weights in self._slots.values() for x in weights.values())

    def read(self, path: str, digest: str) -> LoraWeights:
        """Read an adapter's weights, whose content must still be ``digest``. Raises InvalidRequestError; O(bytes)."""
        return read_lora(
            self.root,
            inspect_adapter(self.root, path, self.sizes),
            digest,
            self.sizes,
            self._dtype,
            self._device,
        )

    def put(self, slot: int, weights: LoraWeights) -> None:
        """Rows of ``slot`` are computed with these weights from the next step on."""
        self._slots[slot] = weights

    def drop(self, slot: int) -> None:
        """Free a slot's weights."""
        self._slots.pop(slot, None)

    def step(self, plan: BatchPlan) -> StepLora | None:
        """The adapters of a step; None when all its rows are the base model's. O(rows)."""
        if plan.adapter_slots is None:
            return None
        rows = np.repeat(plan.adapter_slots, np.diff(plan.qo_indptr))
        return StepLora(self._groups(rows), StepLora(self._groups(rows[plan.logit_rows]), None))

    def _groups(self, slot_of_row: IntArray) -> "list[tuple[LoraWeights, slice | torch.Tensor]]":
        return [
            (self._slots[slot], self._rows(np.flatnonzero(slot_of_row == slot)))
            for slot in np.unique(slot_of_row).tolist()
            if slot >= 0
        ]

    def _rows(self, rows: npt.NDArray[np.int64]) -> slice | torch.Tensor:
        """Neighbours as a slice, which need not be gathered."""
        first, last = int(rows[0]), int(rows[-1])
        if last - first + 1 == len(rows):
            return slice(first, last + 1)
        return torch.from_numpy(rows).to(self._device)


def typical_elements(sizes: LinearSizes) -> int:
    """Numbers of an adapter of ``TYPICAL_RANK`` on every linear layer but ``lm_head``."""
    layer = sum(
        len(modules) * TYPICAL_RANK * sum(product_size(product, sizes)) for product, modules in FUSED.items()
    )
    return sizes.num_layers * layer


def read_lora(
    root: AdapterRoot,
    adapter: PeftAdapter,
    digest: str,
    sizes: LinearSizes,
    dtype: torch.dtype,
    device: torch.device,
) -> LoraWeights:
    """An adapter's weights on the device. Raises InvalidRequestError when what was read is not of that digest."""
    products, starts = _allocate(adapter, sizes, dtype)
    reader = AdapterReader(root, adapter)
    try:
        for part, a, b in reader:
            place = part.place
            product = products[_product(place)]
            rows = slice(starts[place], starts[place] + part.rank)
            product.a[rows] = _floats(a)
            product.b[rows, _columns(place, sizes)] = (_floats(b).float() * part.scale).T.to(dtype)
    except ModelFileError as error:
        raise InvalidRequestError("path", str(error)) from error
    if not all(bool(x.isfinite().all()) for product in products.values() for x in (product.a, product.b)):
        raise InvalidRequestError("path", f"scaled, its weights are beyond what {dtype} can tell")
    if reader.digest != digest:
        raise InvalidRequestError("path", CHANGED)
    return {key: LoraProduct(product.a.to(device), product.b.to(device)) for key, product in products.items()}


def _allocate(
    adapter: PeftAdapter, sizes: LinearSizes, dtype: torch.dtype
) -> tuple[dict[tuple[int, str], LoraProduct], dict[Place, int]]:
    """Empty products, and each module's first rank in its product."""
    ranks: dict[tuple[int, str], int] = {}
    starts: dict[Place, int] = {}
    for part in _in_order_of_rows(adapter.parts):
        key = _product(part.place)
        starts[part.place] = ranks.get(key, 0)
        ranks[key] = starts[part.place] + part.rank
    products = {}
    for key, rank in ranks.items():
        size_in, size_out = product_size(key[1], sizes)
        products[key] = LoraProduct(
            torch.zeros(rank, size_in, dtype=dtype), torch.zeros(rank, size_out, dtype=dtype)
        )
    return products, starts


def _in_order_of_rows(parts: Sequence[LoraPart]) -> list[LoraPart]:
    order = [HEAD, *(module for modules in FUSED.values() for module in modules)]
    return sorted(parts, key=lambda part: (part.place.layer, order.index(part.place.module)))


def _product(place: Place) -> tuple[int, str]:
    return place.layer, HEAD if place.layer == HEAD_LAYER else product_of(place.module)


def _columns(place: Place, sizes: LinearSizes) -> slice:
    """A module's outputs among those of its product."""
    if place.layer == HEAD_LAYER:
        return slice(0, sizes.head[1])
    start = 0
    for module in FUSED[product_of(place.module)]:
        size = sizes.layer[module][1]
        if module == place.module:
            return slice(start, start + size)
        start += size
    raise AssertionError(place)


def _floats(array: npt.NDArray[Any]) -> torch.Tensor:
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if tensor.dtype == torch.uint16 else tensor
