"""The rule machine of two tiers, with rescues: what is next to leave the device is saved first, and room is made on the host for that."""

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from prefixmesh.cache.node import TreeNode
from prefixmesh.cache.tier import Tier
from prefixmesh.cache.transfers import Copy as CopyInFlight
from tests.support.naive_tiers import Copy, Prefix, prompt_of
from tests.support.tier_machine import Job, TierMachine
from tests.support.tree_reader import Place, nodes_of, read_tree


class RescuingMachine(TierMachine):
    """What of the host goes for a rescue is taken from the cache, if it was right that it went; all else is foretold."""

    def __init__(self) -> None:
        super().__init__()
        self.kept_at = 0
        self.cold: dict[CopyInFlight, list[Prefix]] = {}

    @rule(data=st.data())
    def keep(self, data: st.DataObject) -> None:
        """Somebody waits for room: what there is of his prompt goes last, the rest of the edge in which that ends with it."""
        self.keep_some(data)

    def keep_some(self, data: st.DataObject) -> None:
        """The same for the cache and the model."""
        prompt = self.draw_prompt(data)
        self.cache.transfers.keep(prompt.key())
        path = prompt.upto(self.model.anywhere(prompt)).prefixes(self.unit)
        places = read_tree(self.cache)
        last = places[path[-1]].node if path else None
        self.model.use([*path, *(p for p, place in places.items() if place.node is last and p not in path)])
        self.kept_at = self.model.clock

    @precondition(lambda self: self.kept_at and self.model.line(Tier.DEVICE))
    @rule(data=st.data(), pages=st.integers(1, 8))
    def rescue(self, data: st.DataObject, pages: int) -> None:
        """Something that goes from the device next, and is nowhere else, is saved."""
        self.make_way()
        if data.draw(st.booleans()):
            self.keep_some(data)
        going = self.cache.transfers.next_to_go(pages)
        before = read_tree(self.cache)
        here = {prefix for prefix, place in before.items() if place.node in going}
        line = self.model.line(Tier.DEVICE)
        assert here == set(line[: len(here)])
        assert len(here) >= min(pages, len(line))
        ends = {node: prefixes[-1] for node, prefixes in nodes_of(self.cache)}
        alone = [node for node in going if not node.host_pages and self.is_beside_the_host(node)]
        if not alone:
            return
        node = data.draw(st.sampled_from(alone))
        if not self.is_being_offloaded(ends[node]):
            self.begin_rescue(node, ends[node], dict.fromkeys(going))

    def is_beside_the_host(self, node: TreeNode) -> bool:
        """Whether the host has what stands before it: then room is made for it in one go."""
        return node.parent is not None and (node.parent.parent is None or bool(node.parent.host_pages))

    def begin_rescue(self, node: TreeNode, end: Prefix, going: dict[TreeNode, None]) -> None:
        """Begin it, follow what it made of the host, and foretell what leaves the device with it."""
        model, prompt = self.model, prompt_of(end)
        wanted, path = model.to_copy(Tier.DEVICE, prompt), prompt.prefixes(self.unit)
        there = path[: len(path) - len(wanted)]
        cold = self.cold_end(path)
        model.lock(Tier.HOST, there)
        before, free = read_tree(self.cache), self.host_pool.free_pages
        job = self.cache.transfers.begin_rescue(node, going)
        room = 0 if job is None else len(job.host_pages)
        self.left_pages += len(wanted) - room
        assert self.cache.transfers.left_pages == self.left_pages
        gone = self.adopt_host(before, going, end)
        assert not gone or free < len(wanted)
        if job is None:
            model.release(Tier.HOST, there, model.epoch)
            return
        if room == len(wanted):
            self.cold[job] = cold
        locked = {Tier.DEVICE: path[: len(there) + room], Tier.HOST: there}
        model.lock(Tier.DEVICE, locked[Tier.DEVICE])
        self.fly(Copy(Tier.DEVICE, Tier.HOST, wanted[:room], locked, model.epoch), job)
        self.note("a rescue began")

    def cold_end(self, path: list[Prefix]) -> list[Prefix]:
        """Of a path, deepest first, what was used when its end was, and nobody holds."""
        on, protected = self.model.on[Tier.DEVICE], self.model.protected(Tier.DEVICE)
        cold: list[Prefix] = []
        for prefix in reversed(path):
            if prefix in protected or on[prefix] != on[path[-1]]:
                break
            cold.append(prefix)
        return cold

    def adopt_host(
        self, before: dict[Prefix, Place], going: dict[TreeNode, None], end: Prefix
    ) -> set[Prefix]:
        """What has gone from the host goes from the model: copies of what the device has, or what was used before ``keep``."""
        model = self.model
        stayed = {p for p, place in read_tree(self.cache).items() if place.page(Tier.HOST) is not None}
        gone = model.on[Tier.HOST].keys() - stayed
        assert gone.isdisjoint(model.protected(Tier.HOST))
        lost = {prefix for prefix in gone if prefix not in model.on[Tier.DEVICE]}
        shed = {prefix for prefix in gone - lost if before[prefix].node not in going}
        newcomer = (model.rank(end), self.kept_at)
        assert all((model.rank(p), model.on[Tier.HOST][p]) < newcomer for p in gone - shed)
        cut = self.cut_of(gone - lost, before, stayed)
        for prefix in gone:
            model.forget(Tier.HOST, prefix)
        if cut is not None:
            prompt = prompt_of(cut)
            model.use(prompt.upto(len(prompt.tokens) - self.unit).prefixes(self.unit), [Tier.DEVICE])
        self.note("a copy was shed", bool(shed))
        self.note("a rescue pushed out what was older", bool(lost))
        return gone

    def cut_of(self, gone: set[Prefix], before: dict[Prefix, Place], stayed: set[Prefix]) -> Prefix | None:
        """Where a copy was cut that the device has too: the first prefix that has gone of a node whose front has stayed."""
        for prefix in sorted(gone, key=lambda p: len(p[1])):
            node = before[prefix].node
            if any(before[p].node is node for p in stayed & before.keys()):
                return prefix
        return None

    def note_end(self, job: Job, arrived: bool, already: list[Prefix]) -> None:
        super().note_end(job, arrived, already)
        cold, model = self.cold.pop(job.job, []), self.model
        if not arrived or job.copy.epoch != model.epoch:
            return
        for prefix in cold:
            on_both = all(prefix in model.on[tier] for tier in Tier)
            if not on_both or prefix in model.protected(Tier.DEVICE) or self.goes_on_there(prefix):
                return
            model.forget(Tier.DEVICE, prefix)
            self.note("a rescue gave up its pages")

    def goes_on_there(self, prefix: Prefix) -> bool:
        """Whether the device has anything behind it."""
        length = len(prefix[1])
        behind = (p for p in self.model.on[Tier.DEVICE] if len(p[1]) > length)
        return any(prompt_of(p).prefix(length) == prefix for p in behind)
