"""What the Makefile expects of the marks of tests."""

from pathlib import Path

TESTS = Path(__file__).parent
MARK = "mark" + ".alone"


def test_a_test_that_runs_alone_is_marked_in_its_own_file() -> None:
    """`make test` looks for the mark in test files; a test marked elsewhere would never run."""
    others = [path for path in TESTS.rglob("*.py") if not path.name.startswith("test_")]
    assert len(others) > 50
    assert [path.name for path in others if MARK in path.read_text()] == []
