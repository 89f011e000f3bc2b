"""One pass of the workload over a fleet, measured: every answer becomes a row.

Each tenant is a lane of its own that waits for an answer before it asks again, and the lanes run side by side. So at most as many requests
run at once as there are tenants, and the time to the first token is the fleet's own and not that of a queue before it.
"""

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from prefixmesh.client import AsyncClient
from prefixmesh.demo.oracle import TenantOracle
from prefixmesh.demo.summary import Row, Summary, summarise
from prefixmesh.demo.workload import MIN_POLICY_TOKENS, Conversation, TenantScript, asks_of
from prefixmesh.errors import ConfigError, InternalError

REQUEST_TIMEOUT_S: Final = 120.0
"""A slow CPU computes such a prompt in a few seconds; longer means that something hangs."""

OnRow = Callable[[Row], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class PassResult:
    """A pass with its rows."""

    rows: tuple[Row, ...]
    summary: Summary


async def run_pass(
    router: str, tenants: Sequence[TenantScript], max_tokens: int, on_row: OnRow
) -> PassResult:
    """Send the whole workload through the router at ``router``; the first request that fails ends the pass with its error."""
    numbers = itertools.count(1)
    rows: list[Row] = []

    def keep(row: Row) -> None:
        rows.append(row)
        on_row(row)

    began = time.monotonic()
    try:
        async with asyncio.TaskGroup() as lanes:
            for tenant in tenants:
                lanes.create_task(_run_lane(router, tenant, max_tokens, numbers, keep))
    except ExceptionGroup as group:
        raise group.exceptions[0] from None
    return PassResult(rows=tuple(rows), summary=summarise(rows, time.monotonic() - began))


async def check_policies(router: str, tenants: Sequence[TenantScript]) -> None:
    """Raise ConfigError when a policy is shorter than the workload promises."""
    async with AsyncClient(router, timeout_s=REQUEST_TIMEOUT_S) as client:
        for tenant in tenants:
            length = len(await client.tokenize(tenant.policy))
            if length < MIN_POLICY_TOKENS:
                raise ConfigError(
                    f"the policy of {tenant.name} has {length} tokens, fewer than {MIN_POLICY_TOKENS}"
                )


async def _run_lane(
    router: str, tenant: TenantScript, max_tokens: int, numbers: "itertools.count[int]", keep: OnRow
) -> None:
    oracle = TenantOracle()
    conversations = [Conversation(tenant.policy, user) for user in tenant.users]
    async with AsyncClient(router, tenant=tenant.name, timeout_s=REQUEST_TIMEOUT_S) as client:
        for ask in asks_of(tenant):
            conversation, number = conversations[ask.user], next(numbers)
            messages = conversation.ask(ask.turn)
            prompt = await client.tokenize(messages)
            answer = await client.generate(messages, temperature=0.0, max_tokens=max_tokens)
            if answer.prompt_tokens != len(prompt) or answer.first_token_s is None:
                raise InternalError(
                    f"request {number}: {answer.prompt_tokens} prompt tokens where {len(prompt)} were sent"
                )
            verdict = oracle.judge(prompt, answer.cached_tokens)
            oracle.remember(prompt, answer.token_ids)
            conversation.answered(ask.turn, answer.text)
            keep(
                Row(
                    number=number,
                    tenant=tenant.name,
                    user=tenant.users[ask.user].name,
                    turn=ask.turn + 1,
                    worker=answer.worker_id,
                    prompt_tokens=answer.prompt_tokens,
                    cached_tokens=answer.cached_tokens,
                    possible_tokens=verdict.possible,
                    leaked_tokens=verdict.leaked,
                    first_token_ms=answer.first_token_s * 1000,
                    prefill_ms=answer.timings.prefill_ms,
                )
            )
