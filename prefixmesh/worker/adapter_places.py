"""The room for adapters' weights in the device's memory: slots and bytes, what fits in them, and who has to go for whom. Pure.

It knows contents by their size and by their pins; who uses them, and in which order they are asked for, is the table's business
(``adapters``).
"""

from collections.abc import Iterable, Sequence

from prefixmesh.errors import BudgetError
from prefixmesh.worker.adapter_records import AdapterContent, AdapterState


class AdapterPlaces:
    """Slots of one device, and the bytes that all of them together may take."""

    def __init__(self, max_resident: int, budget_bytes: int) -> None:
        self.max_resident = max_resident
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        """Of contents that have a slot."""

        self.free_slots = list(range(max_resident - 1, -1, -1))

    def __repr__(self) -> str:
        taken = self.max_resident - len(self.free_slots)
        return (
            f"AdapterPlaces({taken} of {self.max_resident} in {self.used_bytes} of {self.budget_bytes} bytes)"
        )

    def take(self, content: AdapterContent) -> None:
        """Give a content a slot: there must be room. O(1)."""
        content.slot = self.free_slots.pop()
        self.used_bytes += content.size_bytes

    def give_back(self, content: AdapterContent) -> None:
        """A content needs its slot no longer. O(1)."""
        self.free_slots.append(content.slot)
        self.used_bytes -= content.size_bytes
        content.slot = -1

    def victims(
        self, content: AdapterContent, candidates: Sequence[AdapterContent]
    ) -> Sequence[AdapterContent] | None:
        """The first of ``candidates``, as many as must go so that ``content`` fits: none where it does already; None where all of them
        are not enough. O(victims)."""
        slots, used_bytes = len(self.free_slots), self.used_bytes
        count = 0
        while not slots or used_bytes + content.size_bytes > self.budget_bytes:
            if count == len(candidates):
                return None
            used_bytes -= candidates[count].size_bytes
            slots, count = slots + 1, count + 1
        return candidates[:count]

    def check_new(
        self, contents: Iterable[AdapterContent], name: str, digest: str, size_bytes: int, *, pinned: bool
    ) -> None:
        """Raises BudgetError when a content could never be resident, or with this pin more would be pinned than fit. O(contents)."""
        if size_bytes > self.budget_bytes:
            raise BudgetError(
                f"the adapter takes {size_bytes} bytes, all resident ones together may take {self.budget_bytes}"
            )
        others = _pinned_but(contents, digest, name)
        count, total = len(others) + 1, sum(content.size_bytes for content in others) + size_bytes
        if pinned and (count > self.max_resident or total > self.budget_bytes):
            raise BudgetError(
                f"with this one {count} adapters of {total} bytes would be pinned, where "
                f"{self.max_resident} of {self.budget_bytes} bytes can be resident (--max-resident-adapters)"
            )

    def never_fits(self, content: AdapterContent, contents: Iterable[AdapterContent]) -> str:
        """Why a content will find no room for as long as what is pinned stays so; empty when it may. O(contents)."""
        others = _pinned_but(contents, content.digest)
        if content.state is not AdapterState.ABSENT or content.pinned or not others:
            return ""
        pinned_bytes = sum(other.size_bytes for other in others)
        if len(others) < self.max_resident and pinned_bytes + content.size_bytes <= self.budget_bytes:
            return ""
        return (
            f"the adapter's weights have no place: {self.max_resident} adapters of {self.budget_bytes} bytes can be resident "
            f"(--max-resident-adapters), and {len(others)} of {pinned_bytes} bytes are pinned"
        )

    def agrees_with(self, placed: Sequence[AdapterContent]) -> bool:
        """Whether slots and bytes are those of the contents that have a place. For checks: O(slots)."""
        slots = sorted([content.slot for content in placed] + self.free_slots)
        total = sum(content.size_bytes for content in placed)
        return slots == list(range(self.max_resident)) and self.used_bytes == total <= self.budget_bytes


def _pinned_but(contents: Iterable[AdapterContent], digest: str, name: str = "") -> list[AdapterContent]:
    """Other contents that are pinned, by another name than ``name``."""
    return [
        content
        for content in contents
        if content.digest != digest and any(pin for other, pin in content.names.items() if other != name)
    ]
