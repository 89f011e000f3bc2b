"""A caller that asks the same few things over and over while something else goes on, and keeps what it was told."""

import itertools
import threading
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self

from prefixmesh.client import Client
from prefixmesh.errors import PrefixmeshError

REQUEST_TIMEOUT_S: Final = 60.0
ENOUGH_WITHIN_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Answered:
    """One answer."""

    at: float
    """By ``time.monotonic``."""

    prompt: str
    text: str
    prompt_tokens: int
    cached_tokens: int


class SteadyRequests:
    """One request after the other to one address, from the block's begin to its end; greedy, so that equal prompts have equal answers."""

    def __init__(self, address: str, *prompts: str, max_tokens: int = 8) -> None:
        self.answers: list[Answered] = []
        self.errors: list[PrefixmeshError] = []
        self._address, self._prompts, self._max_tokens = address, prompts, max_tokens
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
        enough, deadline = len(self.answers) + count, time.monotonic() + ENOUGH_WITHIN_S
        while len(self.answers) < enough:
            assert self._thread.is_alive(), "the caller itself failed"
            assert time.monotonic() < deadline, (len(self.answers), enough, self.errors)
            time.sleep(0.02)

    def texts(self) -> set[tuple[str, str]]:
        """The different answers, each with its prompt."""
        return {(answer.prompt, answer.text) for answer in self.answers}

    def longest_gap_s(self) -> float:
        """Between two answers."""
        return max((after.at - before.at for before, after in itertools.pairwise(self.answers)), default=0.0)

    def cached_share(self, begin: float, end: float) -> float:
        """Of the prompt tokens of the answers between two times; 0 of none."""
        some = [answer for answer in self.answers if begin <= answer.at < end]
        return sum(answer.cached_tokens for answer in some) / max(
            1, sum(answer.prompt_tokens for answer in some)
        )

    def _run(self) -> None:
        with Client(self._address, tenant="acme", timeout_s=REQUEST_TIMEOUT_S) as client:
            for prompt in itertools.cycle(self._prompts):
                if self._is_over.is_set():
                    return
                try:
                    answer = client.generate(prompt, max_tokens=self._max_tokens, temperature=0)
                except PrefixmeshError as error:
                    self.errors.append(error)
                    self._is_over.wait(0.05)  # an error that comes at once must not become a storm
                else:
                    self.answers.append(
                        Answered(
                            time.monotonic(), prompt, answer.text, answer.prompt_tokens, answer.cached_tokens
                        )
                    )
