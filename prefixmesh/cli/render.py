"""What the command line writes about an answer. Pure text, no terminal."""

import dataclasses
import re
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from prefixmesh.client.answer import Answer, Branch, CachedTokens

_CONTROL: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""C0 and C1 controls but tab and newline."""


def printable(text: str) -> str:
    """``text`` without control characters: a model's words must not steer the user's terminal."""
    return _CONTROL.sub("", text)


def summary_line(answer: "Answer") -> str:
    """``cached 1,152/1,204 prompt tokens, 1,024 of them on the host · 94 % of prefill saved · worker-1 · first token 85 ms``.

    Of tiers below the device, and of what another worker gave, only what had some is named. The saving is of all arithmetic; it is left out where there is none, or
    the server is too old to tell.
    """
    first = (
        "no token" if answer.first_token_s is None else f"first token {answer.first_token_s * 1000:.0f} ms"
    )
    parts = [f"cached {answer.cached_tokens:,}/{answer.prompt_tokens:,} prompt tokens{_below(answer.cached)}"]
    # Rounded down: one token is always computed, and 100 % would be a lie.
    saved = 0 if answer.prefill_saved is None else int(100 * answer.prefill_saved.total)
    if saved:
        parts.append(f"{saved} % of prefill saved")
    parts += [answer.worker_id, first]
    if answer.interruptions:
        times = "once" if answer.interruptions == 1 else f"{answer.interruptions} times"
        parts.append(f"interrupted {times}, and carried on elsewhere")
    return " · ".join(parts)


def _below(cached: "CachedTokens") -> str:
    """What did not lie on the device before; empty where all did."""
    places = (
        ("on the host", cached.host),
        ("on the disk", cached.disk),
        ("copied from another worker", cached.peer),
    )
    told = [f"{tokens:,} of them {place}" for place, tokens in places if tokens]
    return "".join(f", {one}" for one in told)


def answer_as_dict(answer: "Answer") -> dict[str, Any]:
    """The answer for ``--json``: plain values, times in milliseconds."""
    started = answer.started
    return {
        "model": started.model,
        "worker_id": started.worker_id,
        "request_id": started.request_id,
        "prompt_tokens": answer.prompt_tokens,
        "cached_tokens": answer.cached_tokens,
        "cached_by_tier": dataclasses.asdict(answer.cached),
        "prefill_saved": None if answer.prefill_saved is None else dataclasses.asdict(answer.prefill_saved),
        "completion_tokens": answer.completion_tokens,
        "retokenized_tokens": answer.retokenized_tokens,
        "interruptions": answer.interruptions,
        "first_token_ms": None if answer.first_token_s is None else round(answer.first_token_s * 1000, 3),
        "total_ms": round(answer.total_s * 1000, 3),
        "worker_timings": dataclasses.asdict(answer.timings),
        "namespace_digest": started.namespace_digest,
        "adapter_digest": started.adapter_digest,
        "seed": started.seed,
        "routing": None if started.routing is None else dataclasses.asdict(started.routing),
        **_branch_as_dict(answer.branches[0]),
        "branches": [_branch_as_dict(branch) for branch in answer.branches],
    }


def _branch_as_dict(branch: "Branch") -> dict[str, Any]:
    return {
        "text": branch.text,
        "finish_reason": branch.finish_reason,
        "token_ids": list(branch.token_ids),
        "logprobs": [
            {"logprob": one.logprob, "top": [list(pair) for pair in one.top]} for one in branch.logprobs
        ],
    }
