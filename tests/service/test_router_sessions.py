"""A caller's session on its way to the decision, over gRPC."""

from tests.support.router_kit import Router, running_router, token_request


async def takers(router: Router, firsts: range, session: str) -> set[str]:
    """Who answers prompts that share nothing, one after the other."""
    answers = [
        await router.generate(token_request([first, *range(199)], session=session)) for first in firsts
    ]
    return {answer.started.worker_id for answer in answers}


async def test_session_goes_to_one_worker_where_the_router_is_set_to() -> None:
    """Three idle workers: one of them gets all of a session; requests without one take turns."""
    async with running_router(3, affinity_ms=1000.0) as router:
        assert len(await takers(router, range(200, 205), "chat 7")) == 1
        assert len(await takers(router, range(210, 215), "")) > 1


async def test_sessions_mean_nothing_by_default() -> None:
    async with running_router(3) as router:
        assert len(await takers(router, range(200, 205), "chat 7")) > 1
