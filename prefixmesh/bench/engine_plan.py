"""Which figures the engine is held to, at which sizes, and what is known of others: the data of ``prefixmesh bench engine``."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from prefixmesh.bench.engine_figures import Figure, Others

FIGURES: Final[Mapping[str, Figure]] = {
    figure.name: figure
    for figure in (
        Figure(
            name="cold",
            title="first token, prompt cold",
            unit="s",
            target=1.4,
            bound="products",
            others=Others((1.44, 1.44), None, 1.74),
        ),
        Figure(
            name="warm",
            title="first token, most of it cached",
            unit="s",
            target=0.18,
            bound="products",
            others=Others((0.31, 0.31), None, 0.22),
        ),
        Figure(
            name="decode",
            title="one sequence decoding",
            unit="tokens/s",
            target=45.0,
            bound="reads",
            others=Others((39.0, 44.0), None, 20.0),
        ),
        Figure(
            name="burst",
            title="requests that share a prefix",
            unit="s",
            target=14.0,
            bound="products",
            others=Others((21.4, 21.4), 115.5),
        ),
        Figure(name="loop", title="the loop's own cost a step", unit="ms", target=1.5, bound="interpreter"),
        Figure(name="loop_temperature", title="  with temperature 0.7", unit="ms"),
        Figure(name="loop_filters", title="  and top_k 50, top_p 0.9", unit="ms"),
        Figure(name="loop_nucleus", title="  and top_p 0.9 alone", unit="ms"),
        Figure(name="loop_penalties", title="  greedy with three penalties", unit="ms"),
        Figure(name="in_flight", title="requests at once that finish", unit="requests"),
    )
}
"""Every figure, in the order in which they are told."""

PARTS: Final[Mapping[str, tuple[str, ...]]] = {
    "first_token": ("cold", "warm"),
    "decode": ("decode",),
    "burst": ("burst",),
    "loop": ("loop", "loop_temperature", "loop_filters", "loop_nucleus", "loop_penalties"),
    "in_flight": ("in_flight",),
    "savings": (),
}
"""What can be asked for by name, and the figures that come out of it."""

ON_DEMAND: Final = frozenset({"savings"})
"""Taken only when named: a curve for the docs, and no figure."""

LOOP_SAMPLING: Final[Mapping[str, Mapping[str, float]]] = {
    "loop": {},
    "loop_temperature": {"temperature": 0.7},
    "loop_filters": {"temperature": 0.7, "top_k": 50, "top_p": 0.9},
    "loop_nucleus": {"temperature": 0.7, "top_p": 0.9},
    "loop_penalties": {"repetition_penalty": 1.1, "frequency_penalty": 0.5, "presence_penalty": 0.5},
}
"""By figure, how its requests sample; greedy where nothing is said."""

SHARES_CACHED: Final = (0.0, 0.5, 0.9, 0.95, 0.99)
"""Of the prompt for ``savings``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Effort:
    """How large and how often."""

    prompt_tokens: int = 1_500
    shared_tokens: int = 1_400
    """Of the prompt, for warm prompts and the burst."""

    first_token_repeats: int = 5
    decode_prompt_tokens: int = 64
    decode_tokens: int = 96
    decode_repeats: int = 5
    burst_requests: int = 64
    burst_tokens: int = 16
    burst_repeats: int = 3
    burst_repeats_cache_off: int = 1
    """One takes as long as a dozen with the cache, and the targets do not hang on it."""

    loop_batch: int = 32
    loop_prompt_tokens: int = 1_024
    """Shared, so that the cache brings a batch to its decode at once; penalties look at all of it."""

    loop_steps: int = 30
    loop_repeats: int = 3
    flight_requests: int = 512
    flight_prompt_tokens: int = 32
    flight_tokens: int = 8
    savings_prompt_tokens: int = 4_096
    savings_repeats: int = 3


FULL: Final = Effort()
QUICK: Final = Effort(
    prompt_tokens=60,
    shared_tokens=50,
    first_token_repeats=2,
    decode_prompt_tokens=8,
    decode_tokens=6,
    decode_repeats=2,
    burst_requests=6,
    burst_tokens=3,
    burst_repeats=2,
    loop_batch=4,
    loop_prompt_tokens=24,
    loop_steps=3,
    loop_repeats=1,
    flight_requests=24,
    flight_prompt_tokens=6,
    flight_tokens=2,
    savings_prompt_tokens=100,
    savings_repeats=1,
)
"""Seconds instead of minutes: shows that the bench works, not how fast anything is."""


def parts(only: frozenset[str] = frozenset()) -> list[str]:
    """What is to be measured, in order; empty ``only`` for all but what is taken on demand."""
    return [part for part in PARTS if (part in only if only else part not in ON_DEMAND)]


def figure_of(name: str, effort: Effort) -> Figure:
    """A figure at this effort's sizes: the requests in flight are held to their own number, which nothing scales."""
    figure = FIGURES[name]
    if name != "in_flight":
        return figure
    return Figure(name=name, title=figure.title, unit=figure.unit, target=float(effort.flight_requests))
