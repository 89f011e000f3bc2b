"""Who takes over what of a worker that leaves."""

from prefixmesh.router.endpoint import Endpoint
from prefixmesh.router.hand_over_plan import Leaving, Taker, share_out

A, B = Endpoint("a:1"), Endpoint("b:1")


def taker(endpoint: Endpoint, *, work_ms: float = 0.0, room: float = 10_000, digest: str = "") -> Taker:
    return Taker(
        endpoint=endpoint,
        work_ms=work_ms,
        room_tokens=room,
        ms_per_token=0.5,
        adapters=[digest] if digest else [],
    )


def hot(*tokens: int) -> list[Leaving]:
    return [Leaving(number, size, ()) for number, size in enumerate(tokens)]


def test_prefixes_are_spread_by_the_traffic_that_comes_with_them() -> None:
    """Equal ones in turn; of unequal ones, whoever has got less takes the next."""
    assert [one.endpoint for one in share_out(hot(100, 100, 100, 100), [taker(A), taker(B)])] == [A, B, A, B]
    assert [one.endpoint for one in share_out(hot(300, 100, 100, 100), [taker(A), taker(B)])] == [A, B, B, B]


def test_busy_worker_takes_less() -> None:
    """Its work counts as that of so many tokens."""
    given = share_out(hot(100, 100, 100), [taker(A, work_ms=99.0), taker(B)])
    assert [one.endpoint for one in given] == [B, B, A]


def test_nobody_takes_more_than_it_has_room_for_and_the_rest_is_left() -> None:
    """The hottest first."""
    given = share_out(hot(600, 600, 300, 500), [taker(A, room=1000), taker(B, room=700)])
    assert [(one.number, one.endpoint) for one in given] == [(0, A), (1, B), (2, A)]


def test_what_another_worker_holds_stays_there() -> None:
    """Unless that one takes nothing itself."""
    held = [Leaving(0, 100, [B]), Leaving(1, 100, [Endpoint("gone:1")])]
    assert [one.number for one in share_out(held, [taker(A), taker(B)])] == [1]


def test_prefix_of_an_adapter_goes_only_where_that_is_known() -> None:
    given = share_out([Leaving(0, 100, (), "d1")], [taker(A), taker(B, work_ms=500.0, digest="d1")])
    assert [one.endpoint for one in given] == [B]
    assert share_out([Leaving(0, 100, (), "d2")], [taker(A), taker(B, digest="d1")]) == []
