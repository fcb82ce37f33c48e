"""Each sentence of docs/concepts/guarantees.md stands on a test that is there."""

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
PAGE = TESTS.parent / "docs" / "concepts" / "guarantees.md"
LINK = re.compile(r"`([\w/]+\.py)::(\w+)`")
LINKS = LINK.findall(PAGE.read_text())


@pytest.mark.parametrize(("file", "test"), LINKS)
def test_every_guarantee_has_its_test(file: str, test: str) -> None:
    """A promise without a test is not made."""
    assert re.search(
        rf"^ *(async def|def|class) {test}\(", (TESTS / file).read_text(), re.MULTILINE
    )


def test_every_sentence_names_a_test() -> None:
    """What is said is held, also what is said not to be guaranteed."""
    items = re.split(r"^- ", PAGE.read_text(), flags=re.MULTILINE)[1:]
    assert len(items) > 30
    assert [item for item in items if not LINK.search(item)] == []
