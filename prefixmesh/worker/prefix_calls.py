"""Questions about prefixes as a worker's front asks its engine: what was refused comes as the error that callers know."""

from collections.abc import Callable

from prefixmesh.errors import (
    BudgetError,
    InternalError,
    InvalidRequestError,
    NotFoundError,
    PrefixmeshError,
    UnsupportedError,
)
from prefixmesh.worker.engine_client import EngineClient
from prefixmesh.worker.prefix_messages import PrefixAnswer, PrefixCommand


async def ask(engine: EngineClient, make: Callable[[int], PrefixCommand], message: str = "") -> PrefixAnswer:
    """The answer to the command that ``make`` makes with a number; ``message`` is what a field that it names is part of. Raises what the
    engine has refused with, and UnavailableError once it is gone."""
    answer = await engine.ask_prefix(make)
    if answer.error is not None:
        raise _error(answer, message)
    return answer


def _error(answer: PrefixAnswer, message: str) -> PrefixmeshError:
    match answer.error:
        case "invalid":
            field = f"{message}.{answer.field}" if message else answer.field
            return InvalidRequestError(field, answer.problem)
        case "not_found":
            return NotFoundError(answer.problem)
        case "over_budget":
            return BudgetError(answer.problem)
        case "unsupported":
            return UnsupportedError(answer.problem)
        case _:
            return InternalError(answer.problem)
