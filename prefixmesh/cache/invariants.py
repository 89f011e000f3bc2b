"""The rules that hold for every cache's nodes after every operation, recomputed from nothing.

``check_accounts`` is for every kind of cache, ``check_radix`` adds what is particular to the tree; see ``docs/cache.md`` for what
breaks when a rule does.
"""

from collections.abc import Callable, Iterable, Iterator

import numpy as np

from prefixmesh.cache.accounting import PageAccounts
from prefixmesh.cache.base import PageIndices
from prefixmesh.cache.drawing import draw
from prefixmesh.cache.fingerprint import block_fingerprints
from prefixmesh.cache.namespace import NAMESPACE_BYTES
from prefixmesh.cache.node import NO_CHILDREN, NO_PAGES, TreeNode, end_of, nodes_below, nodes_from
from prefixmesh.cache.owners import OwnerLines
from prefixmesh.cache.tier import Tier
from prefixmesh.cache.transfers import Copy, Fetch, Transfers
from prefixmesh.errors import InvariantError
from prefixmesh.tokens import TOKEN_BYTES


class _BrokenRuleError(Exception):
    """A rule does not hold; becomes an InvariantError once the group's name and the state are known."""


def check_accounts(name: str, accounts: PageAccounts, page_bytes: int) -> None:
    """Check the books against the nodes; raises InvariantError with the tree drawn. O(nodes + pages)."""
    state = _State(accounts, None)
    _run(name, state, _account_checks(state, page_bytes))
    accounts.allocator.check_invariants()


def check_radix(
    accounts: PageAccounts, transfers: Transfers | None, page_bytes: int, block_size: int
) -> None:
    """As ``check_accounts``, and the rules of both tiers, of edges' names and of fingerprints. O(nodes + pages + tokens)."""
    state = _State(accounts, transfers)
    checks = _account_checks(state, page_bytes)
    checks["tiers"] = lambda: _tiers(state)
    checks["edges"] = lambda: _edges(state, page_bytes)
    checks["fingerprints"] = lambda: _fingerprints(accounts.root, page_bytes, block_size)
    checks["copies"] = lambda: _copies(state)
    _run("RadixCache", state, checks)
    accounts.allocator.check_invariants()
    if accounts.host is not None:
        accounts.host.allocator.check_invariants()


def broken_rule(
    name: str, group: str, what: str, accounts: PageAccounts, in_flight: Iterable[Copy] = ()
) -> InvariantError:
    """The error for a broken rule: where, what, and the whole state."""
    return InvariantError(
        f"{name}: {group}: {what}\n{summary(accounts)} {accounts.allocator!r}\n{draw(accounts, in_flight)}"
    )


def summary(accounts: PageAccounts) -> str:
    """The counts in one line."""
    host = accounts.host
    second = "" if host is None else f"host={host.cached_pages}, host_protected={host.protected_pages}, "
    return (
        f"nodes={accounts.node_count}, evictable={accounts.evictable_pages}, protected={accounts.protected_pages}, "
        f"free={accounts.allocator.free_pages}/{accounts.allocator.total_pages}, {second}"
        f"detached={len(accounts.detached)}, double_releases={accounts.double_releases}"
    )


def owned_pages(
    accounts: PageAccounts, transfers: Transfers | None = None, tier: Tier = Tier.DEVICE
) -> PageIndices:
    """Every page of a tier that a node (cut-off ones too) or a copy in flight owns, in no order. O(pages)."""
    state = _State(accounts, transfers)
    values = [_value(node, tier) for node in (*state.nodes, *state.detached)]
    return np.concatenate([NO_PAGES, *values, *state.destinations(tier)])


