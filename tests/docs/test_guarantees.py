"""Each sentence of docs/concepts/guarantees.md names a test that exists."""

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
PAGE = TESTS.parent / "docs" / "concepts" / "guarantees.md"
LINK = re.compile(r"`([\w/]+\.py)::(\w+)`")
LINKS = LINK.findall(PAGE.read_text())


@pytest.mark.parametrize(("file", "test"), LINKS)
def test_every_named_test_exists(file: str, test: str) -> None:
    assert re.search(
        rf"^ *(async def|def|class) {test}\(", (TESTS / file).read_text(), re.MULTILINE
    )


def test_every_sentence_names_a_test() -> None:
    """This includes the sentences about what is not guaranteed."""
    items = re.split(r"^- ", PAGE.read_text(), flags=re.MULTILINE)[1:]
    assert len(items) > 30
    assert [item for item in items if not LINK.search(item)] == []
