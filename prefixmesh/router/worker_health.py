"""How a worker that can be reached is doing, by its probes and by how its requests end, and who may be put out for it. Pure.

    well      three probes in a row fail, or three requests          -> failing
    failing   two probes in a row are good, after a pause that grows -> well

A worker whose connection is broken is none of this: it is out at once, and in again when it answers (``registry``). Here it is about
those that are connected and still do not do: a process that has stopped, an engine that fails whatever it is given. Who is only busy, who
refuses, whose callers make mistakes or leave, is well.

The rules are known from proxies. Envoy counts failures in a row, of its own health checks and, as "outlier detection", of the traffic;
it keeps a host out for longer each time; and where too many hosts fail ("panic threshold") it uses all of them, since then the trouble is
more likely on its own side, and the few that are left would be crushed. The pause between probes grows twofold, and half of it is left to
chance, so that many routers do not knock at one moment. Time and chance are passed in; who is told, and what is done, is the caller's.
"""

from typing import Final

FAILURES_OUT: Final = 3
"""In a row: one may be chance, two may be one cause."""

SUCCESSES_IN: Final = 2
"""In a row, of probes: a worker on its last legs answers once."""

PROBE_INTERVAL_S: Final = 1.0
"""From the beginning of a probe to the next one's. A probe costs both ends some tenths of a millisecond."""

PROBE_TIMEOUT_S: Final = 2.0
"""A worker answers within milliseconds; on two cores that eight processes want, within some tenths of a second. With three of these a worker
that has stopped is out after at most seven seconds, and one that is alive must have said nothing at all in six to be taken for it."""

FIRST_PAUSE_S: Final = 1.0
LONGEST_PAUSE_S: Final = 5.0
"""Between probes of a failing worker, doubled from the first to this: one that wakes up is in again within six seconds."""

MAX_DOUBLINGS: Final = 16
"""More than any pause has; counts grow without end."""

LONGEST_STAY_S: Final = 30.0
"""Before the first probe of a worker that fails again and again, doubled with each time up to this."""

FORGIVEN_S: Final = 60.0
"""Who was well for so long fails for the first time."""


class WorkerHealth:
    """The health of one life of a worker: another process begins well. Every method takes O(1)."""

    __slots__ = (
        "_break_is_counted",
        "_failed_probes",
        "_failed_requests",
        "_good_probes",
        "_probes_out",
        "_times_out",
        "_well_since",
        "why",
    )

    def __init__(self) -> None:
        self.why = ""
        """Why it is failing; empty while it is well."""

        self._failed_probes = 0
        self._failed_requests = 0
        # In a row, since it is failing: probes that were good, and probes that were not.
        self._good_probes = 0
        self._probes_out = 0
        # How often it has begun to fail, without having been well for long in between.
        self._times_out = 0
        self._well_since = 0.0
        self._break_is_counted = False

    def __repr__(self) -> str:
        return f"<WorkerHealth {self.why or 'well'}, {self.failures} failures>"

    @property
    def is_failing(self) -> bool:
        """Whether it is to be put out, as far as it alone is concerned."""
        return bool(self.why)

    @property
    def failures(self) -> int:
        """Failures in a row up to now, of probes and of requests."""
        return self._failed_probes + self._failed_requests

    def probe_ended(self, problem: str, now: float) -> bool:
        """A probe found ``problem``, or none when that is empty. True when it is failing now and was not, or the other way round."""
        if problem:
            self._good_probes = 0
            self._failed_probes += 1
            self._probes_out += self.is_failing
            return self._may_fail(
                self._failed_probes, f"{problem}, {self._failed_probes} times in a row", now
            )
        self._failed_probes = 0
        if not self.is_failing:
            return False
        self._good_probes += 1
        if self._good_probes < SUCCESSES_IN:
            return False
        self._recover(now)
        return True

    def request_failed(self, why: str, now: float, *, is_connected: bool = True) -> bool:
        """A request ended by the worker's fault. True when it is failing now and was not.

        A connection that breaks ends all requests on it at one moment, and that counts once: of those that end while the worker is not
        connected only the first does, and only where none did before the break was seen.
        """
        if self.is_failing or (not is_connected and self._break_is_counted):
            return False
        self._break_is_counted = True
        self._failed_requests += 1
        return self._may_fail(
            self._failed_requests,
            f"{self._failed_requests} requests in a row failed there, the last: {why}",
            now,
        )

    def request_succeeded(self) -> None:
        """A request ended well. It ends a row of those that failed; who is failing must be good at probes."""
        self._failed_requests = 0
        self._break_is_counted = False

    def connected(self) -> None:
        """It answers after its connection was broken."""
        self._break_is_counted = False

    def pause_s(self, chance: float) -> float:
        """How long to wait before the next probe: from the beginning of the last one while it is well, else from its end. ``chance`` is
        drawn evenly from 0 to 1."""
        if not self.is_failing or self._good_probes:
            return PROBE_INTERVAL_S
        stay_s = min(_doubled(self._times_out - 1), LONGEST_STAY_S)
        pause_s = min(_doubled(self._probes_out), LONGEST_PAUSE_S)
        return max(stay_s, pause_s) * (1.0 + chance) / 2.0

    def _may_fail(self, in_a_row: int, why: str, now: float) -> bool:
        if self.is_failing or in_a_row < FAILURES_OUT:
            return False
        if now - self._well_since > FORGIVEN_S:
            self._times_out = 0
        self._times_out += 1
        self._good_probes = self._probes_out = 0
        self.why = why
        return True

    def _recover(self, now: float) -> None:
        self.why = ""
        self._failed_requests = self._good_probes = 0
        self._break_is_counted = False
        self._well_since = now


def may_be_put_out(failing: int, otherwise_ready: int) -> bool:
    """Whether so many of the workers that are otherwise ready may be put out: at most half. Where more fail, requests go to all of them."""
    return 2 * failing <= otherwise_ready


def _doubled(times: int) -> float:
    return FIRST_PAUSE_S * float(2 ** min(times, MAX_DOUBLINGS))
