"""Which workers may be sent anything, and why not."""

from typing import Any

import pytest

from prefixmesh.router.endpoint import Endpoint
from prefixmesh.router.registry import WorkerRegistry
from prefixmesh.router.worker_identity import Rates
from tests.support.simulated_fleet import EXPECTED, facts

A, B = Endpoint("127.0.0.1:1"), Endpoint("127.0.0.1:2")


def registry_with(*endpoints: Endpoint) -> WorkerRegistry:
    registry = WorkerRegistry(EXPECTED)
    for endpoint in endpoints:
        registry.add(endpoint)
    return registry


def problem(registry: WorkerRegistry, endpoint: Endpoint) -> str:
    entry = registry.get(endpoint)
    assert entry is not None
    return entry.problem


def test_worker_is_ready_once_it_answered_and_serves() -> None:
    """F11: listed from the start, not ready until it has answered and is healthy."""
    registry = registry_with(A)
    assert "not answered" in problem(registry, A)
    registry.described(A, facts("w"))
    assert "whether it is serving" in problem(registry, A)
    registry.health_changed(A, serving=False)
    assert problem(registry, A) == "says that it is not serving"
    registry.health_changed(A, serving=True)
    assert [entry.endpoint for entry in registry.ready] == [A]


def test_unreachable_worker_is_out_at_once_and_back_when_it_answers() -> None:
    """No request goes to a dead worker, and nobody has to bring it back by hand."""
    registry = registry_with(A)
    registry.described(A, facts("w"))
    registry.health_changed(A, serving=True)
    registry.unreachable(A, "connection refused")
    assert registry.ready == []
    assert problem(registry, A) == "cannot be reached: connection refused"
    registry.described(A, facts("w"))
    registry.health_changed(A, serving=True)
    assert len(registry.ready) == 1


@pytest.mark.parametrize(
    ("difference", "words"),
    [
        ({"revision": "other"}, "another revision"),
        ({"tokenizer_digest": "other"}, "another tokenizer"),
        ({"protocol_version": 99}, "protocol 99"),
        ({"fingerprint_version": 99}, "fingerprint version 99"),
        ({"block_size": 16}, "blocks of 16 tokens, this router of 64"),
    ],
)
def test_worker_that_serves_something_else_is_not_ready(difference: dict[str, Any], words: str) -> None:
    """F33: another revision, tokenizer or protocol never gets a request, and the problem is named."""
    registry = registry_with(A)
    registry.described(A, facts("w", **difference))
    registry.health_changed(A, serving=True)
    assert words in problem(registry, A)
    assert registry.ready == []


def test_two_workers_with_one_id_are_told_apart() -> None:
    """The first keeps the id, the second's problem names the first; when the first is gone, the second takes over."""
    registry = registry_with(A, B)
    for endpoint in (B, A):
        registry.described(endpoint, facts("same"))
        registry.health_changed(endpoint, serving=True)
    assert [entry.endpoint for entry in registry.ready] == [A]
    assert problem(registry, B) == f"has the worker id 'same' that {A} has already; give each worker its own"
    registry.unreachable(A, "gone")
    assert [entry.endpoint for entry in registry.ready] == [B]


def test_adding_twice_is_adding_once_and_news_about_the_removed_are_ignored() -> None:
    """F31: a second add changes nothing; what arrives late about a removed worker does not bring it back."""
    registry = registry_with(A)
    registry.described(A, facts("w"))
    assert registry.add(A) is False
    assert registry.get(A) is not None
    assert problem(registry, A) != "has not answered yet"
    assert registry.remove(A) is True
    assert registry.remove(A) is False
    registry.described(A, facts("w"))
    registry.health_changed(A, serving=True)
    registry.unreachable(A, "late")
    assert (len(registry), registry.ready) == (0, [])


def test_no_worker_error_says_why_of_each() -> None:
    """A caller, and whoever reads the log, learns what is wrong with the workers, up to a few."""
    registry = registry_with(A, B)
    registry.described(A, facts("w", revision="other"))
    message = str(registry.no_worker_error())
    assert "w serves another revision" in message
    assert f"{B} has not answered yet" in message
    many = registry_with(*(Endpoint(f"h:{i}") for i in range(9)))
    assert "and 5 more" in str(many.no_worker_error())
    assert "none is known" in str(registry_with().no_worker_error())


def test_context_is_the_longest_of_the_ready() -> None:
    """A request must fit one of the workers that are ready now."""
    registry = registry_with(A, B)
    assert registry.context_length == 0
    registry.described(A, facts("a", context_length=100))
    registry.described(B, facts("b", context_length=500))
    registry.health_changed(A, serving=True)
    assert registry.context_length == 100
    registry.health_changed(B, serving=True)
    assert registry.context_length == 500


def test_a_worker_that_drains_gets_nothing_new_until_it_says_otherwise() -> None:
    registry = registry_with(A)
    registry.described(A, facts("w"))
    registry.health_changed(A, serving=True)
    assert registry.draining_changed(A, draining=True)
    assert not registry.draining_changed(A, draining=True), "no news"
    assert (registry.ready, "draining" in problem(registry, A)) == ([], True)
    registry.draining_changed(A, draining=False)
    assert len(registry.ready) == 1


def test_a_worker_that_tells_the_same_again_is_no_news() -> None:
    """Thousands of workers tell who they are every second."""
    registry = registry_with(A, B)
    news = registry.follow()
    registry.described(A, facts("w"))
    registry.health_changed(A, serving=True)
    assert [entry.endpoint for entry in news.take()] == [A, B], (
        "who is known already is news to a reader that is new"
    )
    registry.described(A, facts("w", rates=Rates(100.0, 5.0)))
    registry.health_changed(A, serving=True)
    assert news.take() == []
    registry.described(A, facts("w", context_length=77))
    assert registry.context_length == 77
    assert [entry.endpoint for entry in news.take()] == [A]


def test_who_has_an_id_next_has_it_once_the_first_is_removed_and_both_are_news() -> None:
    registry = registry_with(A, B)
    for endpoint in (A, B):
        registry.described(endpoint, facts("same"))
        registry.health_changed(endpoint, serving=True)
    news = registry.follow()
    news.take()
    removed = registry.get(A)
    registry.remove(A)
    assert [entry.endpoint for entry in registry.ready] == [B]
    assert [entry.endpoint for entry in news.take()] == [B], "of those who are known"
    assert removed is not None
    assert removed.ready, "what was sent there may still be settled by what it was"


def test_a_list_of_the_ready_does_not_change_under_who_goes_through_it() -> None:
    registry = registry_with(A, B)
    for name, endpoint in (("a", A), ("b", B)):
        registry.described(endpoint, facts(name))
        registry.health_changed(endpoint, serving=True)
    before = registry.ready
    registry.unreachable(A, "gone")
    assert [entry.endpoint for entry in before] == [A, B]
    assert [entry.endpoint for entry in registry.ready] == [B]


def test_what_a_worker_serves_decides_whether_its_cache_is_of_use() -> None:
    registry = registry_with(A, B)
    registry.described(A, facts("a"))
    registry.described(B, facts("b", tokenizer_digest="other"))
    assert [registry.is_like_us(endpoint) for endpoint in (A, B, Endpoint("nobody"))] == [True, False, False]
