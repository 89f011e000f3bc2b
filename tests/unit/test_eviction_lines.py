"""A line of nodes in segments is a line: whatever is put last, first or taken out, the order is a plain list's."""

from hypothesis import given, settings
from hypothesis import strategies as st

from prefixmesh.cache.eviction import LruLine, RankedLine
from prefixmesh.cache.node import TreeNode
from prefixmesh.cache.owners import Payer, Quota

NODES = 7
steps = st.lists(
    st.tuples(st.sampled_from(["last", "refresh", "first", "leave"]), st.integers(0, NODES - 1)), max_size=60
)


def make_nodes() -> list[TreeNode]:
    payer = Payer("", LruLine(), Quota())
    return [TreeNode(None, b"", b"", b"", 0.0, payer) for _ in range(NODES)]


@settings(max_examples=200, derandomize=True)
@given(steps=steps, segment_nodes=st.integers(1, 4))
def test_a_line_in_segments_is_a_list(steps: list[tuple[str, int]], segment_nodes: int) -> None:
    """The next to go, the whole order and the length are the list's; and there are never many segments."""
    line, model, nodes = LruLine(segment_nodes), list[TreeNode](), make_nodes()
    for what, index in steps:
        node = nodes[index]
        known = node in model
        if what == "last":
            line.put_last(node) if known else line.enter(node)
        elif what == "refresh" and known:
            try:
                line.refresh(node)
            except KeyError:
                line.put_last(node)
        elif what == "first" and not known:
            line.put_first(node)
            model.insert(0, node)
            continue
        elif what == "leave" and known:
            line.leave(node)
            model.remove(node)
            continue
        else:
            continue
        if known:
            model.remove(node)
        model.append(node)
        assert list(line) == model
        assert (line.first(), len(line)) == (model[0], len(model))
    assert len(line._segments) <= 2 * len(model) // segment_nodes + 3


def test_a_node_in_an_old_segment_is_found_and_moved_to_the_newest() -> None:
    """The quick way does not know it, and says so; the sure way does."""
    line, nodes = LruLine(segment_nodes=2), make_nodes()
    for node in nodes:
        line.enter(node)
    missed = 0
    for node in nodes:
        try:
            line.refresh(node)
        except KeyError:
            missed += 1
            line.put_last(node)
    assert missed == NODES, "by its turn the last one is in an old segment too"
    assert list(line) == nodes


def test_a_ranked_line_tells_when_a_lower_rank_comes_first() -> None:
    """Whoever keeps payers in order by their first node must hear of it."""
    line, nodes = RankedLine(lambda node: node.hit_count), make_nodes()
    told: list[int] = []
    line.lowered = lambda: told.append(len(line))
    for node, hits in zip(nodes, (5, 5, 7, 3, 4, 3, 1), strict=True):
        node.hit_count = hits
        line.enter(node)
    assert told == [1, 4, 7]
    assert [node.hit_count for node in line] == [1, 3, 3, 4, 5, 5, 7]
    nodes[6].hit_count = 9
    line.put_last(nodes[6])
    assert line.first() is nodes[3]
    assert line.rank(nodes[6]) == 9
