"""Reading a worker's figures as Prometheus does: over HTTP, with the library's own parser."""

import asyncio
import urllib.error
import urllib.request
from collections.abc import Iterable
from dataclasses import dataclass

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families


@dataclass(frozen=True)
class Page:
    """One scrape."""

    text: str

    def families(self) -> Iterable[Metric]:
        return text_string_to_metric_families(self.text)

    def samples(self) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
        """Every value by name and labels; asserts that none is told twice."""
        found: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        for family in self.families():
            for sample in family.samples:
                key = (sample.name, tuple(sorted(sample.labels.items())))
                assert key not in found, f"{key} twice"
                found[key] = sample.value
        return found

    def value(self, name: str, **labels: str) -> float:
        return self.samples()[name, tuple(sorted(labels.items()))]

    def by(self, name: str, label: str) -> dict[str, float]:
        """The values of a metric with one label."""
        return {
            labels[0][1]: v
            for (n, labels), v in self.samples().items()
            if n == name and labels[0][0] == label
        }


async def scrape(url: str) -> Page:
    status, body = await fetch(url)
    assert status == 200, body
    return Page(body)


async def fetch(url: str, headers: dict[str, str] | None = None, method: str = "GET") -> tuple[int, str]:
    """Status and body."""
    return await asyncio.to_thread(_fetch, urllib.request.Request(url, headers=headers or {}, method=method))


def _fetch(request: urllib.request.Request) -> tuple[int, str]:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=10) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()
