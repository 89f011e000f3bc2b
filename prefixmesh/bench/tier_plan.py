"""Which figures the tiers are held to, and at which sizes: the data of ``prefixmesh bench tiers``."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from prefixmesh.bench.tier_figures import Figure

FIGURES: Final[Mapping[str, Figure]] = {
    figure.name: figure
    for figure in (
        Figure(name="share_device_only", title="prompt tokens from cache, no host tier", unit="share"),
        Figure(name="share_host", title="  with a host tier that holds everything", unit="share"),
        Figure(name="share_host_rest", title="  with one of two thirds of it", unit="share"),
        Figure(name="share_unbounded", title="  device of any size", unit="share"),
        Figure(
            name="share_of_unbounded", title="host tier, of what any size gives", unit="share", target=0.95
        ),
        Figure(name="recompute", title="first token, prefix computed", unit="ms"),
        Figure(name="load_back", title="  loaded back from the host", unit="ms"),
        Figure(name="device_hit", title="  on the device", unit="ms"),
        Figure(name="load_back_ratio", title="loaded back, of computed", unit="x", target=0.15),
        Figure(name="load_back_rate", title="  load-back", unit="GB/s"),
        Figure(name="offload_rate", title="  backup", unit="GB/s"),
        Figure(name="prefill_rate", title="  prefill", unit="tokens/s"),
        Figure(name="overlap", title="  of the load, during the forward pass", unit="share"),
        Figure(name="decode_off", title="decode step of the batch, no host tier", unit="ms"),
        Figure(name="decode_backups", title="  with backups", unit="ms"),
        Figure(name="decode_ratio", title="  of that without", unit="x"),
        Figure(
            name="longest_beside",
            title="longest of a step beside the model",
            unit="s",
            target=1.0,
            judged="longest",
        ),
        Figure(name="restart_share", title="prefix cached after a restart", unit="share", target=0.9),
        Figure(name="restart_cold", title="first token, prefix computed", unit="ms"),
        Figure(name="restart_warm", title="  from the disk", unit="ms"),
        Figure(name="restart_ratio", title="from the disk, of computed", unit="x"),
        Figure(name="other_revision", title="found there by another revision", unit="tokens", target=0.0),
    )
}
"""Every figure, in the order in which they are told."""

PARTS: Final[Mapping[str, tuple[str, ...]]] = {
    "turns": ("share_device_only", "share_host", "share_host_rest", "share_unbounded", "share_of_unbounded"),
    "load_back": (
        "recompute",
        "load_back",
        "device_hit",
        "load_back_ratio",
        "load_back_rate",
        "offload_rate",
        "prefill_rate",
        "overlap",
    ),
    "backups": ("decode_off", "decode_backups", "decode_ratio", "longest_beside"),
    "restart": ("restart_share", "restart_cold", "restart_warm", "restart_ratio", "other_revision"),
}
"""What can be asked for by name, and the figures that come out of it."""

DEVICE_SHARE: Final = 3
"""In ``turns`` the device's pool is the working set divided by this."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Effort:
    """How large and how often."""

    page_size: int = 16
    talks: int = 9
    talk_turns: int = 5
    question_tokens: int = 180
    turn_tokens: int = 20
    """Of an answer."""

    at_once: int = 2
    """Conversations that wait for an answer at the same time."""

    prefix_tokens: int = 2_000
    own_tokens: int = 24
    """Of a prompt, behind a prefix that is cached somewhere: the question."""

    prefixes: int = 4
    """So many take turns in a pool of somewhat more than two, so that each has left the device when its turn comes."""

    load_back_repeats: int = 8
    decoders: int = 8
    decoder_prompt_tokens: int = 256
    decode_steps: int = 48
    arrival_every: int = 16
    """Steps between prompts that come while others decode, and whose KV is backed up meanwhile."""

    arrival_tokens: int = 512
    backup_repeats: int = 6
    restart_prefixes: int = 3

    @property
    def talk_tokens(self) -> int:
        """Of a whole conversation."""
        return self.talk_turns * (self.question_tokens + self.turn_tokens)

    @property
    def working_set(self) -> int:
        """Tokens of all conversations at their end."""
        return self.talks * self.talk_tokens


FULL: Final = Effort()
QUICK: Final = Effort(
    talks=6,
    talk_turns=3,
    question_tokens=44,
    turn_tokens=4,
    at_once=1,
    prefix_tokens=256,
    own_tokens=8,
    load_back_repeats=2,
    decoders=2,
    decoder_prompt_tokens=16,
    decode_steps=12,
    arrival_every=4,
    arrival_tokens=64,
    backup_repeats=1,
    restart_prefixes=1,
)
"""Seconds instead of minutes: shows that the bench works, not how fast anything is."""


def parts(only: frozenset[str] = frozenset()) -> list[str]:
    """What is to be measured, in order; empty ``only`` for all."""
    return [part for part in PARTS if not only or part in only]
