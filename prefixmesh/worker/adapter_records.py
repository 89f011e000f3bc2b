"""What the adapter table keeps, and the actions by which it tells its shell what to do."""

import enum
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Grant:
    """The request may run, with the weights in this slot."""

    request_id: str
    slot: int


@dataclass(frozen=True, slots=True)
class Refusal:
    """The request cannot have its adapter; ``is_full`` when that may change by waiting."""

    request_id: str
    problem: str
    is_full: bool = False


@dataclass(frozen=True, slots=True)
class Load:
    """Read a content's weights into a slot, then say ``loaded`` or ``load_failed``."""

    digest: str
    path: str
    slot: int


@dataclass(frozen=True, slots=True)
class Drop:
    """Free a slot's weights: nobody uses them."""

    slot: int


@dataclass(frozen=True, slots=True)
class Unloaded:
    """Everything that had the unloaded content has ended."""

    question: int


Action = Grant | Refusal | Load | Drop | Unloaded


class AdapterState(enum.Enum):
    """``ABSENT -> LOADING -> RESIDENT -> ABSENT``; a load that fails leads back as well."""

    ABSENT = "absent"
    LOADING = "loading"
    RESIDENT = "resident"


@dataclass(slots=True, eq=False)
class AdapterContent:
    """One adapter's weights, under whichever names; a record that the table moves."""

    digest: str
    path: str
    rank: int
    size_bytes: int
    """Of its weights, when resident."""

    paths: dict[str, str] = field(default_factory=dict)
    """Where each name was loaded from: any of them will do, as long as its name is there."""

    names: dict[str, bool] = field(default_factory=dict)
    """Names that mean it, and whether each pins it."""

    state: AdapterState = AdapterState.ABSENT
    slot: int = -1
    users: set[str] = field(default_factory=set)
    waiting: dict[str, None] = field(default_factory=dict)
    last_used: int = 0
    """The table's count of uses then: the least is the least recent."""

    @property
    def pinned(self) -> bool:
        """Whether some name keeps it resident."""
        return any(self.names.values())

    @property
    def has_requests(self) -> bool:
        """Whether any request uses it or waits for it."""
        return bool(self.users or self.waiting)
