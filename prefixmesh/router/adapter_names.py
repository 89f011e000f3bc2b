"""Which content the name of a LoRA adapter means in a fleet, going by what each worker has told. Pure.

Workers are loaded one after the other, so for a while a name means two contents. A request needs one: its namespace is made from it, and
only workers that have that very content may compute it.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple


class Told(NamedTuple):
    """What one worker has under one name."""

    digest: str
    """Of the content."""

    since: int
    """Number of the answer in which the worker first told of it: a smaller one came earlier."""


def take_note(known: Mapping[str, Told], told: Mapping[str, str], number: int) -> dict[str, Told]:
    """What is known of a worker after its answer ``number`` told digests by name; O(adapters)."""
    noted: dict[str, Told] = {}
    for name, digest in told.items():
        before = known.get(name)
        noted[name] = before if before is not None and before.digest == digest else Told(digest, since=number)
    return noted


def choose_content(told: Iterable[Told], wished: str = "") -> str | None:
    """The digest that most workers have; of equally many the one that is wished for the fleet, else the one that was told of last; None when
    nobody has any. O(workers).

    A fleet of two that is loaded anew changes over with its first worker, a larger one with its majority: nobody is sent to the one
    worker that has the new content while all the others still have the old. What is wished is the newer of the two then; a worker that has found
    something else in its folder is newer still, and is not what anybody wants.
    """
    holders: dict[str, int] = {}
    began: dict[str, int] = {}
    for digest, since in told:
        holders[digest] = holders.get(digest, 0) + 1
        began[digest] = min(since, began.get(digest, since))
    return max(holders, key=lambda digest: (holders[digest], digest == wished, began[digest]), default=None)
