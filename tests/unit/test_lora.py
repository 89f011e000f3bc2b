"""The weights of adapters in memory, and which rows of a step they are for."""

from pathlib import Path
from typing import Final

import pytest
import torch

from prefixmesh.errors import InvalidRequestError
from prefixmesh.model_files.adapter_folder import AdapterRoot
from prefixmesh.model_files.linear_sizes import FUSED, HEAD, LinearSizes
from prefixmesh.model_files.model_config import read_model_config
from prefixmesh.model_files.peft_adapter import HEAD_LAYER, inspect_adapter, read_digest
from prefixmesh.model_files.source import resolve_model
from prefixmesh.worker.batch_plan import BatchPlan
from prefixmesh.worker.model.lora import TYPICAL_RANK, LoraProduct, LoraSlots, LoraWeights
from tests.support.fake_graphs import FakeGraphDevice, TorchGraphAttention, make_runner
from tests.support.peft_adapters import LINEAR, adapter_tensors, small_sizes, write_adapter
from tests.support.plans import PagedSequence, Piece, make_plan

SIZES: Final = small_sizes(1)


def open_slots(root: Path, dtype: torch.dtype = torch.float32, max_resident: int = 4) -> LoraSlots:
    return LoraSlots(AdapterRoot(str(root)), SIZES, dtype, torch.device("cpu"), max_resident=max_resident)


def read(slots: LoraSlots, path: str) -> LoraWeights:
    return slots.read(path, read_digest(slots.root, inspect_adapter(slots.root, path, slots.sizes)))


def plan_of(slots: list[int], rows: list[int]) -> BatchPlan:
    sequences = [
        PagedSequence(tokens=[1] * count, pages=list(range(count)), adapter_slot=slot)
        for slot, count in zip(slots, rows, strict=True)
    ]
    return make_plan([Piece(x, len(x.tokens)) for x in sequences], 1)


def add(
    slots: LoraSlots, of_rows: list[int], counts: list[int], product: str, size: tuple[int, int]
) -> torch.Tensor:
    """What a step adds to zeros for inputs of ones."""
    step = slots.step(plan_of(of_rows, counts))
    assert step is not None
    out = torch.zeros(sum(counts), size[1])
    step.add(0, product, torch.ones(sum(counts), size[0]), out)
    return out


@pytest.mark.parametrize("product", FUSED)
def test_fused_modules_reach_their_own_outputs_only(tmp_path: Path, product: str) -> None:
    """Each module alone changes the columns that are its own, by scale * B @ A @ x."""
    start = 0
    for module in FUSED[product]:
        write_adapter(tmp_path / module, SIZES, modules=[module], rank=3)
        tensors = adapter_tensors(SIZES, modules=[module], rank=3)
        a, b = (next(t for name, t in tensors.items() if f"lora_{x}" in name) for x in "AB")
        slots = open_slots(tmp_path)
        slots.put(0, read(slots, module))
        size_in, size_out = SIZES.layer[module]
        total = sum(SIZES.layer[x][1] for x in FUSED[product])
        found = add(slots, [0], [2], product, (size_in, total))
        expected = torch.zeros(2, total)
        expected[:, start : start + size_out] = 2.0 * torch.ones(2, size_in) @ a.T @ b.T
        torch.testing.assert_close(found, expected)
        start += size_out


def test_each_row_gets_its_own_adapter_and_those_of_the_base_model_nothing(tmp_path: Path) -> None:
    """Neighbours, rows apart, and rows of none, of prompts and of single tokens."""
    slots = open_slots(tmp_path)
    for slot in range(2):
        weights = {(0, "down"): LoraProduct(torch.full((1, 10), 0.1), torch.full((1, 8), slot + 1.0))}
        slots.put(slot, weights)
    found = add(slots, [0, -1, 1, 0, 1], [2, 1, 3, 1, 1], "down", (10, 8))
    expected = torch.tensor([1.0, 1.0, 0.0, 2.0, 2.0, 2.0, 1.0, 2.0]).unsqueeze(1).expand(-1, 8)
    torch.testing.assert_close(found, expected)


