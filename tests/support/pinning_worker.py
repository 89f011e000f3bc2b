"""A fake worker that pins: it keeps what it is told to warm, says so when it is asked, and tells of the blocks like a real one."""

import secrets
from collections.abc import Sequence
from typing import Any

from prefixmesh.errors import BudgetError, PrefixmeshError
from prefixmesh.fleet_secret import FleetSecret
from prefixmesh.proto.v1 import worker_control_pb2 as control
from prefixmesh.rpc.identity import bearer_token
from tests.support.fake_worker import FakeWorker, Gate, Script

BUDGET_TOKENS = 10_000
OWNER_BUDGET_TOKENS = 5_000


class PinningWorker(FakeWorker):
    """Its pages have one token."""

    def __init__(self, secret: FleetSecret, worker_id: str = "w0", script: Script | None = None) -> None:
        super().__init__(secret, worker_id, script)
        self.pins: dict[str, control.WarmRequest] = {}
        self.warmed: list[control.WarmRequest] = []
        """Every order that was taken, also those that were waiting or refused."""

        self.unpinned: list[str] = []
        self.listed = 0
        self.before_warm = Gate()
        self.warm_error: PrefixmeshError | None = None
        self._version = secrets_version()
        self._tell_version()

    async def kill(self) -> None:
        """What was pinned is gone with it."""
        await super().kill()
        self.pins.clear()
        self._change()

    def drain(self) -> None:
        """It says that it takes nothing new, as after ``Drain``."""
        self.told.rates["draining"] = True
        self.told._wake()

    def lose_pins(self) -> None:
        """As a worker that forgets: its pins and its blocks are gone, and its life goes on."""
        self.pins.clear()
        self._change()
        self.told.flush()

    async def Warm(self, message: control.WarmRequest, context: Any) -> control.WarmResponse:
        self._check(context)
        self.warmed.append(message)
        await self.before_warm.wait()
        if self.warm_error is not None:
            raise self.warm_error
        tokens = message.prefix.token_ids
        size = len(tokens) // 4
        if message.HasField("pin"):
            self._admit(message, size)
            self.pins[message.pin.pin_id] = message
            self._change()
        self._cache(message.prefix.namespace, tokens)
        return control.WarmResponse(held_tokens=size, computed_tokens=size)

    async def Unpin(self, message: control.UnpinRequest, context: Any) -> control.UnpinResponse:
        self._check(context)
        self.unpinned.append(message.pin_id)
        removed = self.pins.pop(message.pin_id, None) is not None
        self._change()
        return control.UnpinResponse(removed=removed)

    async def ListPins(self, message: control.WorkerPinsRequest, context: Any) -> control.WorkerPinsResponse:
        self._check(context)
        self.listed += 1
        return control.WorkerPinsResponse(
            pins=[self._state(pin_id, warm) for pin_id, warm in self.pins.items()],
            charged_pages=sum(len(warm.prefix.token_ids) // 4 for warm in self.pins.values()),
            budget_pages=BUDGET_TOKENS,
            owner_budget_pages=OWNER_BUDGET_TOKENS,
            version=self._version,
        )

    def _check(self, context: Any) -> None:
        assert bearer_token(dict(context.invocation_metadata() or ())) == self.secret.control_token()

    def _admit(self, message: control.WarmRequest, size: int) -> None:
        others = [warm for pin_id, warm in self.pins.items() if pin_id != message.pin.pin_id]
        for budget, whose in (
            (BUDGET_TOKENS, others),
            (OWNER_BUDGET_TOKENS, [warm for warm in others if warm.pin.owner == message.pin.owner]),
        ):
            if size + sum(len(warm.prefix.token_ids) // 4 for warm in whose) > budget:
                raise BudgetError("too many pages")

    def _state(self, pin_id: str, warm: control.WarmRequest) -> control.WorkerPinState:
        size = len(warm.prefix.token_ids) // 4
        return control.WorkerPinState(
            pin_id=pin_id, owner=warm.pin.owner, tier=warm.pin.tier, pages=size, held_tokens=size
        )

    def _change(self) -> None:
        self._version += 1
        self._tell_version()

    def _tell_version(self) -> None:
        self.told.rates["pins_version"] = self._version


def secrets_version() -> int:
    """Where a life begins to count: no two lives count alike."""
    return secrets.randbits(40)


def holders(workers: Sequence[FakeWorker], pin: str) -> list[str]:
    """Ids of the workers that keep a version of a wish, by its key."""
    return [
        worker.worker_id
        for worker in workers
        if isinstance(worker, PinningWorker) and any(one.rpartition("@")[0] == pin for one in worker.pins)
    ]
