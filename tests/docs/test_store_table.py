"""The documentation's tables of stores match what the code declares, and omit none."""

import msgspec
import pytest

import perdure.stores
from perdure.store import Capabilities
from tests.docs.store_table import BEGIN, COLUMNS, END, PAGE, tables

OPENERS = sorted(set(perdure.stores.__all__) - {"open_store"})


def test_the_tables_are_up_to_date() -> None:
    """If this fails, run `python -m tests.docs.store_table`."""
    _, _, rest = PAGE.read_text().partition(BEGIN)
    assert rest.partition(END)[0] == tables()


def test_every_capability_is_a_column() -> None:
    columns = [column for group in COLUMNS.values() for column in group]
    assert columns == [field.name for field in msgspec.structs.fields(Capabilities)]


@pytest.mark.parametrize("opener", OPENERS)
def test_every_store_is_in_the_tables(opener: str) -> None:
    assert f"`{opener}(" in tables()


def test_every_store_has_a_page() -> None:
    """And every page in the folder is about a store in the tables."""
    pages = {page.name for page in PAGE.parent.glob("*.md")} - {PAGE.name}
    linked = {cell.partition("](")[2].partition(")")[0] for cell in tables().split("|")} - {""}
    assert pages == linked
