"""The bounds of what the adapter controller has done at once, and how long it waits. Pure."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterControllerConfig:
    """Settings of one controller; fixed for its life."""

    max_loads: int = 16
    """Loads under way in the whole fleet. Each reads an adapter's every byte, from a storage that workers mostly share."""

    max_unloads: int = 64
    """Names being forgotten in the whole fleet, as far as workers still tell them. Cheap; a worker answers only when the requests by that name
    have ended, and others do not wait for that."""

    roll_share: float = 0.125
    """Share of the ready workers that change from one content to another at a time; of few workers one. The others serve the name as before."""

    settle_s: float = 1.0
    """So long after a change the worker counts as changing: by then every router has been told (``worker_link.DESCRIBE_INTERVAL_S``), so that
    a request that was prepared for the old content meets a changed worker once, and not one after the other."""

    first_pause_s: float = 1.0
    """Before what failed is tried again at that worker; doubled with each failure in a row."""

    longest_pause_s: float = 60.0
    """The longest of these: a worker that is well again should not wait for long."""

    refused_pause_s: float = 30.0
    """The first pause after a worker has refused the request itself, as for a folder that is not there: somebody must mend that first."""

    longest_refused_pause_s: float = 600.0
    """And the longest: mended, it is loaded within ten minutes, or at once when it is put again."""

    load_timeout_s: float = 120.0
    """Longest time for a load: of an adapter of some gigabytes from a slow disk."""

    unload_timeout_s: float = 30.0
    """Longest wait for requests that run with what is unloaded. It leaves all the same."""
