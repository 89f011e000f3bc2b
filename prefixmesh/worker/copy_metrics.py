"""What ``/metrics`` tells of KV that this worker has copied from others, and given to them."""

from collections.abc import Iterator

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from prefixmesh.worker.kv_copies.books import CopyBooks


class CopyMetrics(Collector):
    """The figures of one worker's books."""

    def __init__(self, books: CopyBooks) -> None:
        self._books = books

    def collect(self) -> Iterator[Metric]:
        """Every family, in the order of ``docs/metrics.md``."""
        books = self._books
        tokens = {"copied": books.copied_tokens, "given": books.given_tokens}
        sizes = {"copied": books.copied_bytes, "given": books.given_bytes}
        open_now = {"copied": books.copying, "given": books.giving}
        yield _by_direction(
            CounterMetricFamily, "prefixmesh_kv_copy_tokens", "Tokens whose KV went between workers.", tokens
        )
        yield _by_direction(
            CounterMetricFamily, "prefixmesh_kv_copy_bytes", "Bytes of KV that went between workers.", sizes
        )
        yield _by_direction(GaugeMetricFamily, "prefixmesh_kv_copies_open", "Copies under way.", open_now)
        yield CounterMetricFamily(
            "prefixmesh_kv_copies_failed",
            "Sources that gave less than they were asked for.",
            books.failed_copies,
        )
        yield CounterMetricFamily(
            "prefixmesh_kv_copies_declined",
            "Copies not begun: to compute was quicker, or too many were under way.",
            books.unpaid_copies,
        )
        yield GaugeMetricFamily(
            "prefixmesh_kv_copy_tokens_per_second",
            "Speed of copies from others, a moving average, and a guess before the first.",
            1e3 / books.ms_per_token if books.ms_per_token else 0.0,
        )


def _by_direction(
    kind: type[CounterMetricFamily | GaugeMetricFamily], name: str, documentation: str, values: dict[str, int]
) -> Metric:
    family = kind(name, documentation, labels=["direction"])
    for direction, value in values.items():
        family.add_metric([direction], value)
    return family
