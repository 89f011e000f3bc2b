"""How a step's prompt tokens are shared out among the prompts that are being computed. Pure arithmetic.

Half of the step belongs to the prompt that was admitted first, so that it always gets on; the rest goes to whoever has least
left, so that a short prompt does not wait for the whole of a long one before it. What nobody needs of one half falls to the other.
"""

from collections.abc import Sequence


def share_out(remaining: Sequence[int], budget: int) -> list[int]:
    """How many tokens of each prompt a step of ``budget`` tokens computes, given how many each has left, in order of admission.

    The first one's share is at least half of the budget or all that it has left, the sum is the budget or all there is. O(n log n).
    """
    sizes = [0] * len(remaining)
    if not sizes:
        return sizes
    sizes[0] = min(remaining[0], (budget + 1) // 2)
    left = budget - sizes[0]
    for index in sorted(
        range(len(remaining)), key=remaining.__getitem__
    ):  # stable: the older of equals first
        more = min(remaining[index] - sizes[index], left)
        sizes[index] += more
        left -= more
        if not left:
            break
    return sizes


def would_get_on(remaining: Sequence[int], newcomer: int, budget: int) -> bool:
    """Whether a prompt with ``newcomer`` tokens to compute would get any of the step beside the others. Admitted without, it would
    only sit on pages."""
    return share_out([*remaining, newcomer], budget)[-1] > 0
