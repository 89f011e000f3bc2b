"""Where sessions were last."""

import pytest

from prefixmesh.errors import InvalidRequestError
from prefixmesh.ids import Namespace
from prefixmesh.requests import MAX_SESSION_BYTES, GenerateRequest, TextPrompt
from prefixmesh.router.endpoint import Endpoint
from prefixmesh.router.placement import RouteRequest
from prefixmesh.router.policy import PolicyConfig
from prefixmesh.router.sessions import NO_SESSION, Sessions, session_name
from tests.support.simulated_fleet import make_core

A, B = Endpoint("a:1"), Endpoint("b:1")


def test_last_worker_of_a_session_is_known_until_more_recent_ones_fill_the_memory() -> None:
    sessions = Sessions(max_sessions=2)
    sessions.went(1, A)
    sessions.went(2, A)
    sessions.went(1, B)
    sessions.went(3, A)
    assert (sessions.last(1), sessions.last(2), sessions.last(3)) == (B, None, A)
    assert len(sessions) == 2


def test_request_without_a_session_leaves_no_trace() -> None:
    sessions = Sessions()
    sessions.went(NO_SESSION, A)
    assert (len(sessions), sessions.last(NO_SESSION)) == (0, None)


def test_sessions_of_two_namespaces_are_two() -> None:
    """Tenants may use the same names."""
    one, other = Namespace(b"1" * 16), Namespace(b"2" * 16)
    assert session_name(one, "chat 7") == session_name(one, "chat 7")
    assert len({session_name(one, "chat 7"), session_name(other, "chat 7"), session_name(one, "chat 8")}) == 3
    assert session_name(one, "") == NO_SESSION


def takers(affinity_ms: float, session: int) -> list[str]:
    """Where eight requests with new prompts of one session go, in an idle fleet."""
    core = make_core(3, config=PolicyConfig(affinity_ms=affinity_ms))
    rows = []
    for number in range(8):
        fingerprints = [1000 * (number + 1) + at for at in range(5)]
        request = RouteRequest(
            fingerprints=fingerprints,  # type: ignore[arg-type]
            prompt_tokens=320,
            max_tokens=16,
            session=session,
        )
        placement = core.route(request, 0.0)
        rows.append(str(placement.endpoint))
        core.failed(placement, 0.0)
    return rows


def test_session_stays_with_its_worker_where_the_router_is_set_to() -> None:
    """Among idle equals, which take turns otherwise."""
    assert len(set(takers(50.0, session=7))) == 1
    assert len(set(takers(50.0, session=NO_SESSION))) == 3
    assert len(set(takers(0.0, session=7))) == 3, "off by default"


def test_name_that_is_too_long_is_refused_with_the_limit() -> None:
    GenerateRequest(prompt=TextPrompt("a"), session="é" * (MAX_SESSION_BYTES // 2))
    with pytest.raises(InvalidRequestError, match=rf"session.*{MAX_SESSION_BYTES}"):
        GenerateRequest(prompt=TextPrompt("a"), session="é" * (MAX_SESSION_BYTES // 2 + 1))
