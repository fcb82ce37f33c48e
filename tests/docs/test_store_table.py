"""The documentation's table of stores says what the code declares, and leaves none out."""

import pytest

import perdure.stores
from tests.docs.store_table import BEGIN, END, PAGE, table

OPENERS = sorted(set(perdure.stores.__all__) - {"open_store"})


def test_the_table_is_up_to_date() -> None:
    """If it is not: python -m tests.docs.store_table."""
    _, _, rest = PAGE.read_text().partition(BEGIN)
    assert rest.partition(END)[0] == table()


@pytest.mark.parametrize("opener", OPENERS)
def test_every_store_is_in_the_table(opener: str) -> None:
    assert f"`{opener}(" in table()


def test_every_page_of_a_store_is_there() -> None:
    """And every page beside the table is about a store in it."""
    pages = {page.name for page in PAGE.parent.glob("*.md")} - {PAGE.name}
    linked = {cell.partition("](")[2].partition(")")[0] for cell in table().split("|")} - {""}
    assert pages == linked
