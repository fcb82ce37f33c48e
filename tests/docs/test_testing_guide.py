"""The tests that the guide shows pass: as a snippet, a test is only defined, and never called."""

import ast
from pathlib import Path

import pytest

from tests.docs.test_snippets import ROOT, blocks_of

DEFINITIONS = (ast.Import, ast.ImportFrom, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
GUIDE = ROOT / "docs" / "guides" / "testing.md"


def definitions_of(page: Path) -> str:
    """Return what the blocks of a page define, without the code that they run."""
    code = "\n".join(block.code for block in blocks_of(page.read_text()) if block.runs)
    tree = compile(
        code,
        str(page),
        "exec",
        ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT,
        dont_inherit=True,
    )
    assert isinstance(tree, ast.Module)
    tree.body = [node for node in tree.body if isinstance(node, DEFINITIONS)]
    return ast.unparse(tree)


def test_the_tests_of_the_guide_pass(pytester: pytest.Pytester) -> None:
    code = definitions_of(GUIDE)
    pytester.makepyfile(code)
    pytester.makeini("[pytest]\nasyncio_mode = auto\n")
    # It replays exported runs, which a reader has and the guide has not.
    result = pytester.runpytest_subprocess("-k", "not stored_runs", "-p", "no:randomly")
    expected = code.count("def test_") - 1
    result.assert_outcomes(passed=expected, deselected=1)
    assert expected >= 5