class _State:
    """What the checks look at, gathered once."""

    def __init__(self, accounts: PageAccounts, transfers: Transfers | None) -> None:
        self.accounts = accounts
        self.nodes = [node for _, node in nodes_below(accounts.root)]
        self.transfers = transfers
        self.copies: list[Copy] = list(transfers.in_flight) if transfers is not None else []
        cut_off = dict.fromkeys(accounts.detached.values())
        for (
            copy
        ) in self.copies:  # a flush lets go of pins, so that copies alone lock what it cuts off on the host
            cut_off.update(dict.fromkeys(at for at in _path(copy.node) if at.payer is accounts.gone))
        self.detached = list(cut_off)

    def destinations(self, tier: Tier) -> list[PageIndices]:
        """Pages that copies in flight own."""
        return [copy.owned_on(tier) for copy in self.copies]


def _account_checks(state: _State, page_bytes: int) -> dict[str, Callable[[], None]]:
    return {
        "structure": lambda: _structure(state, page_bytes),
        "arrays": lambda: _arrays([*state.nodes, *state.detached]),
        "pages": lambda: _pages(state),
        "locks": lambda: _locks(state),
        "ranks": lambda: _ranks(state),
        "order": lambda: _order(state),
        "payers": lambda: _payers(state),
        "counts": lambda: _counts(state),
    }


def _run(name: str, state: _State, checks: dict[str, Callable[[], None]]) -> None:
    for group, check in checks.items():
        try:
            check()
        except _BrokenRuleError as broken:
            raise broken_rule(name, group, str(broken), state.accounts, state.copies) from broken


def _require(condition: bool, what: str, *about: object) -> None:  # noqa: FBT001 -- the condition is the point
    """``what`` is filled in with ``about`` only when it must be said: saying it takes longer than checking."""
    if not condition:
        raise _BrokenRuleError(what.format(*about))


def _path(node: TreeNode | None) -> Iterator[TreeNode]:
    while node is not None and node.parent is not None:
        yield node
        node = node.parent


def _value(node: TreeNode, tier: Tier) -> PageIndices:
    return node.value if tier is Tier.DEVICE else node.host_value


def _structure(state: _State, page_bytes: int) -> None:
    root = state.accounts.root
    _require(root.parent is None and not root.on_device and not root.on_host, "the root holds something")
    _require(not NO_CHILDREN, "a leaf's shared table of no children has some")
    for node in state.nodes:
        _require(node.on_device or node.on_host, "{} is on no tier", node)
        _require(node.parent is not None and node.start == end_of(node.parent), "{} begins elsewhere", node)
        for tier in Tier:
            value = _value(node, tier)
            fits = not len(value) or len(node.key) == len(value) * page_bytes
            _require(fits, "{}: {} bytes of key", node, len(node.key))
    for parent in (root, *state.nodes):
        children = parent.children.values()
        host_only = sum(not child.on_device for child in children)
        _require(
            parent.host_only_children == host_only, "{} has {} children on the host alone", parent, host_only
        )
        on_host = sum(child.on_host for child in children)
        _require(parent.host_children == on_host, "{} has {} children on the host", parent, on_host)
        for edge, child in parent.children.items():
            _require(
                child.parent is parent and child.edge == edge, "{} and its parent {} disagree", child, parent
            )


def _arrays(nodes: list[TreeNode]) -> None:
    for node in nodes:
        for packed in (node.key, node.pages, node.host_pages, node.edge):
            _require(type(packed) is bytes, "{}: {} may keep a larger array alive", node, type(packed))


def _tiers(state: _State) -> None:
    root = state.accounts.root
    for node in state.nodes:
        parent = node.parent
        if parent is root or parent is None:
            continue
        _require(not node.on_device or parent.on_device, "{} is on the device and its parent is not", node)
        _require(not node.on_host or parent.on_host, "{} is on the host and its parent is not", node)


