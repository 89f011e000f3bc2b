"""Which device and dtype the words ``auto`` stand for on this machine."""

from typing import Final

import torch

from prefixmesh.config import Dtype
from prefixmesh.errors import ConfigError, DeviceLostError

_DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16}

BF16_CPU_FEATURES: Final = ("avx512_bf16", "amx_bf16", "bf16")
"""CPU features (x86 and Arm) with which bfloat16 products are faster than float32 ones. Measured with AVX512_BF16: a long
prompt 1.9 times as fast, a decode step 1.6 times. Without them bfloat16 is emulated, and slower."""

MIN_BF16_CUDA_CAPABILITY: Final = (8, 0)
"""Ampere; earlier GPUs emulate bfloat16."""


def resolve_device(name: str) -> torch.device:
    """``auto`` is the first GPU, else the CPU. ConfigError for a name torch does not know or a device that is not there."""
    if name == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device must be auto, cpu or cuda:N, got {name!r}") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device must be auto, cpu or cuda:N, got {name!r}")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device {name!r} is not there: torch sees {torch.cuda.device_count()} GPUs")
    # With its number, as tensors name it: torch holds "cuda" and "cuda:0" to be different devices.
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device


def make_current(device: torch.device) -> None:
    """Make a GPU the calling thread's current one: kernels that are not torch's run there, whatever device their tensors are on."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def wait_for_device(device: torch.device) -> None:
    """Until everything that was asked of a GPU is done; at once on a CPU. DeviceLostError where the GPU reports an error: it
    belongs to something earlier, and CUDA repeats it for ever."""
    if device.type != "cuda":
        return
    try:
        torch.cuda.synchronize(device)
    except torch.AcceleratorError as error:
        raise DeviceLostError(f"{device} is lost: {str(error).splitlines()[0]}") from error


def resolve_dtype(name: Dtype, device: torch.device) -> torch.dtype:
    """``auto`` is bfloat16 where the device computes it faster than float32."""
    if name != "auto":
        return _DTYPES[name]
    return torch.bfloat16 if _fast_bf16(device) else torch.float32


def _fast_bf16(device: torch.device) -> bool:
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= MIN_BF16_CUDA_CAPABILITY
    features = torch.cpu.get_capabilities()
    return any(features.get(name) is True for name in BF16_CPU_FEATURES)
