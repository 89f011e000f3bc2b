"""Which prefixes are on the disk, in which files, and which files go when there is no room for more. Pure; it opens none.

A file is known by the names of its units (``disk_runs``), so a prompt is looked up in as many steps as it has units, from any token on. Files go in
the order of their use. A use touches a whole path, deepest file first, so that of two that continue each other the later part goes first:
what is left of a prefix is its beginning. Files that this worker cannot serve (another model's, another layout's, bad ones) have no names here, but
they count to the bound and stand in line like all others.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from prefixmesh.errors import InternalError, InvariantError
from prefixmesh.worker.tiers.disk_runs import KvLayout, UnitNames

MAX_FILES: Final = 65_536
"""Each costs some 0.5 kB here and one short read at the next start, which takes seconds with so many. Conversations that grow by a block a turn make
the smallest files, and full size is reached long before with models of any size."""


class StoredFile:
    """One file of the tier. Compared by identity: a file of the same name that comes later is another."""

    __slots__ = ("is_written", "name", "names", "size_bytes", "start_tokens")

    def __init__(
        self,
        name: str,
        size_bytes: int,
        names: Sequence[bytes] = (),
        start_tokens: int = 0,
        *,
        is_written: bool,
    ) -> None:
        self.name = name
        """Of the file, in its folder."""

        self.size_bytes = size_bytes
        self.names = tuple(names)
        """Of its units; none for what cannot be served here."""

        self.start_tokens = start_tokens
        self.is_written = is_written
        """Whether it may be read."""

    def __repr__(self) -> str:
        return f"StoredFile({self.name}, {self.size_bytes} bytes, {len(self.names)} units from token {self.start_tokens})"


class FilePart(NamedTuple):
    """Tokens of a prefix that one file gives: whole pages within the file's."""

    file: StoredFile
    start_tokens: int
    end_tokens: int


