"""What became of each request of a replay, in columns: what figures, plots and the digest are made of.

Of a million requests it has a hundred megabytes, which is why nothing else is kept of them.
"""

from array import array
from typing import Final

import numpy as np
import numpy.typing as npt
import xxhash

from prefixmesh.sim.replay_job import Job

Column = npt.NDArray[np.float64]

_WHOLE: Final = "q"
_REAL: Final = "d"


class ReplayLog:
    """One row a request, in the order of their ends."""

    def __init__(self) -> None:
        self._number = array(_WHOLE)
        self._worker = array(_WHOLE)
        self._prompt = array(_WHOLE)
        self._output = array(_WHOLE)
        self._device = array(_WHOLE)
        self._host = array(_WHOLE)
        self._arrived = array(_REAL)
        self._first = array(_REAL)
        self._ended = array(_REAL)

    def __len__(self) -> int:
        return len(self._number)

    def note(self, job: Job) -> None:
        """A request has ended. O(1)."""
        self._number.append(job.number)
        self._worker.append(job.worker)
        self._prompt.append(job.request.input_length)
        self._output.append(job.request.output_length)
        self._device.append(job.device_tokens)
        self._host.append(job.host_tokens)
        self._arrived.append(job.arrived_at)
        self._first.append(job.first_token_at)
        self._ended.append(job.ended_at)

    @property
    def worker(self) -> npt.NDArray[np.int64]:
        """The worker's place; so with the next: tokens of a prompt, of its answer, and of the prompt those found on device and host."""
        return np.frombuffer(self._worker, np.int64)

    @property
    def prompt_tokens(self) -> npt.NDArray[np.int64]:
        """See ``worker``."""
        return np.frombuffer(self._prompt, np.int64)

    @property
    def output_tokens(self) -> npt.NDArray[np.int64]:
        """See ``worker``."""
        return np.frombuffer(self._output, np.int64)

    @property
    def device_tokens(self) -> npt.NDArray[np.int64]:
        """See ``worker``."""
        return np.frombuffer(self._device, np.int64)

    @property
    def host_tokens(self) -> npt.NDArray[np.int64]:
        """See ``worker``."""
        return np.frombuffer(self._host, np.int64)

    @property
    def arrived_s(self) -> Column:
        """Seconds of the simulation; so with the next."""
        return np.frombuffer(self._arrived, np.float64)

    @property
    def ended_s(self) -> Column:
        """See ``arrived_s``."""
        return np.frombuffer(self._ended, np.float64)

    @property
    def ttft_ms(self) -> Column:
        """From arrival to the first token."""
        return 1e3 * (np.frombuffer(self._first, np.float64) - self.arrived_s)

    @property
    def token_ms(self) -> Column:
        """From one token of an answer to the next, on the mean; NaN of answers of one token."""
        tokens = np.where(self.output_tokens > 1, self.output_tokens - 1, np.nan)
        mean: Column = 1e3 * (self.ended_s - np.frombuffer(self._first, np.float64)) / tokens
        return mean

    def digest(self) -> str:
        """Of all that is noted: equal runs have equal ones, to the last bit of every time. O(requests)."""
        hasher = xxhash.xxh3_64()
        for column in (
            self._number,
            self._worker,
            self._prompt,
            self._output,
            self._device,
            self._host,
            self._arrived,
            self._first,
            self._ended,
        ):
            hasher.update(column)
        return hasher.hexdigest()
