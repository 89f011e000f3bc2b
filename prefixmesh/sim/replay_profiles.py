"""How fast the workers of a replay are: profiles by name, or from a file that says where its figures come from.

Those of H100 are by arithmetic from a roofline and are not measured (``timing``). A file is one JSON object::

    {"source": "prefixmesh bench engine, 4 cores", "timing": {"step_ms": 11.0, "prefill_ms_per_token": 0.9, ...}}

with the fields of ``TimingModel``.
"""

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Final

import msgspec

from prefixmesh.errors import ConfigError
from prefixmesh.sim.timing import H100_8B, H100X2_70B, TimingModel

MAX_KV_HEADS: Final = 1024
"""More than any model has."""


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """A timing model and where it is from."""

    source: str
    timing: TimingModel
    kv_heads: int = 8
    """Of the model, on each card: from how many shared tokens on a cascade pays (``replay_cascade``)."""

    def __post_init__(self) -> None:
        if not 1 <= self.kv_heads <= MAX_KV_HEADS:
            raise ConfigError(f"kv_heads must be from 1 to {MAX_KV_HEADS}, got {self.kv_heads}")


_ROOFLINE: Final = (
    "by arithmetic from a roofline, half of each of 990 TFLOP/s and 3.35 TB/s a card reached, not measured"
)

H100X8_70B: Final = TimingModel(
    step_ms=10.4,
    prefill_ms_per_token=0.0354,
    prefill_ms_per_token2=0.331e-6,
    decode_ms_per_sequence=0.0354,
    decode_ms_per_kv_token=2.45e-5,
    load_back_ms_per_token=0.00128,
    offload_ms_per_token=0.00128,
    adapter_load_ms=1.6,
)
"""A model of 70 billion parameters in bfloat16 on eight H100, which is ``H100X2_70B`` with four times the cards; what they have to tell each
other is left out. Each card copies its own share of a token's 320 KiB of KV over its own lanes at 32 GB/s."""

CPU_SMOLLM2: Final = TimingModel(
    step_ms=30.9,
    prefill_ms_per_token=0.61,
    prefill_ms_per_token2=1.93e-4,
    decode_ms_per_sequence=2.1,
    load_back_ms_per_token=0.00375,
    offload_ms_per_token=0.00375,
    adapter_load_ms=1.6,
)
"""SmolLM2-135M in bfloat16 on two cores with nothing else on them, out of four measured steps (docs/engine.md, "Where a forward pass spends its
time"): 1,500 tokens in three steps 1,442 ms, 100 after 1,400 148 ms, one decode 33 ms, 64 of them 166 ms; copies as docs/tiers.md says, 5 to
10 ms for 2,000 tokens, and an adapter of rank 16 (9.8 MB) as quickly. What KV adds to a decode could not be told from none."""

DRAIN_8: Final = TimingModel(step_ms=0.0, prefill_ms_per_token=0.125)
"""Of no machine: prompts are computed at 8 tokens a millisecond whatever their length, and answers take no time."""

PROFILES: Final[Mapping[str, Profile]] = {
    "h100-8b": Profile(source=f"8 billion parameters on one H100, {_ROOFLINE}", timing=H100_8B),
    "h100x2-70b": Profile(
        source=f"70 billion parameters on two H100, {_ROOFLINE}", timing=H100X2_70B, kv_heads=4
    ),
    "h100x8-70b": Profile(
        source=f"70 billion parameters on eight H100, {_ROOFLINE}", timing=H100X8_70B, kv_heads=1
    ),
    "cpu-smollm2": Profile(
        source="SmolLM2-135M on two cores alone, four steps measured (docs/engine.md); one's own: bench serve --calibrate",
        timing=CPU_SMOLLM2,
        kv_heads=3,
    ),
    "drain-8": Profile(
        source="8 prompt tokens a millisecond, answers in no time: a yardstick", timing=DRAIN_8
    ),
}


_FORM: Final = '{"source": "where it is from", "timing": {"step_ms": 9.6, "prefill_ms_per_token": 0.03, …}}'
_TIMES: Final = tuple(field.name for field in fields(TimingModel))


class _AsWritten(msgspec.Struct, frozen=True):
    """Of a file, what a decoder of ``Profile`` passes over."""

    timing: dict[str, float]


def read_profile(name_or_path: str) -> Profile:
    """A profile by its name, or of a file. Raises ConfigError for what is neither, and for a file that is none.

    A time that is misspelt is refused: it would be 0.
    """
    profile = PROFILES.get(name_or_path)
    if profile is not None:
        return profile
    path = Path(name_or_path)
    try:
        is_file = path.is_file()
    except OSError:  # as of a name that is too long for any
        is_file = False
    if not is_file:
        raise ConfigError(f"profile: {name_or_path!r:.80} is neither a file nor one of {', '.join(PROFILES)}")
    try:
        return _parse(path.read_bytes())
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(f"profile {path}: {error}; one is {_FORM}") from error
    except (OSError, ConfigError) as error:
        raise ConfigError(f"profile {path}: {error}") from error


def _parse(written: bytes) -> Profile:
    profile = msgspec.json.decode(written, type=Profile)
    for name in msgspec.json.decode(written, type=_AsWritten).timing:
        if name not in _TIMES:
            raise ConfigError(f"timing has no {name!r}; there are: {', '.join(_TIMES)}")
    return profile