def _pages(state: _State) -> None:
    accounts = state.accounts
    pools = {Tier.DEVICE: accounts.allocator}
    if accounts.host is not None:
        pools[Tier.HOST] = accounts.host.allocator
    for tier, pool in pools.items():
        owner: dict[int, object] = {}
        values: list[tuple[object, PageIndices]] = [
            (node, _value(node, tier)) for node in (*state.nodes, *state.detached)
        ]
        values += [("a copy in flight", pages) for pages in state.destinations(tier)]
        for holder, pages in values:
            for page in pages.tolist():
                _require(
                    page not in owner,
                    "{} page {} is owned by {} and {}",
                    tier.name,
                    page,
                    owner.get(page),
                    holder,
                )
                owner[page] = holder
        _require(len(owner) <= pool.total_pages - pool.free_pages, "nodes own more pages than are allocated")
        free = set(pool.listing().tolist())
        _require(
            free.isdisjoint(owner),
            "{} pages {} are owned and free",
            tier.name,
            sorted(free & owner.keys())[:8],
        )


def _locks(state: _State) -> None:
    root = state.accounts.root
    for node in (root, *state.nodes, *state.detached):
        children = node.children.values()
        below = sum(child.lock_ref for child in children)
        _require(node.receipts >= 0, "{} has {} receipts", node, node.receipts)
        _require(
            node.lock_ref == node.receipts + below, "{}: {} receipts and {} below", node, node.receipts, below
        )
        below = sum(child.host_ref_counter for child in children)
        held = node.host_receipts + below
        _require(node.host_ref_counter == held, "{}: {} host locks and {}", node, held, node.host_ref_counter)
        _require(node is root or node.on_device or not node.lock_ref, "{} is locked on the device", node)
        _require(node is root or node.on_host or not node.host_ref_counter, "{} is locked on the host", node)
        _require(node.pin_ref <= node.lock_ref, "{} has {} pins", node, node.pin_ref)
        host_pins = node.host_pin_ref
        _require(host_pins <= node.host_ref_counter, "{} has {} pins on the host", node, host_pins)
    for node in state.detached:
        locked = node.lock_ref + node.host_ref_counter
        _require(locked > 0, "{} was cut off by a flush and nobody reads it", node)


def _ranks(state: _State) -> None:
    for node in state.nodes:
        parent = node.parent
        if parent is None or parent is state.accounts.root:
            continue
        _require(parent.priority >= node.priority, "{} has a lower priority than its child {}", parent, node)
        _require(parent.hit_count >= node.hit_count, "{} has fewer hits than its child {}", parent, node)


def _order(state: _State) -> None:
    accounts = state.accounts
    _check_lines(accounts.lines, [node for node in state.nodes if node.on_device and not node.lock_ref])
    if accounts.host is not None:
        idle = [node for node in state.nodes if node.on_host and not node.host_ref_counter]
        _check_lines(accounts.host.lines, idle)


def _check_lines(lines: OwnerLines, idle: list[TreeNode]) -> None:
    expected: dict[str, set[TreeNode]] = {payer.name: set() for payer in lines}
    for node in idle:
        _require(node.payer.name in expected, "{} is on the account of an unknown payer", node)
        expected[node.payer.name].add(node)
    for payer in lines:
        # A locked node may stand in line until it comes up: it is not looked at.
        line = [node for node in payer.line if not lines.is_locked(node)]
        place = {node: index for index, node in enumerate(line)}
        _require(place.keys() == expected[payer.name], "the line of {} is not its evictable nodes", payer)
        _require(len(place) == len(line), "{} has a node in line twice", payer)
        for node, index in place.items():
            parent = node.parent
            if parent in place:
                _require(index < place[parent], "{} would be evicted before its child {}", parent, node)
    lines.check_invariants()


def _payers(state: _State) -> None:
    accounts = state.accounts
    tiers = [(Tier.DEVICE, accounts.lines)]
    if accounts.host is not None:
        tiers.append((Tier.HOST, accounts.host.lines))
    for tier, lines in tiers:
        pages: dict[str, int] = {}
        for node in state.nodes:
            pages[node.payer.name] = pages.get(node.payer.name, 0) + len(_value(node, tier))
        for payer in lines:
            owed = pages.pop(payer.name, 0)
            _require(payer.pages == owed, "{} pays for {} {} pages", payer, owed, tier.name)
        _require(not any(pages.values()), "nobody pays for {}", pages)


