"""The memory of answers' ids: bounded by bytes, least recently used first out, and exact about whose answer it is."""

import itertools
import random
import tracemalloc

from prefixmesh.ids import Namespace
from prefixmesh.text.answer_memory import AnswerMemory, HistoryDigest, answer_key
from prefixmesh.text.ids_memory import ENTRY_OVERHEAD_BYTES

NAMESPACE = Namespace(b"n" * 16)


def _key(index: int) -> bytes:
    return answer_key(NAMESPACE, b"history", str(index))


def test_what_was_remembered_is_recalled() -> None:
    memory = AnswerMemory(10_000)
    memory.remember(_key(1), b"abcd")
    assert memory.recall(_key(1)) == b"abcd"
    assert memory.recall(_key(2)) is None


def test_remembering_again_replaces() -> None:
    memory = AnswerMemory(10_000)
    memory.remember(_key(1), b"a" * 400)
    memory.remember(_key(1), b"b" * 4)
    assert memory.recall(_key(1)) == b"bbbb"
    assert (len(memory), memory.used_bytes) == (1, 4 + ENTRY_OVERHEAD_BYTES)


def test_the_least_recently_used_leaves_first() -> None:
    memory = AnswerMemory(3 * (ENTRY_OVERHEAD_BYTES + 4))
    for index in range(3):
        memory.remember(_key(index), b"abcd")
    memory.recall(_key(0))
    memory.remember(_key(3), b"abcd")
    assert [memory.recall(_key(index)) is not None for index in range(4)] == [True, False, True, True]


def test_an_answer_larger_than_the_memory_is_not_kept_and_drives_nobody_out() -> None:
    memory = AnswerMemory(1000)
    memory.remember(_key(1), b"abcd")
    memory.remember(_key(2), bytes(2000))
    assert memory.recall(_key(1)) == b"abcd"
    assert memory.recall(_key(2)) is None


def test_bytes_never_exceed_the_bound_and_are_counted_exactly() -> None:
    rng = random.Random(5)
    memory = AnswerMemory(5000)
    sizes: dict[bytes, int] = {}
    for _ in range(2000):
        key, size = _key(rng.randrange(40)), rng.randrange(0, 1500)
        memory.remember(key, bytes(size))
        sizes[key] = size
        assert memory.used_bytes <= 5000
    kept = [key for key in map(_key, range(40)) if memory.recall(key) is not None]
    assert memory.used_bytes == sum(sizes[key] + ENTRY_OVERHEAD_BYTES for key in kept)
    assert len(memory) == len(kept)
    assert repr(memory) == f"<AnswerMemory {len(kept)} entries | {memory.used_bytes} of 5000 bytes>"


def test_the_bound_holds_for_real_memory() -> None:
    bound = 2 * 2**20
    tracemalloc.start()
    try:
        memory = AnswerMemory(bound)
        for index in range(20_000):
            memory.remember(_key(index), bytes(4 * (index % 100)))
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(memory) > 1000
    assert used <= 1.15 * bound


def test_keys_differ_when_namespace_history_or_answer_do() -> None:
    """F46: also where the pieces, put together, would read the same."""
    words = ("", "a", "b", "ab", "ba", "aba")
    keys = {
        answer_key(Namespace(namespace.encode()), history.encode(), answer)
        for namespace, history, answer in itertools.product(words, repeat=3)
    }
    assert len(keys) == len(words) ** 3


def test_how_a_history_is_cut_into_pieces_makes_no_difference() -> None:
    whole, pieces = HistoryDigest(), HistoryDigest()
    whole.add("Hello, 世界")
    for char in "Hello, 世界":
        pieces.digest()
        pieces.add(char)
    assert whole.digest() == pieces.digest()
    pieces.add("!")
    assert whole.digest() != pieces.digest()