class DiskIndex:
    """Files by the units in them, in the order of their use, within a bound of bytes."""

    def __init__(self, layout: KvLayout, max_bytes: int, max_files: int = MAX_FILES) -> None:
        self.layout = layout
        self.max_bytes = max_bytes
        self.total_bytes = 0
        """Of all files, those being written among them."""

        self.stored_tokens = 0
        """That can be found."""

        self._being_written = 0
        """Bytes of files that are, or wait to be."""

        self._max_files = max_files
        self._files: OrderedDict[str, StoredFile] = OrderedDict()
        """By file name, least recently used first."""

        self._units: dict[bytes, tuple[StoredFile, int]] = {}
        """A unit's name: its file, and which of the file's units it is."""

    def __len__(self) -> int:
        return len(self._files)

    def __contains__(self, file: StoredFile) -> bool:
        return self._files.get(file.name) is file

    def find(self, units: UnitNames, from_tokens: int) -> list[FilePart]:
        """What continues a key at token ``from_tokens`` (whole pages) without a gap, in order. O(units)."""
        size = self.layout.unit_tokens
        parts: list[FilePart] = []
        for unit in range(from_tokens // size, len(units.names)):
            file, at = self._units.get(units.names[unit], (None, 0))
            if file is None or not file.is_written:
                break
            if file.start_tokens + at * size != unit * size:
                break  # equal names at different depths: a collision
            end = (unit + 1) * size
            if parts and parts[-1].file is file:
                parts[-1] = parts[-1]._replace(end_tokens=end)
            else:
                parts.append(FilePart(file, max(unit * size, from_tokens), end))
        return parts

    def missing(self, units: UnitNames) -> list[tuple[int, int]]:
        """Runs of units, ``[first, last)`` each, of which no file is there or being written. O(units)."""
        boundary = units.key.boundary_tokens // self.layout.unit_tokens
        runs: list[tuple[int, int]] = []
        for unit, name in enumerate(units.names):
            if name in self._units:
                continue
            first, last = runs[-1] if runs else (-1, -1)
            if last == unit != boundary and last - first < self.layout.run_units:
                runs[-1] = (first, unit + 1)
            else:
                runs.append((unit, unit + 1))
        return runs

    def use(self, units: UnitNames) -> list[str]:
        """Note a use of what is there of a key, and of what is being written; the names of its files, deepest first, as their own times should
        tell. O(units)."""
        used: dict[str, None] = {}
        for name in reversed(units.names):
            file, _ = self._units.get(name, (None, 0))
            if file is not None and file.name not in used:
                used[file.name] = None
                self._files.move_to_end(file.name)
        return list(used)

    def begin(self, file: StoredFile) -> list[StoredFile] | None:
        """Count a file that is to be written, and know its units as being written. Returns those that must go for it, forgotten here already;
        None, changing nothing, when the bound has no room beside the others that are being written. O(files that go)."""
        if self._being_written + file.size_bytes > self.max_bytes:
            return None
        gone = [] if (old := self._files.get(file.name)) is None else [self._forget(old)]
        gone += self._make_room(file.size_bytes, 1)
        self._enter(file)
        self._being_written += file.size_bytes
        return gone

    def finish(self, file: StoredFile, size_bytes: int) -> None:
        """It is written, and has so many bytes."""
        if file not in self:
            return
        self._being_written -= file.size_bytes
        self.total_bytes += size_bytes - file.size_bytes
        file.size_bytes = size_bytes
        file.is_written = True
        self.stored_tokens += self._found_tokens(file)

    def found(self, files: Iterable[StoredFile]) -> list[StoredFile]:
        """Take in what a folder holds, least recently used first; those that must go for the bound, not counted any more. O(files)."""
        for file in files:
            self._enter(file)
            self.stored_tokens += self._found_tokens(file)
        return self._make_room(0, 0)

    def remove(self, file: StoredFile) -> None:
        """Forget a file that is gone, or was not written. Nothing when it is forgotten already. O(its units)."""
        if file in self:
            self._forget(file)

    def put_away(self, file: StoredFile, name: str) -> None:
        """A file turned out bad and is called ``name`` now: it is served no more, and goes before all others. O(its units)."""
        if file not in self:
            return
        self._forget(file)
        bad = StoredFile(name, file.size_bytes, is_written=True)
        if (old := self._files.get(name)) is not None:
            self._forget(old)
        self._enter(bad)
        self._files.move_to_end(name, last=False)

    def check_invariants(self) -> None:
        """Recompute the sums and the table of units; raises InvariantError with the state. O(units)."""
        total = sum(file.size_bytes for file in self._files.values())
        tokens = sum(self._found_tokens(file) for file in self._files.values() if file.is_written)
        writing = sum(file.size_bytes for file in self._files.values() if not file.is_written)
        astray = [
            name
            for name, (file, at) in self._units.items()
            if file not in self or file.names[at : at + 1] != (name,)
        ]
        books = (self.total_bytes, self.stored_tokens, self._being_written)
        if (total, tokens, writing) != books or astray:
            raise InvariantError(
                f"DiskIndex: recomputed {total} bytes, {tokens} tokens, {writing} bytes being written, books {books}, units astray {astray}: {self!r}"
            )

    def __repr__(self) -> str:
        return (
            f"DiskIndex({len(self._files)} files, {self.total_bytes} of {self.max_bytes} bytes, "
            f"{self.stored_tokens} tokens)"
        )

    def _enter(self, file: StoredFile) -> None:
        if file.name in self._files:
            raise InternalError(f"two files of the disk tier are called {file.name}")
        self._files[file.name] = file
        self.total_bytes += file.size_bytes
        for at, name in enumerate(file.names):
            self._units.setdefault(name, (file, at))

    def _forget(self, file: StoredFile) -> StoredFile:
        if file.is_written:
            self.stored_tokens -= self._found_tokens(file)
        else:
            self._being_written -= file.size_bytes
        del self._files[file.name]
        self.total_bytes -= file.size_bytes
        for name in file.names:
            if self._is_found_in(file, name):
                del self._units[name]
        return file

    def _make_room(self, size_bytes: int, files: int) -> list[StoredFile]:
        gone: list[StoredFile] = []
        while self._files and (
            self.total_bytes + size_bytes > self.max_bytes or len(self._files) + files > self._max_files
        ):
            oldest = next((file for file in self._files.values() if file.is_written), None)
            if oldest is None:
                break  # all that is left is being written: the bound is kept again when the next one comes
            gone.append(self._forget(oldest))
        return gone

    def _found_tokens(self, file: StoredFile) -> int:
        return sum(self._is_found_in(file, name) for name in file.names) * self.layout.unit_tokens

    def _is_found_in(self, file: StoredFile, name: bytes) -> bool:
        return self._units.get(name, (None, 0))[0] is file
