"""What must hold of a table of pins after every call, recomputed from the pins and the nodes they hold."""

import math
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from prefixmesh.cache.accounting import PageAccounts
from prefixmesh.cache.deadlines import STALE_ENTRIES
from prefixmesh.cache.invariants import broken_rule
from prefixmesh.cache.node import TreeNode, nodes_below
from prefixmesh.cache.pin import Pin
from prefixmesh.cache.tier import Tier
from prefixmesh.errors import InvariantError
from prefixmesh.tokens import TOKEN_BYTES

if TYPE_CHECKING:
    from prefixmesh.cache.pins import PinTable


def check_pins(table: "PinTable") -> None:
    """Check every group; raises InvariantError with the table and its pins. O(pins x depth)."""
    for group, find_problem in (
        ("charges", _charges),
        ("budget", _budget),
        ("holds", _holds),
        ("waiting", _waiting),
        ("pages", _pages),
        ("expiry", _expiry),
    ):
        problem = find_problem(table)
        if problem:
            pins = "\n".join(map(repr, table.pins.values()))
            raise InvariantError(f"PinTable: {group}: {problem}\n{table!r}\n{pins}")


def check_pinned_pages(table: "PinTable", accounts: PageAccounts) -> None:
    """That no pin is counted on a node which none holds: what ``check_pins`` cannot see. Raises InvariantError. O(nodes)."""
    nodes = (node for _, node in nodes_below(accounts.root) if table.pins_through(node))
    pinned = sum(map(table.held_pages, nodes))
    if pinned != table.pinned_pages:
        raise broken_rule("RadixCache", "pins", f"{pinned} pages are pinned, {table!r}", accounts)


def _charges(table: "PinTable") -> str:
    pins: Counter[str] = Counter()
    pages: Counter[str] = Counter()
    for (key, owner), pin in table.pins.items():
        if pin.key != key or pin.owner != owner:
            return f"{pin} is filed under another name"
        if not pin.pages or pin.pages * table.page_size * TOKEN_BYTES != len(key.tokens):
            return f"{pin} covers {len(key.tokens) // TOKEN_BYTES} tokens"
        pins[owner] += 1
        pages[owner] += pin.pages
    booked = {owner: (account.pins, account.pages) for owner, account in table.accounts.items()}
    if booked != {owner: (pins[owner], pages[owner]) for owner in pins}:
        return f"owners have {dict(pins)} pins of {dict(pages)} pages, booked are {booked}"
    return "" if table.charged_pages == pages.total() else f"{pages.total()} pages are charged"


def _budget(table: "PinTable") -> str:
    budget, accounts = table.budget, table.accounts.values()
    for used, limit in (
        (max((account.pages for account in accounts), default=0), budget.pages_per_owner),
        (table.charged_pages, budget.pages_in_all),
        (max((account.pins for account in accounts), default=0), budget.pins_per_owner),
        (len(table), budget.pins_in_all),
    ):
        if limit is not None and used > limit:
            return f"{used} is more than {limit} of {budget}"
    return ""


def _holds(table: "PinTable") -> str:
    for pin in table.pins.values():
        held = pin.held
        if held is None or held.receipt.node is not held.node:
            return f"{pin} has no lock of what it holds"
        tokens = sum(map(table.held_pages, _path(held.node))) * table.page_size
        if tokens != held.held_tokens:
            return f"{pin} ends {tokens} tokens below the root"
        if (held.next_edge is None) != (tokens * TOKEN_BYTES == len(pin.key.tokens)):
            return f"{pin} waits for {'nothing' if held.next_edge is None else 'something'}"
    return ""


def _waiting(table: "PinTable") -> str:
    expected: dict[tuple[TreeNode, bytes], set[Pin]] = {}
    for pin in table.pins.values():
        if pin.held and pin.held.next_edge is not None:
            expected.setdefault((pin.held.node, pin.held.next_edge), set()).add(pin)
    if {place: set(pins) for place, pins in table.waiting.items()} != expected:
        return "not exactly the pins that miss something wait, each where it would go on"
    for parent, edge in expected:
        child = parent.children.get(edge)
        if child is not None and table.held_pages(child):
            return f"{child} is there and pins still wait for it"
    return ""


def _pages(table: "PinTable") -> str:
    refs: Counter[TreeNode] = Counter()
    for pin in table.pins.values():
        if pin.held:
            refs.update(_path(pin.held.node))
    for node, pins in refs.items():
        locks = node.lock_ref if table.tier is Tier.DEVICE else node.host_ref_counter
        if table.pins_through(node) != pins or locks < pins:
            return f"{pins} pins go through {node}, which counts {table.pins_through(node)}"
    pages = sum(map(table.held_pages, refs))
    return "" if table.pinned_pages == pages else f"{pages} pages are pinned"


def _expiry(table: "PinTable") -> str:
    deadlines = table.deadlines
    pins = [pin for other in table.together for pin in other.pins.values()]
    ends = [pin.expires_at for pin in pins if pin.expires_at is not None]
    for pin in table.pins.values():
        if deadlines.when(pin) != pin.expires_at:
            return f"{pin} is let go at {deadlines.when(pin)}"
    if len(deadlines) != len(ends) or deadlines.entries > 2 * len(ends) + STALE_ENTRIES:
        return f"{deadlines.entries} entries for {len(deadlines)} ends of {len(ends)} pins that end"
    soonest = min(ends, default=math.inf)
    return "" if table.next_expiry == soonest else f"the first pin ends at {soonest:g}"


def _path(node: TreeNode) -> Iterator[TreeNode]:
    """``node`` and what is above it, the root left out. O(depth)."""
    while (parent := node.parent) is not None:
        yield node
        node = parent
