"""Stands in for CUDA's streams and events: what is launched on a stream waits until somebody waits for it, and is then done in an order as bad as
its waits allow.

Every stream is a queue. Launching (``index_select`` into a given tensor, ``index_copy_``, ``copy_``) only appends, as a GPU that is busy does. A wait
of the host (``synchronize``) runs the stream it waits for up to its event, and, where a seed says so, other streams as far as they
may go meanwhile: an event that one stream should have waited for and did not is thus found as a wrong byte. Nothing else runs by itself, so that
whoever reads without waiting reads what was there before.

All of it on a CPU's tensors, and on the thread that uses it under ``launching()``.
"""

import contextlib
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

Work = Callable[[], object]


class FakeEvent:
    def __init__(self, cuda: "LazyCuda", blocking: bool = False) -> None:
        assert blocking, "an event that is waited for spins, unless it was made to block"
        self._cuda = cuda
        self.stream: FakeStream | None = None
        self.place = 0

    def record(self, stream: "FakeStream") -> None:
        self.stream, self.place = stream, stream.launched

    def query(self) -> bool:
        return self.stream is None or self.stream.done >= self.place

    def synchronize(self) -> None:
        self._cuda.run_others()
        if self.stream is not None:
            self.stream.run_to(self.place)


@dataclass(eq=False)
class FakeStream:
    name: str
    queue: deque[Work] = field(default_factory=deque)
    launched: int = 0
    done: int = 0

    def append(self, work: Work) -> None:
        self.queue.append(work)
        self.launched += 1

    def wait_event(self, event: FakeEvent) -> None:
        def wait() -> None:
            if event.stream is not None:
                event.stream.run_to(event.place)

        self.append(wait)

    def synchronize(self) -> None:
        self.run_to(self.launched)

    def run_to(self, place: int) -> None:
        while self.done < place:
            work = self.queue.popleft()
            work()
            self.done += 1


class LazyCuda(TorchFunctionMode):
    """In ``torch.cuda``'s place."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seed: int = 0) -> None:
        super().__init__()
        self.compute = FakeStream("compute")
        self.streams = [self.compute]
        self._current = [self.compute]
        self._rng = random.Random(seed)
        self.fails: Sequence[Exception] = ()
        """Raised by the next launches, one each."""
        for name, value in {
            "Stream": self._new_stream,
            "Event": lambda blocking=False: FakeEvent(self, blocking),
            "current_stream": lambda device: self._current[-1],
            "stream": self._on,
            "device": lambda device: contextlib.nullcontext(),
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)

    def run_others(self) -> None:
        """Each stream goes on for as far as a seed says; a wait in it makes it wait."""
        for stream in self._rng.sample(self.streams, len(self.streams)):
            stream.run_to(stream.done + self._rng.randint(0, len(stream.queue)))

    def launch(self, work: Work) -> None:
        """Something the loop that computes asks of the GPU."""
        self.compute.append(work)

    def _new_stream(self, device: object) -> FakeStream:
        self.streams.append(FakeStream(f"side {len(self.streams)}"))
        return self.streams[-1]

    @contextlib.contextmanager
    def _on(self, stream: FakeStream) -> Iterator[None]:
        self._current.append(stream)
        try:
            yield
        finally:
            self._current.pop()

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        stream = self._current[-1]
        launches = func in (torch.Tensor.index_copy_, torch.index_select, torch.Tensor.copy_)
        if stream is self.compute or not launches:
            return func(*args, **kwargs)
        if self.fails:
            error, *self.fails = self.fails
            raise error
        assert func is not torch.index_select or "out" in kwargs, "a result that does not exist yet"
        # As a GPU: what is read is read when its turn comes, where it lies.
        stream.append(lambda: func(*args, **kwargs))
        return kwargs.get("out", args[0])