def _counts(state: _State) -> None:
    accounts = state.accounts
    nodes, all_nodes = state.nodes, (*state.nodes, *state.detached)
    cached = sum(len(node.value) for node in all_nodes)
    protected = sum(len(node.value) for node in all_nodes if node.lock_ref)
    _require(accounts.cached_pages == cached, "{} pages are cached", cached)
    _require(accounts.protected_pages == protected, "{} pages are protected", protected)
    _require(accounts.node_count == len(nodes), "there are {} nodes", len(nodes))
    known = {page: node for node in state.detached for page in node.value.tolist()}
    _require(accounts.detached == known, "the detached pages are not the detached nodes' pages")
    if accounts.host is None:
        return
    cached = sum(len(node.host_value) for node in all_nodes)
    protected = sum(len(node.host_value) for node in all_nodes if node.host_ref_counter)
    _require(accounts.host.cached_pages == cached, "{} host pages are cached", cached)
    _require(accounts.host.protected_pages == protected, "{} host pages are protected", protected)


def _edges(state: _State, page_bytes: int) -> None:
    for node in state.nodes:
        first_page = node.key[:page_bytes]
        begins = len(node.edge) == NAMESPACE_BYTES + page_bytes
        name = node.edge[NAMESPACE_BYTES:] if begins else node.edge
        _require(name == first_page, "{} is not found by its first page", node)
        _require(begins or node.parent is not state.accounts.root, "{} has no namespace", node)


def _fingerprints(root: TreeNode, page_bytes: int, block_size: int) -> None:
    """Every node has the names of exactly the blocks that end in it."""
    stack = [(child, child.edge[:NAMESPACE_BYTES], b"") for child in root.children.values()]
    while stack:
        node, namespace, above = stack.pop()
        tokens = above + node.key
        names = block_fingerprints(namespace, tokens, block_size)
        before = len(above) // TOKEN_BYTES // block_size
        _require(node.hash_value == tuple(names[before:]), "{} has other fingerprints than its tokens", node)
        for child in node.children.values():
            if len(child.edge) == page_bytes:
                stack.append((child, namespace, tokens))
            else:
                stack.append((child, child.edge[:NAMESPACE_BYTES], b""))


def _copies(state: _State) -> None:
    serial = state.accounts.serial
    for node in state.nodes:
        _require(max(node.serial, node.host_serial) <= serial, "{} was used by an operation to come", node)
    for copy in state.copies:
        _copy(state, copy)
    if state.transfers is not None:
        for tier in Tier:
            owned = sum(map(len, state.destinations(tier)))
            counted = state.transfers.destination_pages(tier)
            _require(owned == counted, "copies own {} {} pages, {} are counted", owned, tier.name, counted)


def _copy(state: _State, copy: Copy) -> None:
    """One copy in flight: what it needs is locked, and its source is where it was."""
    locks = [lock for lock in (copy.device_lock, copy.host_lock) if lock is not None]
    _require(bool(locks) and not any(lock.released for lock in locks), "{} is not locked", copy)
    if copy.source is not None and copy.target is not None:
        _require(len(copy.device_pages) == len(copy.host_pages), "{}: two lengths", copy)
    if copy.source is not None:
        path = nodes_from(copy.node, copy.start) if copy.node is not None else []
        source = [_value(at, copy.source) for at in reversed(path)]
        held = np.concatenate([NO_PAGES, *source]).tolist()
        _require(held == copy.pages_on(copy.source).tolist(), "{}: its source has moved", copy)
    if isinstance(copy, Fetch) and copy.life is state.accounts.root:
        above = [at.key for at in reversed(list(_path(copy.node)))]
        _require(copy.key.tokens.startswith(b"".join(above)), "{}: its parent is another prefix", copy)
        _require(copy.node is not None and end_of(copy.node) == copy.start, "{}: it begins elsewhere", copy)