def test_logits_are_added_for_the_rows_that_sample(tmp_path: Path) -> None:
    slots = open_slots(tmp_path)
    slots.put(1, {(HEAD_LAYER, HEAD): LoraProduct(torch.ones(1, 8), torch.ones(1, 20))})
    sequences = [PagedSequence(tokens=[1, 1], pages=[0, 1], adapter_slot=slot) for slot in (1, -1, 1, 1)]
    wants = [True, True, False, True]
    step = slots.step(make_plan([Piece(x, 2, wants) for x, wants in zip(sequences, wants, strict=True)], 1))
    assert step is not None
    logits = torch.zeros(3, 20)
    step.add_head(torch.ones(3, 8), logits)
    assert logits[:, 0].tolist() == [8.0, 0.0, 8.0]


def test_a_step_of_the_base_model_has_no_adapters(tmp_path: Path) -> None:
    """Not even an object: nothing of it can cost anything."""
    assert open_slots(tmp_path).step(plan_of([-1, -1], [1, 2])) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_every_type_in_a_file_is_read_as_the_models_own(tmp_path: Path, dtype: torch.dtype) -> None:
    write_adapter(tmp_path / "x", SIZES, dtype=dtype, modules=["o_proj"])
    tensors = adapter_tensors(SIZES, dtype=dtype, modules=["o_proj"])
    for own in (torch.float32, torch.bfloat16):
        [product] = read(open_slots(tmp_path, own), "x").values()
        a, b = (next(t for name, t in tensors.items() if f"lora_{x}" in name) for x in "AB")
        assert torch.equal(product.a, a.to(own))
        assert torch.equal(product.b, (b.float() * 2.0).T.to(own))


def test_sizes_are_what_is_in_memory(tmp_path: Path) -> None:
    """What the table sums up, what is set aside, and what the tensors take."""
    write_adapter(tmp_path / "x", SIZES, rank=TYPICAL_RANK, modules=LINEAR)
    slots = open_slots(tmp_path, torch.bfloat16, max_resident=3)
    adapter = inspect_adapter(slots.root, "x", SIZES)
    slots.put(0, read(slots, "x"))
    assert slots.num_bytes == adapter.elements * slots.element_bytes
    assert slots.budget_bytes == 3 * slots.num_bytes
    slots.drop(0)
    assert slots.num_bytes == 0


def test_what_is_read_must_be_what_was_asked_for(tmp_path: Path) -> None:
    write_adapter(tmp_path / "x", SIZES)
    slots = open_slots(tmp_path)
    with pytest.raises(InvalidRequestError, match="have changed since it was loaded"):
        slots.read("x", "0" * 64)


def test_weights_that_their_scale_makes_infinite_are_refused(tmp_path: Path) -> None:
    write_adapter(tmp_path / "x", SIZES, strength=1e20, config={"lora_alpha": 1e19})
    with pytest.raises(InvalidRequestError, match="beyond what"):
        read(open_slots(tmp_path), "x")


def test_a_step_with_adapters_is_computed_and_never_replayed(tiny_model_folder: Path, tmp_path: Path) -> None:
    """What was recorded is the base model's: replayed, every answer would be the base model's."""
    config = read_model_config(resolve_model(str(tiny_model_folder)))
    sizes = LinearSizes.of(config)
    write_adapter(tmp_path / "x", sizes, strength=2.0)
    root = AdapterRoot(str(tmp_path))
    slots = LoraSlots(root, sizes, torch.float32, torch.device("cpu"), max_resident=1)
    slots.put(0, read(slots, "x"))
    runner = make_runner(tiny_model_folder, adapters=slots)
    device = FakeGraphDevice()
    runner.record_decodes(TorchGraphAttention(runner.config, runner.pool, 1000), device, (1, 2))

    def logits(slot: int) -> torch.Tensor:
        sequence = PagedSequence(tokens=[5], pages=[0], adapter_slot=slot)
        return runner.forward(make_plan([Piece(sequence, 1)], 4)).clone()

    base, adapted = logits(-1), logits(0)
    assert device.replays == 1
    assert (base - adapted).abs().max() > 0.1
