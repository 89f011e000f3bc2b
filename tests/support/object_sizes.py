"""How many bytes an object's own tables take, whatever they are called: what a bound on memory is tried by where no process can be measured.

Everything is counted that can be reached through containers, slots and arrays, once. What can be called is not gone into: a callback leads out
of the object into whatever made it.
"""

import gc
import sys
import types
from collections.abc import Iterable

import msgspec

_OUTSIDE = (type, types.ModuleType, types.FunctionType, types.MethodType, types.BuiltinFunctionType)


def reachable_bytes(roots: Iterable[object]) -> int:
    """Of all that the roots hold, themselves among it. O(what is held)."""
    seen: set[int] = set()
    left = list(roots)
    total = 0
    while left:
        one = left.pop()
        if id(one) in seen or isinstance(one, _OUTSIDE):
            continue
        seen.add(id(one))
        total += sys.getsizeof(one)
        left += gc.get_referents(one)
        if isinstance(one, msgspec.Struct) and not gc.is_tracked(one):
            # Those that the collector is not told of tell it of nothing either.
            left += (getattr(one, name) for name in one.__struct_fields__)
    return total
