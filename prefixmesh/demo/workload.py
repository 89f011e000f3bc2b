"""The demo's customer-service workload: two tenants, each with a long policy that opens every conversation. Pure text.

A tenant's users take turns: everybody's first question, then everybody's second, and so on. So a conversation is always resumed after
others have been served in between, which is what a prefix cache must live with.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from typing import Final

from prefixmesh.errors import ConfigError
from prefixmesh.requests import ChatMessage

MIN_POLICY_TOKENS: Final = 1_200
"""A policy shorter than this, in the default model's tokens, would not be the workload this demo is about."""

_TENANTS: Final = (("northwind-air", "airline"), ("lantern-and-loom", "shop"))
_USERS: Final = (
    "Amara", "Björn", "Chen", "Dalia", "Emeka", "Freya", "Gustav", "Hana",
    "Ilyas", "Joana", "Kofi", "Leila", "Mateo", "Nadia", "Oskar", "Priya",
)  # fmt: skip
MAX_USERS: Final = len(_USERS)
MAX_TURNS: Final = 12
"""As many questions as each tenant's file has: nobody asks the same twice."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UserScript:
    """One conversation: what the user will ask, turn by turn."""

    name: str
    questions: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class TenantScript:
    """One tenant: its policy, which is the system prompt of all its conversations, and its users."""

    name: str
    policy: str
    users: tuple[UserScript, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Ask:
    """One request of the workload: which turn of whose conversation."""

    tenant: TenantScript
    user: int
    turn: int


def make_workload(users: int, turns: int) -> tuple[TenantScript, ...]:
    """Two tenants with ``users`` users of ``turns`` questions each; the same arguments always give the same texts."""
    if not 1 <= users <= MAX_USERS or not 1 <= turns <= MAX_TURNS:
        raise ConfigError(
            f"the demo has 1 to {MAX_USERS} users and 1 to {MAX_TURNS} turns, got {users} and {turns}"
        )
    return tuple(_tenant(name, file, users, turns) for name, file in _TENANTS)


def asks_of(tenant: TenantScript) -> Iterator[Ask]:
    """A tenant's requests in the order they are sent: turn by turn, the users one after the other."""
    turns = max(len(user.questions) for user in tenant.users)
    for turn in range(turns):
        for user in range(len(tenant.users)):
            yield Ask(tenant=tenant, user=user, turn=turn)


class Conversation:
    """The messages of one user so far."""

    def __init__(self, policy: str, script: UserScript) -> None:
        self._script = script
        self._messages = [ChatMessage("system", policy)]

    def ask(self, turn: int) -> tuple[ChatMessage, ...]:
        """The whole history with the question of ``turn``, as it is sent."""
        return (*self._messages, ChatMessage("user", self._script.questions[turn]))

    def answered(self, turn: int, text: str) -> None:
        """Keep the question of ``turn`` and its answer."""
        self._messages += [ChatMessage("user", self._script.questions[turn]), ChatMessage("assistant", text)]


def _tenant(name: str, file: str, users: int, turns: int) -> TenantScript:
    folder = resources.files("prefixmesh.demo") / "policies"
    policy = (folder / f"{file}.txt").read_text("utf-8").strip()
    questions = (folder / f"{file}.questions.txt").read_text("utf-8").splitlines()
    return TenantScript(
        name=name,
        policy=policy,
        users=tuple(
            UserScript(
                name=user,
                questions=tuple(
                    _question(user, number, turn, questions[(number * 5 + turn) % len(questions)])
                    for turn in range(turns)
                ),
            )
            for number, user in enumerate(_USERS[:users])
        ),
    )


def _question(user: str, number: int, turn: int, question: str) -> str:
    """The first question introduces the user, so that no two conversations are the same."""
    return question if turn else f"Hello, this is {user}, customer number {4711 + 37 * number}. {question}"
