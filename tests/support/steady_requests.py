"""A caller that asks the same thing over and over while something else goes on, and keeps what it was told."""

import threading
import time
from types import TracebackType
from typing import Final, Self

from prefixmesh.client import Client
from prefixmesh.errors import PrefixmeshError

REQUEST_TIMEOUT_S: Final = 60.0
ENOUGH_WITHIN_S: Final = 60.0


class SteadyRequests:
    """One request after the other to one address, from the block's begin to its end; greedy, so that all answers are the same."""

    def __init__(self, address: str, prompt: str, *, max_tokens: int = 8) -> None:
        self.texts: list[str] = []
        self.errors: list[PrefixmeshError] = []
        self._address, self._prompt, self._max_tokens = address, prompt, max_tokens
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="steady-requests")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_over.set()
        self._thread.join()

    def wait_for_more(self, count: int) -> None:
        """Return when ``count`` more requests have been answered."""
        enough, deadline = len(self.texts) + count, time.monotonic() + ENOUGH_WITHIN_S
        while len(self.texts) < enough:
            assert self._thread.is_alive(), "the caller itself failed"
            assert time.monotonic() < deadline, (len(self.texts), enough, self.errors)
            time.sleep(0.02)

    def _run(self) -> None:
        with Client(self._address, tenant="acme", timeout_s=REQUEST_TIMEOUT_S) as client:
            while not self._is_over.is_set():
                try:
                    answer = client.generate(self._prompt, max_tokens=self._max_tokens, temperature=0)
                except PrefixmeshError as error:
                    self.errors.append(error)
                    self._is_over.wait(0.05)  # an error that comes at once must not become a storm
                else:
                    self.texts.append(answer.text)
