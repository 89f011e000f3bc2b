"""Has workers do what the pin controller orders: ``Warm`` and ``Unpin``, each a call over the connection that the router has anyway.

How often and how many at once is the controller's business. Each action ends in one call of ``on_ended``, however it ends.
"""

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, Final

from prefixmesh.errors import PrefixmeshError, UnavailableError
from prefixmesh.proto.v1 import worker_control_pb2 as pb
from prefixmesh.router.pins.config import PinControllerConfig
from prefixmesh.router.pins.wishes import Action, Unpin, Warm
from prefixmesh.router.registry import WorkerRegistry
from prefixmesh.router.workers import WorkerPool
from prefixmesh.tokens import TOKEN_BYTES

_log = logging.getLogger(__name__)

OnEnded = Callable[[Action, str], None]
"""Takes an action and why it failed; empty where it did not."""

_MS_PER_S: Final = 1000.0
_FAILURE: Final = "the call failed; the router's log has the reason"


class PinActions:
    """Performs actions. Call ``close`` at the end: what is under way is given up."""

    def __init__(
        self,
        pool: WorkerPool,
        registry: WorkerRegistry,
        config: PinControllerConfig,
        clock: Callable[[], float],
        on_ended: OnEnded,
    ) -> None:
        """``clock`` is the controller's."""
        self._pool = pool
        self._registry = registry
        self._config = config
        self._clock = clock
        self._on_ended = on_ended
        self._running: set[asyncio.Task[None]] = set()
        self.counts: Counter[str] = Counter()
        """How many have ended so far, by what they were and how they ended."""

    def begin(self, actions: Iterable[Action]) -> None:
        """Begin to do these. O(1) for each; nobody waits."""
        for action in actions:
            task = asyncio.create_task(self._perform(action))
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    async def close(self) -> None:
        """Give up what is under way; workers end what they have begun."""
        running = list(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    async def _perform(self, action: Action) -> None:
        problem = ""
        try:
            if isinstance(action, Warm):
                problem = await self._warm(action)
            else:
                await self._unpin(action)
        except PrefixmeshError as error:
            problem = str(error)
        except Exception:  # a bug of ours: the controller must hear of an end
            _log.exception("pin_action_failed endpoint=%s", action.endpoint)
            problem = _FAILURE
        outcome = _outcome(action, problem)
        self.counts[outcome] += 1
        if problem:
            pin_id = action.wish.pin_id if isinstance(action, Warm) else action.pin_id
            _log.warning("pin_%s endpoint=%s pin=%r problem=%r", outcome, action.endpoint, pin_id, problem)
        self._on_ended(action, problem)

    async def _warm(self, action: Warm) -> str:
        """Why not all of it is there; empty when it is."""
        request = warm_request(action, self._clock())

        async def call(stub: Any, settings: Any) -> pb.WarmResponse:
            answer: pb.WarmResponse = await stub.Warm(request, **settings)
            return answer

        answer = await self._call(action, call, self._config.warm_timeout_s)
        _log.info(
            "pin_warmed endpoint=%s pin=%r held=%d found=%d copied=%d computed=%d ms=%.0f copy_problem=%r",
            action.endpoint,
            action.wish.pin_id,
            answer.held_tokens,
            answer.found_tokens,
            answer.copied_tokens,
            answer.computed_tokens,
            answer.elapsed_ms,
            answer.copy_problem,
        )
        return self._shortfall(action, answer)

    async def _unpin(self, action: Unpin) -> None:
        request = pb.UnpinRequest(pin_id=action.pin_id)

        async def call(stub: Any, settings: Any) -> pb.UnpinResponse:
            answer: pb.UnpinResponse = await stub.Unpin(request, **settings)
            return answer

        answer = await self._call(action, call, self._config.unpin_timeout_s)
        _log.info(
            "pin_let_go endpoint=%s pin=%r was_there=%s", action.endpoint, action.pin_id, answer.removed
        )

    async def _call(self, action: Action, call: Any, timeout_s: float) -> Any:
        link = self._pool.find_link(action.endpoint)
        if link is None:
            raise UnavailableError("it is no worker of this fleet any more")
        return await link.control(call, timeout_s)

    def _shortfall(self, action: Warm, answer: pb.WarmResponse) -> str:
        size = len(action.wish.version.tokens) // TOKEN_BYTES
        entry = self._registry.get(action.endpoint)
        page_size = entry.facts.page_size if entry is not None and entry.facts is not None else 1
        if answer.held_tokens >= size - size % max(1, page_size):
            return ""
        more = f"; {answer.copy_problem}" if answer.copy_problem else ""
        return f"{answer.held_tokens} of {size} tokens are cached{more}"


def _outcome(action: Action, problem: str) -> str:
    if isinstance(action, Warm):
        return "warm_failed" if problem else "warmed"
    return "unpin_failed" if problem else "unpinned"


def warm_request(action: Warm, now: float) -> pb.WarmRequest:
    """The call's message, at this time of the controller's clock. O(tokens)."""
    wish, version = action.wish, action.wish.version
    request = pb.WarmRequest(
        prefix=pb.Prefix(
            namespace=version.namespace,
            token_ids=version.tokens,
            boundary_tokens=version.boundary_tokens,
            tail_namespace=version.tail_namespace,
            adapter_digest=version.adapter_digest,
        ),
        sources=[
            pb.KvSource(
                address=source.address,
                incarnation=source.incarnation,
                tokens=source.tokens,
                boundary_tokens=source.boundary_tokens,
            )
            for source in action.sources
        ],
    )
    if version.tokens:
        left_s = 0.0 if wish.expires_at is None else max(wish.expires_at - now, 1.0 / _MS_PER_S)
        request.pin.CopyFrom(
            pb.WorkerPin(
                pin_id=wish.pin_id,
                owner=wish.owner,
                tier=pb.TIER_HOST if wish.tier else pb.TIER_DEVICE,
                ttl_ms=math.ceil(left_s * _MS_PER_S),
            )
        )
    return request
