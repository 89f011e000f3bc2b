"""What the rule machines of the tree ask for: prompts of tenants, public ones, and private tails behind public prefixes."""

import functools
import math

from prefixmesh.cache.namespace import tail_namespace
from prefixmesh.ids import Namespace
from tests.support.cache_kit import NS_A, NS_B
from tests.support.cache_machine import all_tokens
from tests.support.naive_tiers import Prompt, Tokens, fingerprint

NS_PUBLIC = Namespace(b"p" * 16)


@functools.cache
def all_prompts(unit: int, max_units: int, block_size: int) -> list[Prompt]:
    """All token sequences, in one of two namespaces, in public, or behind a public prefix."""
    return [prompt for tokens in all_tokens(unit, max_units) for prompt in ways_of(tokens, unit, block_size)]


def ways_of(tokens: Tokens, unit: int, block_size: int) -> list[Prompt]:
    """Where these tokens may be. A tail may belong to a longer prompt, of which no more has been computed yet."""
    ways = [Prompt(where, tokens) for where in (NS_A, NS_A, NS_B, NS_PUBLIC)]
    step = math.lcm(unit, block_size)
    for boundary in (step, 2 * step):
        public = (tokens + (0,) * boundary)[:boundary]
        name = fingerprint((NS_PUBLIC, b"", 0), public, block_size)
        ways += [Prompt(NS_PUBLIC, tokens, boundary, tail_namespace(who, name)) for who in (NS_A, NS_B)]
    return ways
