"""The engine's desk for pins: ids, their ends, what is refused and with which words, and what it tells of itself."""

import math
from typing import Any

import msgspec
import pytest

from prefixmesh.cache.hash_cache import HashCache
from prefixmesh.cache.no_cache import NoCache
from prefixmesh.cache.pages import PageAllocator
from prefixmesh.cache.pins import PinBudget
from prefixmesh.cache.public import PublicPrefix
from prefixmesh.cache.radix_cache import RadixCache, RadixOptions
from prefixmesh.cache.tier import Tier
from prefixmesh.ids import Fingerprint, Namespace
from prefixmesh.tokens import pack
from prefixmesh.worker import pin_book
from prefixmesh.worker.namespace_adapters import NamespaceAdapters
from prefixmesh.worker.prefix_desk import PrefixDesk
from prefixmesh.worker.prefix_messages import (
    KvWritten,
    ListHotPrefixes,
    ListPins,
    PinPrefix,
    PrefixAnswer,
    PrefixName,
    ReadKv,
    UnpinPrefix,
    WriteKv,
)
from tests.support.cache_kit import NS_A, NS_B, insert_prompt
from tests.support.scheduling import submit_command

PROMPT = (1, 2, 3, 4)


class Desk:
    """A desk over a real tree of one-token pages, and what it answers."""

    def __init__(self, *, pages: int = 40, host_pages: int = 0, budget: PinBudget | None = None) -> None:
        self.allocator = PageAllocator(pages)
        host = PageAllocator(host_pages) if host_pages else None
        options = RadixOptions(block_size=2, host=host, pin_budget=budget or PinBudget())
        self.cache = RadixCache(self.allocator, 1, options)
        self.desk = PrefixDesk(self.cache)
        self.now = 100.0

    def pin(self, pin_id: str = "p", tokens: tuple[int, ...] = PROMPT, **fields: Any) -> PrefixAnswer:
        prefix = PrefixName(NS_A, pack(tokens))
        return self.ask(
            PinPrefix(question=7, pin_id=pin_id, prefix=prefix, owner=fields.pop("owner", "acme"), **fields)
        )

    def unpin(self, pin_id: str) -> PrefixAnswer:
        return self.ask(UnpinPrefix(question=7, pin_id=pin_id))

    def listed(self) -> dict[str, float]:
        """Ids, and when each ends."""
        answer = self.ask(ListPins(question=7))
        return {pin.pin_id: pin.expires_in_s for pin in answer.pins}

    def ask(self, command: PinPrefix | UnpinPrefix | ListPins) -> PrefixAnswer:
        answer = self.desk.handle(command, self.now)
        self.cache.check_invariants()
        self.desk.check_invariants()
        assert answer.question == command.question
        return answer


def test_a_pin_holds_what_is_there_and_then_what_comes() -> None:
    bench = Desk()
    insert_prompt(bench.cache, bench.allocator, [1, 2])
    (pin,) = bench.pin().pins
    assert (pin.pages, pin.held_tokens, pin.missing_tokens, pin.expires_in_s) == (4, 2, 2, 0.0)
    insert_prompt(bench.cache, bench.allocator, [1, 2, 3, 4, 5])
    (pin,) = bench.ask(ListPins(question=1)).pins
    assert (pin.held_tokens, pin.missing_tokens) == (4, 0)
    bench.cache.evict(40)
    assert bench.allocator.free_pages == 36


def test_unpinning_releases_at_once_and_may_be_asked_again() -> None:
    bench = Desk()
    insert_prompt(bench.cache, bench.allocator, PROMPT)
    bench.pin()
    assert [pin.pin_id for pin in bench.unpin("p").pins] == ["p"]
    again = bench.unpin("p")
    assert (again.error, again.pins) == (None, ())
    assert bench.cache.evict(40) == 4


def test_two_ids_of_one_prefix_share_a_pin_and_each_has_its_own_end() -> None:
    """The pin is charged once and stays for the last of them."""
    bench = Desk()
    bench.pin("short", ttl_s=5.0)
    totals = bench.pin("long", ttl_s=20.0).totals
    assert totals is not None
    assert totals.charged_pages == 4
    assert bench.listed() == {"short": 5.0, "long": 20.0}
    bench.now += 6.0
    assert bench.listed() == {"long": 14.0}
    bench.pin("short")
    assert bench.listed() == {"long": 14.0, "short": 0.0}
    bench.unpin("short")
    bench.now += 13.0
    assert bench.listed() == pytest.approx({"long": 1.0})
    bench.now += 2.0
    assert (bench.listed(), len(bench.cache.pins)) == ({}, 0)


