"""Which adapter the KV of a namespace is computed with, as the requests told that came last. Pure.

A namespace is made of an adapter's content, and does not tell which: nothing else in a cache says what it takes to compute a prefix anew.
"""

from collections import OrderedDict
from collections.abc import Iterable
from typing import Final

from prefixmesh.ids import Namespace

MAX_NAMESPACES: Final = 8192
"""Those that were used last; each takes some hundred bytes. What is used much is among them."""


class NamespaceAdapters:
    """See the module. Every method is O(1) for each namespace."""

    def __init__(self, limit: int = MAX_NAMESPACES) -> None:
        self._limit = limit
        self._adapters: OrderedDict[Namespace, str] = OrderedDict()
        """Digests by namespace, empty for the base model; the one that was used last is last."""

    def __len__(self) -> int:
        return len(self._adapters)

    def note(self, namespaces: Iterable[Namespace], adapter: str) -> None:
        """A request of this adapter may have KV in these namespaces."""
        for namespace in namespaces:
            self._adapters[namespace] = adapter
            self._adapters.move_to_end(namespace)
        while len(self._adapters) > self._limit:
            self._adapters.popitem(last=False)

    def adapter_of(self, namespace: Namespace) -> str | None:
        """The digest, empty for the base model; None where it is not known any more."""
        return self._adapters.get(namespace)
