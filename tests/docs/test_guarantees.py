"""Each sentence of docs/concepts/guarantees.md stands on a test that is there."""

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
PAGE = TESTS.parent / "docs" / "concepts" / "guarantees.md"
LINKS = re.findall(r"`([\w/]+\.py)::(\w+)`", PAGE.read_text())


@pytest.mark.parametrize(("file", "test"), LINKS)
def test_every_guarantee_has_its_test(file: str, test: str) -> None:
    """A promise without a test is not made."""
    assert re.search(rf"def {test}\(", (TESTS / file).read_text())


def test_there_are_guarantees() -> None:
    """The page was found and read."""
    assert len(LINKS) > 15
