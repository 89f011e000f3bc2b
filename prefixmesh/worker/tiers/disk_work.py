"""What the disk tier's two threads do: files out of host pages, and pages out of files. They know no index, and nobody waits for them here.

Nothing that goes wrong with a file leaves here but as a job's result. A disk that takes no more is told of once.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from prefixmesh.cache.base import PageIndices
from prefixmesh.tokens import TOKEN_BYTES
from prefixmesh.worker.tiers.disk_files import (
    SUFFIX,
    BadFileError,
    WantedPages,
    put_away,
    read_pages,
    write_run,
)
from prefixmesh.worker.tiers.disk_folder import mark_used, remove
from prefixmesh.worker.tiers.disk_index import FilePart, StoredFile
from prefixmesh.worker.tiers.disk_jobs import DiskPrefix, ReadDone
from prefixmesh.worker.tiers.disk_runs import DiskIdentity, KvRun

logger = logging.getLogger(__name__)

_Bytes = npt.NDArray[np.uint8]


class HostPages(Protocol):
    """Where KV is read from, and what memory for it looks like: ``HostPool``."""

    @property
    def storage(self) -> torch.Tensor:
        """[pages, *page]."""
        ...

    def buffer(self, num_pages: int) -> torch.Tensor:
        """Memory for pages in the same layout, [num_pages, *page]."""
        ...


class NewFile(NamedTuple):
    """A run that is to become a file."""

    file: StoredFile
    run: KvRun
    host_pages: PageIndices


@dataclass(frozen=True, slots=True)
class WriteJob:
    """What the writer does at a time."""

    number: int
    removals: list[str]
    """Files that gave way; before anything is written."""

    files: list[NewFile]
    used: list[str]
    """Files whose times are to tell, afterwards, that they were used: in this order."""


@dataclass(frozen=True, slots=True)
class ReadJob:
    """What the reader does at a time."""

    number: int
    prefix: DiskPrefix


@dataclass(frozen=True, slots=True)
class Written:
    """What became of a ``WriteJob``."""

    number: int
    sizes: list[tuple[StoredFile, int | None]]
    """Bytes of each file; None for one that was not written."""


@dataclass(frozen=True, slots=True)
class Read:
    """What became of a ``ReadJob``."""

    done: ReadDone
    missing: StoredFile | None = None
    """A file that was not there, or not the one that it was."""

    bad: StoredFile | None = None
    """One that was put away, and under which name."""

    bad_name: str = ""

    @property
    def number(self) -> int:
        """The job's."""
        return self.done.number


class DiskWork:
    """Reads and writes one folder. ``write`` is the writer's alone, ``read`` the reader's."""

    def __init__(
        self,
        folder: Path,
        identity: DiskIdentity,
        host: HostPages,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._folder = folder
        self._identity = identity
        self._host = host
        self._rows = _page_bytes(host.storage)
        self._clock = clock
        self.takes_no_more = False
        """The disk is full, gone or read-only: nothing is written any more. Set by the writer; anybody may look."""

    def write(self, job: WriteJob) -> Written:
        """Remove what gave way, write what is new, mark what was used. The calling thread waits for the disk."""
        for name in job.removals:
            remove(self._folder / name)
        sizes = [(new.file, self._write_file(new)) for new in job.files]
        mark_used(self._folder, job.used)
        return Written(job.number, sizes)

    def read(self, job: ReadJob) -> Read:
        """Read a prefix from its start on, up to the first file that is not as it should be."""
        began = self._clock()
        size, prefix = self._identity.layout.page_size, job.prefix
        buffer = self._host.buffer(prefix.size_tokens // size)
        rows = _page_bytes(buffer)
        end_tokens = prefix.start_tokens
        missing = bad = None
        bad_name = ""
        for part in prefix.parts:
            first, last = ((at - prefix.start_tokens) // size for at in (part.start_tokens, part.end_tokens))
            path = self._folder / part.file.name
            try:
                read_pages(path, self._wanted(prefix, part), rows[first:last].reshape(-1).data)
            except FileNotFoundError:
                missing = part.file
                break
            except BadFileError as error:
                logger.warning("disk.bad_file file=%s problem=%s", part.file.name, error)
                bad, bad_name = part.file, put_away(path).name
                break
            except (
                OSError
            ) as error:  # says nothing of what is in the file: no descriptor was left, or no permission
                logger.warning("disk.not_read file=%s problem=%s", part.file.name, error)
                break
            end_tokens = part.end_tokens
        size_tokens = end_tokens - prefix.start_tokens
        done = ReadDone(job.number, size_tokens, buffer if size_tokens else None, self._clock() - began)
        return Read(done, missing, bad, bad_name)

    def _write_file(self, new: NewFile) -> int | None:
        if self.takes_no_more:
            return None
        try:
            kv = self._rows.take(new.host_pages, axis=0)
            stem = new.file.name.removesuffix(SUFFIX)
            return write_run(self._folder, stem, new.run, self._identity, [kv.reshape(-1).data])
        except OSError as error:
            self.takes_no_more = True
            logger.error("disk.takes_no_more folder=%s error=%s", self._folder, error)
        except Exception:  # a bug of ours, or no memory: this file is not written, the next one may be
            logger.exception("disk.not_written file=%s", new.file.name)
        return None

    def _wanted(self, prefix: DiskPrefix, part: FilePart) -> WantedPages:
        key = prefix.key
        is_tail = 0 < key.boundary_tokens <= part.file.start_tokens
        tokens = key.tokens[: part.end_tokens * TOKEN_BYTES]
        return WantedPages(self._identity, key.tail if is_tail else key.namespace, tokens, part.start_tokens)


def _page_bytes(pages: Any) -> _Bytes:
    """A tensor of pages as rows of bytes, the same memory: [pages, bytes of a page]."""
    rows: _Bytes = pages.view(torch.uint8).reshape(len(pages), -1).numpy()
    return rows