def test_the_permanent_one_of_two_ids_keeps_the_pin() -> None:
    bench = Desk()
    bench.pin("for ever")
    bench.pin("a while", ttl_s=1.0)
    bench.now += 1e6
    assert bench.listed() == {"for ever": 0.0}


def test_a_pin_asked_for_again_begins_its_time_anew() -> None:
    bench = Desk()
    bench.pin(ttl_s=10.0)
    bench.now += 9.0
    bench.pin(ttl_s=10.0)
    bench.now += 9.0
    assert bench.listed() == pytest.approx({"p": 1.0})


def test_a_pin_that_the_tree_has_let_go_of_is_not_listed() -> None:
    """A match, of any prompt, ends pins in the tree before the desk is asked anything."""
    bench = Desk()
    bench.pin(ttl_s=1.0)
    version = bench.desk.counts().version
    insert_prompt(bench.cache, bench.allocator, [9], now=bench.now + 2.0)
    counts = bench.desk.counts()
    assert (counts.pins, counts.charged_pages) == (0, 0)
    assert counts.version > version
    bench.desk.check_invariants()


def test_the_loop_lets_go_in_time_where_nobody_asks_anything() -> None:
    bench = Desk()
    bench.pin(ttl_s=1.0)
    bench.desk.expire(bench.now + 0.5)
    assert len(bench.cache.pins) == 1
    bench.desk.expire(bench.now + 1.0)
    assert len(bench.cache.pins) == 0


@pytest.mark.parametrize(
    ("tokens", "fields"),
    [((1, 2, 3, 5), {}), ((1, 2, 3), {}), (PROMPT, {"owner": "evil"}), (PROMPT, {"tier": 1})],
    ids=["other tokens", "a shorter prefix", "another's", "another tier"],
)
def test_an_id_never_comes_to_mean_something_else(tokens: tuple[int, ...], fields: dict[str, Any]) -> None:
    bench = Desk(host_pages=40)
    bench.pin()
    before = bench.ask(ListPins(question=1)).pins
    answer = bench.pin("p", tokens, **fields)
    assert (answer.error, answer.field) == ("invalid", "pin_id")
    assert bench.ask(ListPins(question=1)).pins == before


def test_one_pin_is_told_alone() -> None:
    bench = Desk()
    bench.pin("a")
    bench.pin("b", (5, 6), ttl_s=5.0)
    assert bench.ask(ListPins(question=1, pin_id="b")).pins == bench.ask(ListPins(question=1)).pins[1:]
    bench.now += 6.0
    for unknown in ("b", "c"):
        assert bench.ask(ListPins(question=1, pin_id=unknown)).pins == ()


def test_what_does_not_fit_is_refused_with_the_sums() -> None:
    """Of 40 pages: 12 for all, 6 for one owner."""
    bench = Desk(budget=PinBudget(owner_share=0.15))
    bench.pin("a", (1, 2, 3, 4))
    one = bench.pin("b", (5, 6, 7))
    assert (one.error, one.problem) == (
        "over_budget",
        "pin of owner 'acme': 3 more wanted, 4 used, limit 6 pages per owner",
    )
    bench.pin("c", tuple(range(10, 16)), owner="other")
    answer = bench.pin("d", (7, 8, 9), owner="third")
    assert (answer.error, answer.problem) == (
        "over_budget",
        "pin of owner 'third': 3 more wanted, 10 used, limit 12 pages in all",
    )
    assert set(bench.listed()) == {"a", "c"}


def test_ids_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """One pin may have many, and each takes its place in the book."""
    monkeypatch.setattr(pin_book, "MAX_PIN_IDS", 2)
    bench = Desk()
    bench.pin("a")
    bench.pin("b")
    answer = bench.pin("c")
    assert (answer.error, answer.problem) == ("over_budget", "pin 'c': 2 pin ids are in use, limit 2")
    assert bench.pin("b").error is None


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"ttl_s": -1.0}, "ttl_s"),
        ({"ttl_s": math.nan}, "ttl_s"),
        ({"ttl_s": math.inf}, "ttl_s"),
        ({"tokens": ()}, "tokens"),
        ({"tier": 2}, "tier"),
    ],
)
def test_bad_values_are_refused_by_name(fields: dict[str, Any], field: str) -> None:
    bench = Desk(host_pages=4)
    answer = bench.pin(**fields)
    assert (answer.error, answer.field) == ("invalid", field)
    assert bench.listed() == {}


