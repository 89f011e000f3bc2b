"""Do the tests see it when a guard is missing, of the cache, scheduler, sampling, tickets or health? Takes them out one by one: `make mutants`.

Works on copies of the package and the tests in a temporary folder, one per job; the checkout is never touched. Each mutant of
`mutants.toml` first meets the few tests that are there for it, then, if it survives, the whole cache suite. It is caught when a
test fails or hangs; what catches it must pass on the unmutated copy. Exits 1 when a mutant survives, or nothing can be said.
"""

import argparse
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
TABLE = Path(__file__).with_name("mutants.toml")
COPIED = ("prefixmesh", "tests", "pyproject.toml")
WHOLE_SUITE = (
    "unit/test_pages.py",
    "unit/test_cache_*.py",
    "unit/test_fingerprint.py",
    "unit/test_namespace.py",
    "unit/test_scheduler*.py",
    "contract/test_prefix_cache_contract.py",
    "model/test_*_machine.py",
    "model/test_canary_*.py",
)
"""Cheapest first, relative to tests/."""

CHOSEN_CPU_S = 60
"""Processor seconds after which a mutant's own tests are said to hang: several times what they take. Not seconds on the wall: a
busy machine must not make a mutant look caught."""
WHOLE_CPU_S = 1200
"""The same for the whole suite."""
MEMORY_KIB = 6 * 1024 * 1024
"""Address space of a test run: a mutant that loops for ever may do so by filling a list."""


class TableError(Exception):
    """The table does not fit the code, or a test run could not say anything."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """One guard, and how to take it out."""

    name: str
    file: str
    """Relative to prefixmesh/."""
    old: tuple[str, ...]
    """Texts of the file; each is there once."""
    new: tuple[str, ...]
    """What stands in their places."""
    why: str
    """What the guard is there for."""
    tests: tuple[str, ...]
    """What is expected to catch it, cheapest first: files or node ids, relative to tests/."""

    def mutate(self, text: str) -> str:
        """The file's text without the guard; raises TableError when the table is out of date."""
        mutated = text
        for old, new in zip(self.old, self.new, strict=True):
            count = text.count(old)
            if count != 1:
                raise TableError(
                    f"the table is out of date: {self.name}: {old!r} is {count} times in {self.file}"
                )
            mutated = mutated.replace(old, new)
        try:
            compile(mutated, self.file, "exec")
        except SyntaxError as error:
            raise TableError(f"{self.name} is no Python: {error}") from error
        return mutated


class Stage(NamedTuple):
    """Tests that run together."""

    tests: tuple[str, ...]
    cpu_s: int


WHOLE = Stage(WHOLE_SUITE, WHOLE_CPU_S)


class Verdict(NamedTuple):
    """What became of a mutant."""

    mutant: Mutant
    caught_by: str | None
    """The first failing test, or that a run hung; None when it survived."""
    stage: Stage
    """The run that caught it, or the last that did not."""
    seconds: float


def load_table(path: Path = TABLE) -> list[Mutant]:
    """The mutants, in the table's order; raises TableError for an entry that is not complete."""
    entries = tomllib.loads(path.read_text(encoding="utf-8"))
    mutants = []
    for name, entry in entries.items():
        if entry.keys() != {"file", "old", "new", "why", "tests"}:
            raise TableError(f"{name} must have file, old, new, why and tests, and nothing else")
        old, new = (
            (text,) if isinstance(text, str) else tuple(text) for text in (entry["old"], entry["new"])
        )
        mutants.append(Mutant(name, entry["file"], old, new, entry["why"], tuple(entry["tests"])))
    return mutants


