"""One worker as a router sees it now: what it has told, how it is doing, what was sent there. Pure.

What of this makes it ready is worked out in ``readiness``; who changes it, and upon which news, is ``registry``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from prefixmesh.ids import Incarnation
from prefixmesh.router.adapter_names import Told
from prefixmesh.router.endpoint import Endpoint
from prefixmesh.router.forecast_error import ForecastError
from prefixmesh.router.load import WorkerLoad
from prefixmesh.router.worker_health import WorkerHealth
from prefixmesh.router.worker_identity import WorkerFacts
from prefixmesh.worker_report import WorkerReport

NOT_ASKED: Final = "has not answered yet"
"""The problem of a worker from when it is known until it answers, or does not."""


@dataclass(slots=True)
class WorkerTotals:
    """What was routed to a worker since it was added."""

    routed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0


class WorkerErrors:
    """How far decisions for a worker were from what came true."""

    __slots__ = ("cached_tokens", "first_token_ms")

    def __init__(self) -> None:
        self.cached_tokens = ForecastError()
        self.first_token_ms = ForecastError()


class WorkerEntry:
    """One worker as the router sees it now."""

    __slots__ = (
        "adapters",
        "awaits_first_report",
        "clock_ahead_ms",
        "draining",
        "ejected",
        "endpoint",
        "errors",
        "facts",
        "health",
        "leaving",
        "load",
        "number",
        "problem",
        "report",
        "row",
        "serving",
        "spell",
        "totals",
        "unreachable",
    )

    def __init__(self, endpoint: Endpoint, number: int) -> None:
        self.endpoint = endpoint
        self.number = number
        """Of all that were ever known to its registry, a later one having a larger one."""

        self.row = -1
        """Its place in ``FleetColumns``."""

        self.facts: WorkerFacts | None = None
        """What it told last; None before its first answer. A ready worker has it."""

        self.serving: bool | None = None
        """What its health service says; None before it has said anything on this connection."""

        self.unreachable = NOT_ASKED
        """Why it cannot be reached; empty when it can."""

        self.problem = NOT_ASKED
        """Why it is not ready; empty when it is."""

        self.health = WorkerHealth()
        self.ejected = False
        """Whether it is put out for failing, although its connection stands."""

        self.spell = 0
        """How often it has come or come back: another life, another connection, or well again after it was failing. What befalls a request
        says something of the worker only in the spell in which it was sent."""

        self.adapters: Mapping[str, Told] = {}
        """The adapters it told of last, by name."""

        self.draining = False
        """Whether it has said that it takes nothing new."""

        self.leaving = False
        """Whether an operator has this life of it hand over what it holds before it drains."""

        self.load = WorkerLoad(Incarnation(0))
        self.report: WorkerReport | None = None
        """What it told of its load last; None before that, and when it is too old."""

        self.awaits_first_report = False
        """Whether its stream has not brought a report yet: the first names everything of ours that runs there."""

        self.clock_ahead_ms = 0
        """By how much its wall clock is ahead of this router's, less what its answer took: tickets expire by the worker's."""

        self.totals = WorkerTotals()
        self.errors = WorkerErrors()

    @property
    def ready(self) -> bool:
        """Whether it may be sent requests."""
        return not self.problem

    @property
    def gives(self) -> bool:
        """Whether KV may be copied from it: also while it finishes what it has, and takes nothing new."""
        return self.ready or (
            (self.ends or (self.leaving and not self.unreachable))
            and not self.ejected
            and self.facts is not None
        )

    @property
    def ends(self) -> bool:
        """Whether it says itself that it takes nothing new, and can be reached: it drains, or was told to stop."""
        return (self.draining or self.serving is False) and not self.unreachable

    @property
    def name(self) -> str:
        """Its own id where it has told it, else its address."""
        return self.facts.worker_id if self.facts else self.endpoint

    def has_adapter(self, name: str, digest: str) -> bool:
        """Whether ``name`` means the content ``digest`` there; every worker has the base model, whose name is empty."""
        told = self.adapters.get(name)
        return not name or (told is not None and told.digest == digest)

    def has_resident(self, digest: str) -> bool:
        """Whether the weights of this content were in its device's memory when it told last."""
        if self.report is not None:
            return digest in self.report.resident_adapters
        return self.facts is not None and digest in self.facts.resident_adapters
