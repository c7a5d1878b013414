"""The list of checks that tests must notice the loss of: each is where the list says."""

import ast
from pathlib import Path

import pytest
from mutate import ROOT, Mutant, mutants, names

EVERY = [mutant for name in names() for mutant in mutants(name)]


@pytest.mark.parametrize("mutant", EVERY, ids=[mutant.what for mutant in EVERY])
def test_a_mutant_can_be_applied(mutant: Mutant) -> None:
    """What it replaces stands once in its file, what comes of it is Python, and its tests are there."""
    text = (ROOT / mutant.file).read_text(encoding="utf-8")
    assert text.count(mutant.old) == 1
    if mutant.file.endswith(".py"):
        ast.parse(text.replace(mutant.old, mutant.new))
    for test in mutant.tests:
        path, _, name = test.partition("::")
        assert Path(ROOT / path).exists(), test
        assert f"def {name.partition('[')[0]}(" in Path(ROOT / path).read_text(encoding="utf-8") or not name, test