def test_a_host_pin_wants_a_host_tier() -> None:
    answer = Desk().pin(tier=1)
    assert answer.error == "unsupported"
    assert "no host tier" in answer.problem
    bench = Desk(host_pages=40)
    assert bench.pin(tier=1).pins[0].tier == Tier.HOST
    counts = bench.desk.counts()
    assert (counts.host_charged_pages, counts.charged_pages) == (4, 0)


@pytest.mark.parametrize("cache", [HashCache(PageAllocator(32), 16), NoCache(PageAllocator(32), 16), None])
def test_only_a_radix_cache_pins(cache: HashCache | NoCache | None) -> None:
    desk = PrefixDesk(cache)
    for command in (
        PinPrefix(question=1, pin_id="p", prefix=PrefixName(NS_A, pack(PROMPT)), owner="acme"),
        UnpinPrefix(question=1, pin_id="p"),
        ListPins(question=1),
        ReadKv(question=1, prefix=PrefixName(NS_A, pack(PROMPT)), start_tokens=0, max_bytes=1),
    ):
        answer = desk.handle(command, 0.0)
        assert (answer.error, answer.question) == ("unsupported", 1)
    assert desk.counts().version == 0


def test_the_version_rises_with_every_change_and_rests_without_one() -> None:
    bench = Desk()
    seen = [bench.desk.counts().version]

    def rose() -> bool:
        seen.append(bench.desk.counts().version)
        return seen[-1] > seen[-2]

    bench.pin(ttl_s=10.0)
    assert rose(), "a pin came"
    bench.listed()
    insert_prompt(bench.cache, bench.allocator, [9, 9])
    assert not rose(), "nothing that is pinned came or went"
    insert_prompt(bench.cache, bench.allocator, [1, 2])
    assert rose(), "more of it is held"
    bench.cache.flush()
    assert rose(), "nothing of it is held"
    bench.pin("q", ttl_s=3.0)
    assert rose(), "another id came"
    bench.now += 4.0
    bench.desk.expire(bench.now)
    assert rose(), "an id ended"
    bench.unpin("p")
    assert rose(), "the pin went"


def test_how_much_is_here_may_be_asked_where_no_kv_is_copied() -> None:
    bench = Desk()
    insert_prompt(bench.cache, bench.allocator, [1, 2, 3])
    prefix = PrefixName(NS_A, pack(PROMPT))
    answer = bench.desk.handle(WriteKv(question=3, prefix=prefix, start_tokens=0), bench.now)
    assert answer == PrefixAnswer(question=3, written=KvWritten(held_tokens=3))
    answer = bench.desk.handle(WriteKv(question=3, prefix=prefix, start_tokens=0, kv=b"1"), bench.now)
    assert answer.error == "unsupported"


def test_a_pin_says_whether_it_is_new() -> None:
    bench = Desk()
    assert [bench.pin().made, bench.pin().made, bench.pin("other").made] == [True, False, True]


def test_what_nobody_knows_the_adapter_of_is_not_handed_over() -> None:
    """Its namespace does not tell how to compute it anew."""
    bench = Desk()
    for namespace in (NS_A, NS_B):
        for _ in range(2):
            insert_prompt(bench.cache, bench.allocator, PROMPT, namespace=namespace, now=bench.now)
    question = ListHotPrefixes(question=2, max_prefixes=9, max_tokens=99)
    assert bench.desk.handle(question, bench.now).hot == ()
    bench.desk.note(msgspec.structs.replace(submit_command("r", [1], namespace=NS_B), adapter="digest"))
    (hot,) = bench.desk.handle(question, bench.now).hot
    assert (hot.prefix, hot.hits, hot.adapter) == (PrefixName(NS_B, pack(PROMPT)), 1, "digest")
    bench.desk.note(submit_command("s", [1], public=(PublicPrefix(NS_A, 2, Fingerprint(1)),)))
    assert len(bench.desk.handle(question, bench.now).hot) == 2


def test_namespaces_are_remembered_within_a_bound() -> None:
    adapters = NamespaceAdapters(limit=2)
    adapters.note([NS_A], "a")
    adapters.note([NS_B], "")
    adapters.note([NS_A], "a")
    adapters.note([Namespace(b"c" * 16)], "c")
    assert [adapters.adapter_of(namespace) for namespace in (NS_A, NS_B)] == ["a", None]
    assert len(adapters) == 2
