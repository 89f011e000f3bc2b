"""Fake workers copy KV from each other by the desk of real ones: what came gives the answers of what was computed."""

import pytest

from prefixmesh.config import EngineConfig
from prefixmesh.errors import InternalError
from prefixmesh.sim.fake_model import expected_answer, kv_slots
from prefixmesh.sim.fake_pages import FakePages
from prefixmesh.tokens import pack
from prefixmesh.worker.prefix_messages import KvRead, KvWritten, PrefixAnswer, PrefixName, ReadKv, WriteKv
from tests.support.cache_kit import as_pages
from tests.unit.test_sim_fake_engine import COPIES, NAMESPACES, PLAIN, VOCAB, Bench

PROMPT = [7 * i % 50 for i in range(64)]


def ask(bench: Bench, command: ReadKv | WriteKv) -> PrefixAnswer:
    """What a fake engine answers, in its turn."""
    core = bench.engine.core
    told = core.handle(command, bench.time.now())
    while core.has_work:
        told += core.step(bench.time.now())
    core.check_invariants()
    (answer,) = [event for event in told if isinstance(event, PrefixAnswer)]
    return answer


def read(bench: Bench) -> KvRead:
    name = PrefixName(NAMESPACES[0], pack(PROMPT))
    answer = ask(bench, ReadKv(question=1, prefix=name, start_tokens=0, max_bytes=1 << 20))
    assert answer.read is not None
    return answer.read


def write(bench: Bench, kv: bytes) -> KvWritten:
    name = PrefixName(NAMESPACES[0], pack(PROMPT))
    answer = ask(bench, WriteKv(question=2, prefix=name, start_tokens=0, kv=kv))
    assert answer.written is not None
    return answer.written


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("evicted", [0, 32])
def test_what_a_fake_worker_copies_answers_like_what_it_computes(page_size: int, evicted: int) -> None:
    """Also where the device has given half of it up, and the host has it."""
    config = EngineConfig(page_size=page_size, max_total_tokens=256, hicache_ratio=2.0)
    holder, taker = Bench(config, timing=COPIES), Bench(config, timing=PLAIN)
    holder.submit("cold", PROMPT, 1)
    holder.run()
    holder.rest()
    holder.evict(evicted // page_size)
    read_kv = read(holder)
    assert read_kv.held_tokens == len(PROMPT)
    assert write(taker, read_kv.kv).held_tokens == len(PROMPT)
    taker.submit("warm", [*PROMPT, 3], 5)
    taker.run()
    assert taker.cached["warm"] == len(PROMPT)
    assert taker.answers["warm"] == expected_answer(NAMESPACES[0], [*PROMPT, 3], 5, VOCAB)


def test_a_byte_that_went_wrong_gives_a_wrong_answer() -> None:
    """Else no simulation would notice it."""
    config = EngineConfig(max_total_tokens=256)
    holder, taker = Bench(config), Bench(config)
    holder.submit("cold", PROMPT, 1)
    holder.run()
    kv = bytearray(read(holder).kv)
    kv[-1] ^= 1
    write(taker, bytes(kv))
    taker.submit("warm", [*PROMPT, 3], 5)
    taker.run()
    assert taker.answers["warm"] != expected_answer(NAMESPACES[0], [*PROMPT, 3], 5, VOCAB)


def test_without_a_host_tier_there_are_no_pages_of_it() -> None:
    pages = FakePages(kv_slots(8), 2)
    with pytest.raises(InternalError, match="host"):
        pages.read(as_pages([0]), as_pages([1]))
