"""What is refused before it is queued: requests that no step could ever serve, each with the field and the limit. Pure.

The front has checked most of it already, with the model's limits; here is the last word, since only the engine knows its pool.
"""

from prefixmesh import tokens
from prefixmesh.worker.messages import Refused, Submit


def find_refusal(command: Submit, *, token_limit: int, vocab_size: int) -> Refused | None:
    """Why ``command`` can never be served; None when it can. ``token_limit`` bounds prompt and answer together. O(prompt)."""
    fault = _prompt_fault(command, token_limit, vocab_size) or _answer_fault(command, vocab_size)
    return None if fault is None else Refused(request_id=command.request_id, field=fault[0], problem=fault[1])


def _prompt_fault(command: Submit, limit: int, vocab_size: int) -> tuple[str, str] | None:
    prompt_tokens, max_tokens = tokens.count(command.tokens), command.sampling.max_tokens
    if not prompt_tokens:
        return "prompt", "the prompt must not be empty"
    if prompt_tokens > limit:
        return "prompt", f"at most {limit} tokens allowed, got {prompt_tokens}"
    if prompt_tokens + max_tokens > limit:
        return "sampling.max_tokens", (
            f"at most {limit - prompt_tokens} allowed for a prompt of {prompt_tokens} tokens, got {max_tokens}"
        )
    if int(tokens.unpack(command.tokens).max()) >= vocab_size:
        return "tokens.ids", _beyond_vocabulary(vocab_size)
    return None


def _answer_fault(command: Submit, vocab_size: int) -> tuple[str, str] | None:
    max_tokens, resumed_tokens = command.sampling.max_tokens, tokens.count(command.resumed)
    if resumed_tokens > max_tokens:
        return (
            "resumed_output",
            f"at most max_tokens, {max_tokens}, allowed, got {resumed_tokens} tokens",
        )
    if resumed_tokens and int(tokens.unpack(command.resumed).max()) >= vocab_size:
        return "resumed_output", _beyond_vocabulary(vocab_size)
    if max(command.sampling.bias_ids, default=0) >= vocab_size:
        return "sampling.logit_bias", _beyond_vocabulary(vocab_size)
    return None


def _beyond_vocabulary(vocab_size: int) -> str:
    return f"ids must be below the vocabulary's size, {vocab_size}"
