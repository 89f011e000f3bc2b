"""What one life of a worker has copied from others and given to them, and how long that takes: for reports, ``Describe`` and metrics. Pure."""

from prefixmesh.worker.kv_copies.layout import CopyLayout
from prefixmesh.worker.kv_copies.rates import CopyRates


class CopyBooks:
    """Owned by the front's event loop. Counts only rise, but for ``copying`` and ``giving``."""

    def __init__(self) -> None:
        self.layout: CopyLayout | None = None
        """How KV lies here; None until ``open``, and where it cannot be copied."""

        self.rates: CopyRates | None = None
        """None as long as ``layout`` is."""

        self.copied_tokens = self.copied_bytes = 0
        self.given_tokens = self.given_bytes = 0
        self.failed_copies = 0
        """Sources that gave less than was asked of them, for whatever reason."""

        self.unpaid_copies = 0
        """Copies that were not begun, because computing was quicker or too many were under way."""

        self.copying = 0
        """Copies from others under way."""

        self.giving = 0
        """Streams to others under way."""

    def open(self, layout: CopyLayout | None) -> None:
        """The engine has told how its KV lies."""
        self.layout = layout
        self.rates = None if layout is None else CopyRates(layout.page_bytes / layout.page_size)

    @property
    def digest(self) -> str:
        """Of the layout; empty without one."""
        return "" if self.layout is None else self.layout.digest

    @property
    def ms_per_token(self) -> float:
        """To copy a token's KV from another worker; 0 where that cannot be."""
        return 0.0 if self.rates is None else self.rates.ms_per_token

    def copied(self, tokens: int, size_bytes: int) -> None:
        """Some KV came, and is in the cache now."""
        self.copied_tokens += tokens
        self.copied_bytes += size_bytes

    def given(self, tokens: int, size_bytes: int) -> None:
        """Some KV was sent to another worker."""
        self.given_tokens += tokens
        self.given_bytes += size_bytes
