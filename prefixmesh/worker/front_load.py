"""The load of a worker as its front knows it: who waits, who runs, and what is still to be computed. Pure.

The engine tells its own figures between two steps, which may be seconds ago. The front sees every request come and go, so the counts are
its own; of the tokens that are to be computed it knows only what the engine told last, and adds what was submitted since and is not
computed yet: its tokens, less what was found cached, or before that is known the share that the cache has usually had.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from prefixmesh.ids import RequestId
from prefixmesh.worker.messages import Admitted, Ended, Refused, TokensOut
from prefixmesh.worker.router_requests import RouterRequests

SHARE_WEIGHT: Final = 0.1
"""Of the newest prompt in the moving share of tokens that are not cached."""

_WAITS, _RUNS, _IS_OVER = range(3)


class FrontLoad:
    """All Generate calls of one worker; one event loop owns it. ``on_change`` is called after each change of what reports tell."""

    def __init__(self, requests: RouterRequests | None = None) -> None:
        self.requests = RouterRequests() if requests is None else requests
        self.on_change: Callable[[], None] = _ignore
        self.running = 0
        """Requests that the engine has begun with, a branch counting as one."""

        self.queued = 0
        """Those that it has not begun with."""

        self._submitted = 0.0
        """Tokens to compute of everything that was ever submitted, as far as they were known beforehand."""

        # Those whose first token has not come, in the order of their submission.
        self._to_compute: dict[LoadPlace, None] = {}
        self._uncached_share = 1.0
        self._context = 0.0
        """Mean of ``a + b`` over those tokens, each of a prompt that has the ones from ``a`` to ``b`` to compute."""

    def __repr__(self) -> str:
        return f"FrontLoad({self.running} running, {self.queued} queued, {self.requests!r})"

    @contextmanager
    def enter(self, router_id: str, request_id: RequestId, branches: int) -> Iterator["LoadPlace"]:
        """Count one call for as long as the block lasts. O(1)."""
        place = LoadPlace(self, router_id, request_id, branches)
        self.queued += branches
        self.requests.accepted(router_id, request_id)
        self.on_change()
        try:
            yield place
        finally:
            for branch in range(branches):
                place.ended(branch)

    def mark(self) -> float:
        """A moment; what is submitted after it the engine's next answer may not know. O(1)."""
        return self._submitted

    def uncached_tokens(self, told: int, mark: float) -> int:
        """Tokens to compute, where the engine has told of ``told`` and knew what was submitted up to ``mark``. What has come and is
        computed since is neither. O(submitted since)."""
        return round(told + self._since(mark)) if self.running or self.queued else 0

    def uncached_squares(self, told: int, mark: float) -> int:
        """The sum of ``b**2 - a**2`` over the same, alike; of what was submitted since, by the mean of all that was lately."""
        return round(told + self._since(mark) * self._context) if self.running or self.queued else 0

    def count_submit(self, place: "LoadPlace", tokens: int) -> None:
        """A prompt of so many tokens goes to the engine."""
        place.uncached_tokens = tokens * self._uncached_share
        self._submitted += place.uncached_tokens
        place.mark = self._submitted
        self._to_compute[place] = None
        context = tokens * (2.0 - self._uncached_share)
        self._context += (SHARE_WEIGHT if self._context else 1.0) * (context - self._context)
        self.on_change()

    def count_computed(self, place: "LoadPlace") -> None:
        """A prompt's first token has come, or it is wanted no more. O(1)."""
        self._to_compute.pop(place, None)

    def learn_share(self, prompt_tokens: int, cached_tokens: int) -> None:
        """A prompt was found to be cached so far."""
        share = 1.0 - cached_tokens / max(prompt_tokens, 1)
        self._uncached_share += SHARE_WEIGHT * (share - self._uncached_share)

    def _since(self, mark: float) -> float:
        """Tokens to compute of what was submitted after a mark."""
        since = 0.0
        for place in reversed(self._to_compute):
            if place.mark <= mark:
                break
            since += place.uncached_tokens
        return since


class LoadPlace:
    """One call in the load. What has ended stays ended: later calls about it change nothing."""

    def __init__(self, load: FrontLoad, router_id: str, request_id: RequestId, branches: int) -> None:
        self._load = load
        self._router_id = router_id
        self._request_id = request_id
        self._states = [_WAITS] * branches
        self._left = branches
        self._prompt_tokens: int | None = None
        self._is_prefilled = False
        self.mark = 0.0
        """The moment right after its submission (``FrontLoad.mark``)."""

        self.uncached_tokens = 0.0
        """To compute of its prompt: as expected, and once the engine has begun with it as found."""

    def submitted(self, prompt_tokens: int) -> None:
        """The call goes to the engine."""
        self._prompt_tokens = prompt_tokens
        self._load.count_submit(self, prompt_tokens)

    def on_event(self, branch: int, event: Admitted | TokensOut | Ended | Refused) -> None:
        """Take note of what the engine says of a branch. O(1)."""
        match event:
            case Admitted():
                self.admitted(branch, event.cached_tokens)
            case TokensOut():
                self.token()
            case Ended() | Refused():
                self.ended(branch)

    def admitted(self, branch: int, cached_tokens: int) -> None:
        """The engine has begun with a branch."""
        if self._states[branch] != _WAITS:
            return
        self._states[branch] = _RUNS
        self._load.queued -= 1
        self._load.running += 1
        if self._prompt_tokens is not None:
            # The first alone: what the others find, it has computed.
            self._load.learn_share(self._prompt_tokens, cached_tokens)
            self.uncached_tokens = float(self._prompt_tokens - cached_tokens)
            self._prompt_tokens = None
        self._load.on_change()

    def token(self) -> None:
        """A token was computed; the first tells that the prompt was."""
        if not self._is_prefilled:
            self._is_prefilled = True
            self._load.count_computed(self)
            self._load.requests.prefilled(self._router_id, self._request_id)
            self._load.on_change()

    def ended(self, branch: int) -> None:
        """A branch has ended; with the last, the request."""
        state, self._states[branch] = self._states[branch], _IS_OVER
        if state == _IS_OVER:
            return
        if state == _RUNS:
            self._load.running -= 1
        else:
            self._load.queued -= 1
        self._left -= 1
        if not self._left:
            self._load.count_computed(self)
            self._load.requests.ended(self._router_id, self._request_id)
        self._load.on_change()


def _ignore() -> None:
    """Nobody reads."""
