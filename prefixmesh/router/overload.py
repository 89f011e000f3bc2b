"""Who is refused at the decision, because it would wait too long: a pure rule over what the decision predicts.

A queue that grows beyond what its callers can wait for serves nobody in time: every answer comes after its deadline, and all of the work is
wasted. So what would come too late is refused at once, before anything is reserved, and its caller is told when to come back. What is taken
ends in time, and under any load that is as much as the fleet can do. Two ideas of others are in it: to drop by the predicted time in the queue
instead of the queue's length (Nichols and Jacobson, "Controlling Queue Delay", 2012), and to refuse by criticality, the least first, going
by what was refused lately (Beyer et al., "Site Reliability Engineering", 2016, chapter 21; Zhou et al., "Overload Control for Scaling WeChat
Microservices" (DAGOR), 2018).

It looks at one decision at a time and knows nothing of queues: their lengths are in the decision's terms already.
"""

import math
from typing import Final, NamedTuple

from prefixmesh.errors import OverloadedError

URGENT_SHARE: Final = 0.9
NORMAL_SHARE: Final = 0.7
BACKGROUND_SHARE: Final = 0.35
"""Of the longest wait that its deadline leaves it, what a request of a priority above, of and below 0 may wait. However many normal ones
come, they keep the queues below what an urgent one with the same deadline may wait, so that it finds room at once. What is left of 1 is for
what is predicted wrongly: places come free by the batch, and a tenth or two of a wait are chance."""

LEAST_SHARE: Final = 0.1
"""Of the time left, so much may anybody wait, even who would not end in time where nobody waits: that is no overload, and it may be wrong
about a worker that has not measured itself yet."""

PRESSURE_S: Final = 1.0
"""How long a refusal is felt by those of lower priority. They come back as soon as nobody above them has been refused for so long."""

LEAST_RETRY_S: Final = 0.1
"""Nobody is told to come back sooner: what is predicted is not as exact as that, and asking costs as much as the answer."""

MOST_RETRY_S: Final = 600.0
"""Nor later: workers are added, and callers leave."""

_MS_PER_S: Final = 1e3


class Outlook(NamedTuple):
    """What a decision expects for its request, in milliseconds."""

    wait_ms: float
    """Until its worker turns to it."""

    own_ms: float
    """From then to its end: its prefill, what is loaded for it, and its expected answer."""

    worker: str = ""
    """Its name, for messages."""

    @property
    def end_ms(self) -> float:
        """From now to its end."""
        return self.wait_ms + self.own_ms


class Overload:
    """The rule, and which refusals are still felt. One router's; not thread-safe. All of it is O(1)."""

    def __init__(self, max_wait_s: float) -> None:
        """``max_wait_s``: who would wait longer is refused whatever its deadline; 0 refuses nobody at all."""
        self._max_wait_s = max_wait_s
        self._pressed_from = -math.inf
        """Requests below this priority give way."""

        self._pressed_until = -math.inf
        self.refused = 0
        """How many were refused since the start."""

    def __repr__(self) -> str:
        return f"Overload({self.refused} refused)"

    def takes(self, outlook: Outlook, priority: int, time_left_s: float, now: float) -> bool:
        """Whether the request is to be taken. ``time_left_s`` is what its deadline leaves, infinite without one."""
        if not self._max_wait_s or not outlook.wait_ms:
            return True
        bearable_ms = self._bearable_ms(outlook.own_ms, time_left_s * _MS_PER_S, priority)
        return outlook.wait_ms <= (0.0 if self._gives_way(priority, now) else bearable_ms)

    def refuse(self, outlook: Outlook, priority: int, time_left_s: float, now: float) -> OverloadedError:
        """The error of a request that is not taken, with when to come back. Counts as a refusal, which those of lower priority feel."""
        left_ms = time_left_s * _MS_PER_S
        bearable_ms = self._bearable_ms(outlook.own_ms, left_ms, priority)
        gives_way = self._gives_way(priority, now)
        self.refused += 1
        if outlook.wait_ms > bearable_ms and outlook.own_ms <= left_ms:
            self._press(priority, now)
        retry_s = max(0.0, outlook.wait_ms - bearable_ms) / _MS_PER_S
        if gives_way:
            retry_s = max(retry_s, self._pressed_until - now)
        return OverloadedError(
            _told(outlook, time_left_s, bearable_ms, gives_way=gives_way),
            min(max(retry_s, LEAST_RETRY_S), MOST_RETRY_S),
        )

    def _gives_way(self, priority: int, now: float) -> bool:
        """Whether somebody more important was refused a moment ago."""
        return priority < self._pressed_from and now < self._pressed_until

    def _bearable_ms(self, own_ms: float, left_ms: float, priority: int) -> float:
        """The longest wait with which the request is taken."""
        wait_ms = max(left_ms - own_ms, LEAST_SHARE * left_ms, 0.0)
        return share_of(priority) * min(wait_ms, self._max_wait_s * _MS_PER_S)

    def _press(self, priority: int, now: float) -> None:
        """A refusal of this priority is felt by all below it; one that is felt already, of a higher priority, by more of them."""
        if now >= self._pressed_until or priority >= self._pressed_from:
            self._pressed_from, self._pressed_until = priority, now + PRESSURE_S


def share_of(priority: int) -> float:
    """Of the wait that its deadline leaves it, what a request of this priority may wait."""
    if priority > 0:
        return URGENT_SHARE
    return NORMAL_SHARE if priority == 0 else BACKGROUND_SHARE


def _told(outlook: Outlook, time_left_s: float, bearable_ms: float, *, gives_way: bool) -> str:
    begins = f"worker {outlook.worker} would begin with this request in {outlook.wait_ms / _MS_PER_S:.1f} s"
    if gives_way:
        return f"{begins}, and requests of higher priority are being refused"
    deadline = ""
    if time_left_s < math.inf:
        ends_s = outlook.end_ms / _MS_PER_S
        deadline = f" and end it in {ends_s:.1f} s, where its deadline is in {time_left_s:.1f} s"
    return f"{begins}{deadline}; at its priority it may wait {bearable_ms / _MS_PER_S:.1f} s"
