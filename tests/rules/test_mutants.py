"""The table of `make mutants` fits the code: a guard that moved takes its entry along."""

import ast
import functools

import pytest

from scripts.mutants import ROOT, WHOLE_SUITE, Mutant, TableError, load_table

MUTANTS = load_table()


@functools.cache
def read(file: str) -> tuple[str, str]:
    """A file's text, and what Python reads in it."""
    text = (ROOT / "prefixmesh" / file).read_text(encoding="utf-8")
    return text, ast.dump(ast.parse(text))


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_takes_out_what_is_there(mutant: Mutant) -> None:
    """Every old text is in its file exactly once, and without it the code is other code."""
    text, code = read(mutant.file)
    assert ast.dump(ast.parse(mutant.mutate(text))) != code
    with pytest.raises(TableError, match="out of date"):
        mutant.mutate(text.replace(mutant.old[0], ""))


def test_there_are_enough_and_each_says_why_and_which_test_sees_it() -> None:
    assert len(MUTANTS) >= 15
    assert len({(mutant.file, mutant.old, mutant.new) for mutant in MUTANTS}) == len(MUTANTS)
    for mutant in MUTANTS:
        assert mutant.why
        assert mutant.tests
    for test in {*WHOLE_SUITE, *(test for mutant in MUTANTS for test in mutant.tests)}:
        assert list((ROOT / "tests").glob(test.partition("::")[0])), f"there is no tests/{test}"
