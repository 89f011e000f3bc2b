"""Any order of operations on the router's prefix tree keeps its invariants and gives a naive model's answers."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from prefixmesh.cache.fingerprint import block_fingerprints
from prefixmesh.ids import Fingerprint
from prefixmesh.router.endpoint import Endpoint
from prefixmesh.router.prefix_tree import PrefixTree
from prefixmesh.tokens import pack

MAX_BLOCKS = 6
workers = st.sampled_from([Endpoint(name) for name in "abc"])
prompts = st.lists(st.integers(0, 2), max_size=4).map(tuple)
Prefix = tuple[int, ...]


def names(prompt: Prefix) -> list[Fingerprint]:
    return block_fingerprints(b"n" * 16, pack(prompt), 1)


def prefixes(prompt: Prefix) -> list[Prefix]:
    return [prompt[: end + 1] for end in range(len(prompt))]


class PrefixTreeMachine(RuleBasedStateMachine):
    """The model: a list of prefixes in order of use, each with its set of holders."""

    def __init__(self) -> None:
        super().__init__()
        self.tree = PrefixTree(MAX_BLOCKS)
        self.holders: dict[Prefix, set[Endpoint]] = {}

    @rule(prompt=prompts, worker=workers)
    def record(self, prompt: Prefix, worker: Endpoint) -> None:
        known = sum(worker in self.holders.get(prefix, ()) for prefix in prefixes(prompt))
        assert self.tree.record(names(prompt), worker) == known
        for prefix in reversed(prefixes(prompt)):
            self.holders[prefix] = self.holders.pop(prefix, set()) | {worker}
        while len(self.holders) > MAX_BLOCKS:
            del self.holders[next(iter(self.holders))]

    @rule(prompt=prompts, keep=st.integers(0, 4), worker=workers)
    def forget(self, prompt: Prefix, keep: int, worker: Endpoint) -> None:
        doomed = [
            prefix
            for prefix, holders in self.holders.items()
            if keep < len(prompt) and prefix[: keep + 1] == prompt[: keep + 1] and worker in holders
        ]
        assert self.tree.forget(names(prompt), keep, worker) == len(doomed)
        self.drop(doomed, worker)

    @rule(worker=workers)
    def remove_worker(self, worker: Endpoint) -> None:
        self.tree.remove_worker(worker)
        self.drop([prefix for prefix, holders in self.holders.items() if worker in holders], worker)

    @rule(prompt=prompts)
    def find_matches(self, prompt: Prefix) -> None:
        before = repr(self.tree)
        expected: dict[Endpoint, int] = {}
        for depth, prefix in enumerate(prefixes(prompt), start=1):
            for worker in self.holders.get(prefix, ()):
                if expected.get(worker, 0) == depth - 1:
                    expected[worker] = depth
        assert self.tree.find_matches(names(prompt)) == expected
        assert repr(self.tree) == before

    @invariant()
    def sound(self) -> None:
        self.tree.check_invariants()
        assert len(self.tree) == len(self.holders)
        for name in "abc":
            worker = Endpoint(name)
            count = sum(worker in holders for holders in self.holders.values())
            assert self.tree.count_blocks(worker) == count

    def drop(self, doomed: list[Prefix], worker: Endpoint) -> None:
        for prefix in doomed:
            self.holders[prefix].discard(worker)
            if not self.holders[prefix]:
                del self.holders[prefix]


PrefixTreeMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestPrefixTree = PrefixTreeMachine.TestCase
