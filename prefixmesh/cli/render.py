"""What the command line writes about an answer. Pure text, no terminal."""

import dataclasses
import re
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from prefixmesh.client.answer import Answer

_CONTROL: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""C0 and C1 controls but tab and newline."""


def printable(text: str) -> str:
    """``text`` without control characters: a model's words must not steer the user's terminal."""
    return _CONTROL.sub("", text)


def summary_line(answer: "Answer") -> str:
    """``cached 1,152/1,204 prompt tokens · worker-1 · first token 85 ms``."""
    first = (
        "no token" if answer.first_token_s is None else f"first token {answer.first_token_s * 1000:.0f} ms"
    )
    return f"cached {answer.cached_tokens:,}/{answer.prompt_tokens:,} prompt tokens · {answer.worker_id} · {first}"


def answer_as_dict(answer: "Answer") -> dict[str, Any]:
    """The answer for ``--json``: plain values, times in milliseconds."""
    started = answer.started
    return {
        "text": answer.text,
        "finish_reason": answer.finish_reason,
        "model": started.model,
        "worker_id": started.worker_id,
        "request_id": started.request_id,
        "prompt_tokens": answer.prompt_tokens,
        "cached_tokens": answer.cached_tokens,
        "cached_by_tier": dataclasses.asdict(answer.cached),
        "completion_tokens": answer.completion_tokens,
        "retokenized_tokens": answer.retokenized_tokens,
        "first_token_ms": None if answer.first_token_s is None else round(answer.first_token_s * 1000, 3),
        "total_ms": round(answer.total_s * 1000, 3),
        "worker_timings": dataclasses.asdict(answer.timings),
        "namespace_digest": started.namespace_digest,
        "seed": started.seed,
        "routing": None if started.routing is None else dataclasses.asdict(started.routing),
        "token_ids": list(answer.token_ids),
        "logprobs": [
            {"logprob": one.logprob, "top": [list(pair) for pair in one.top]} for one in answer.logprobs
        ],
    }