class Workshop:
    """A copy of the package and its tests, in which one mutant at a time lives."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir()
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy2(source, folder / name)
        found = self._python(
            [
                "-c",
                "import prefixmesh, tests.support.cache_kit as kit; print(prefixmesh.__file__, kit.__file__)",
            ]
        )
        if any(not path.startswith(f"{folder}/") for path in found.stdout.split()) or found.returncode:
            raise TableError(f"the copy's tests would test something else: {found.stdout}")

    def run(self, stage: Stage) -> str | None:
        """Run tests up to the first failure; returns it, None when all pass. Raises TableError when pytest cannot run them."""
        paths = [path for test in stage.tests for path in self._expand(test)]
        # Neither conftest.py, which loads torch, nor anything kept from an earlier run.
        options = ["-x", "-q", "-p", "no:cacheprovider", "--noconftest", "--timeout", "0", "-m", "not deep"]
        run = self._python(["-m", "pytest", *options, *paths], stage.cpu_s)
        shutil.rmtree(self._folder / ".hypothesis", ignore_errors=True)
        if run.returncode == 0:
            return None
        if run.returncode == -signal.SIGXCPU:
            return f"a hang: {stage.cpu_s} s of the processor"
        failed = re.search(r"^(?:FAILED|ERROR) tests/(\S+)", run.stdout, re.MULTILINE)
        if run.returncode != 1 or failed is None:
            raise TableError(
                f"pytest ended with {run.returncode}:\n{run.stdout[-3000:]}\n{run.stderr[-1000:]}"
            )
        return failed[1]

    def judge(self, mutant: Mutant, stages: Sequence[Stage]) -> Verdict:
        """Run one stage after the other without the mutant's guard, until one fails."""
        started = time.monotonic()
        path = self._folder / "prefixmesh" / mutant.file
        text = path.read_text(encoding="utf-8")
        self._write(path, mutant.mutate(text))
        try:
            for stage in stages:
                if caught_by := self.run(stage):
                    break
        finally:
            self._write(path, text)
        return Verdict(mutant, caught_by, stage, time.monotonic() - started)

    def _write(self, path: Path, text: str) -> None:
        path.write_text(text, encoding="utf-8")
        # Bytecode is known by the second of a change and the length of the text, which two mutants may share.
        for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
            compiled.unlink()

    def _expand(self, test: str) -> list[str]:
        if "::" in test:
            return [f"tests/{test}"]
        found = sorted((self._folder / "tests").glob(test))
        if not found:
            raise TableError(f"there is no tests/{test}")
        return [str(path.relative_to(self._folder)) for path in found]

    def _python(self, arguments: list[str], cpu_s: int = CHOSEN_CPU_S) -> subprocess.CompletedProcess[str]:
        limits = f'ulimit -S -t {cpu_s}; ulimit -v {MEMORY_KIB}; exec "$@"'
        return subprocess.run(
            ["bash", "-c", limits, "bash", sys.executable, *arguments],
            cwd=self._folder,
            env=os.environ | {"PYTHONPATH": str(self._folder), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )


class Judges:
    """Workshops at work side by side: as many as there are jobs."""

    def __init__(self, folder: Path, jobs: int) -> None:
        self._executor = ThreadPoolExecutor(jobs)
        self._idle: queue.SimpleQueue[Workshop] = queue.SimpleQueue()
        for number in range(jobs):
            self._idle.put(Workshop(folder / str(number)))

    def judge_all(self, mutants: Sequence[Mutant], stages_of: Callable[[Mutant], list[Stage]]) -> bool:
        """Judge the mutants, printing each verdict; whether all were caught. Raises TableError when the unmutated copy fails."""
        tests = tuple(dict.fromkeys(test for mutant in mutants for test in stages_of(mutant)[0].tests))
        try:
            green = self._executor.submit(self._require_green, Stage(tests, WHOLE_CPU_S))
            judged = [self._executor.submit(self._judge, mutant, stages_of(mutant)) for mutant in mutants]
            green.result()
            print(f"the unmutated copy passes ({len(tests)} files or tests)", flush=True)
            verdicts = [report(verdict.result()) for verdict in judged]
            if tests != WHOLE_SUITE and any(
                verdict.stage is WHOLE and verdict.caught_by for verdict in verdicts
            ):
                self._require_green(WHOLE)
        finally:
            self._executor.shutdown(cancel_futures=True)
        return all(verdict.caught_by for verdict in verdicts)

    def _judge(self, mutant: Mutant, stages: Sequence[Stage]) -> Verdict:
        with self._workshop() as workshop:
            return workshop.judge(mutant, stages)

    def _require_green(self, stage: Stage) -> None:
        with self._workshop() as workshop:
            failed = workshop.run(stage)
        if failed:
            raise TableError(f"the unmutated copy fails: {failed}")

    @contextmanager
    def _workshop(self) -> Iterator[Workshop]:
        workshop = self._idle.get()
        try:
            yield workshop
        finally:
            self._idle.put(workshop)


def report(verdict: Verdict) -> Verdict:
    """Print one verdict."""
    mutant = verdict.mutant
    outcome, what = ("caught", verdict.caught_by) if verdict.caught_by else ("SURVIVED", mutant.why)
    late = " (not by its own tests)" * (verdict.stage is WHOLE and verdict.caught_by is not None)
    print(f"{outcome:8}  {mutant.name:36} {verdict.seconds:6.1f} s  {what}{late}", flush=True)
    return verdict


def stages(mutant: Mutant, options: argparse.Namespace) -> list[Stage]:
    """The runs that a mutant must survive."""
    own = Stage(mutant.tests, CHOSEN_CPU_S)
    if options.whole_suite:
        return [WHOLE]
    return [own] if options.own_tests else [own, WHOLE]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", metavar="NAME", help="judge this mutant; may be repeated")
    parser.add_argument("--list", action="store_true", help="print the table and run nothing")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="mutants at a time (2)")
    parser.add_argument(
        "--whole-suite", action="store_true", help="run the whole cache suite on every mutant"
    )
    parser.add_argument("--own-tests", action="store_true", help="never run it: only each mutant's own tests")
    options = parser.parse_args()
    started = time.monotonic()
    try:
        mutants = load_table()
        unknown = set(options.only or ()) - {mutant.name for mutant in mutants}
        if unknown:
            raise TableError(f"no mutants of these names: {', '.join(sorted(unknown))}")
        for mutant in mutants:
            mutant.mutate((ROOT / "prefixmesh" / mutant.file).read_text(encoding="utf-8"))
        mutants = [mutant for mutant in mutants if not options.only or mutant.name in options.only]
        if options.list:
            for mutant in mutants:
                print(f"{mutant.name:36} {mutant.file:24} {mutant.why}")
            return 0
        with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
            caught_all = Judges(Path(folder), options.jobs).judge_all(
                mutants, lambda mutant: stages(mutant, options)
            )
    except TableError as error:
        print(error, file=sys.stderr)
        return 1
    print(
        f"{len(mutants)} mutants, {'all caught' if caught_all else 'NOT all caught'}, {time.monotonic() - started:.0f} s"
    )
    return 0 if caught_all else 1


if __name__ == "__main__":
    sys.exit(main())
