"""Cursors, ranges of queue names and pages: what all searches have in common."""

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.errors import InvalidArgument
from perdure.store import Query, RunSummary
from perdure.stores._searching import (
    Position,
    SearchResult,
    check_query,
    find,
    is_counted_by_index,
    page_of,
    queue_ranges,
    read_cursor,
)

NOON = datetime(2030, 1, 1, 12, tzinfo=UTC)
NAMES = st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=4)


def run(id: str, minutes: int = 0) -> RunSummary:
    at = NOON + timedelta(minutes=minutes)
    return RunSummary(id, at, created_at=at - timedelta(days=1))


@given(NAMES, NAMES, NAMES)
def test_the_ranges_of_queue_names_are_exact(name: str, prefix: str, after: str) -> None:
    """A name is in one of them if it has the prefix, comes after, and is not a system queue."""
    in_range = [
        low <= name and (high is None or name < high) for low, high in queue_ranges(prefix, after)
    ]
    is_shown = prefix.startswith("~") or not name.startswith("~")
    expected = bool(name) and name.startswith(prefix) and name > after and is_shown
    assert sum(in_range) == expected


def test_a_cursor_leads_to_a_position() -> None:
    """Also for an id that contains spaces."""
    page = page_of(Query(), SearchResult([run("a b c")]), 1)
    assert read_cursor(page.cursor) == Position(NOON, "a b c")


def test_the_cursor_of_a_search_by_tag_has_the_time_of_creation() -> None:
    """Its pages are ordered by creation."""
    page = page_of(Query(tags=("a=1",)), SearchResult([run("x")]), 1)
    assert read_cursor(page.cursor) == Position(NOON - timedelta(days=1), "x")


def test_a_page_that_ended_early_says_how_far_it_looked() -> None:
    """A page that is not full may have a cursor all the same."""
    page = page_of(Query(), SearchResult([run("x")], Position(NOON, "y")), 50)
    assert page.searched_until == NOON
    assert read_cursor(page.cursor) == Position(NOON, "y")


def test_the_last_page_has_no_cursor() -> None:
    """There is nothing more."""
    page = page_of(Query(), SearchResult([run("x")]), 50)
    assert (page.cursor, page.searched_until) == (None, None)


@pytest.mark.parametrize("cursor", ["", "x", "2030-01-01T00:00:00Z", "x y", 7])
def test_a_bad_cursor_is_refused(cursor: object) -> None:
    """Nothing is searched from a place that does not exist."""
    with pytest.raises(InvalidArgument):
        read_cursor(cursor)  # type: ignore[arg-type]


@given(st.lists(st.tuples(NAMES, st.integers(0, 3)), unique_by=lambda pair: pair[0]), st.booleans())
def test_pages_contain_every_run_once_in_order(
    ids: list[tuple[str, int]], oldest_first: bool
) -> None:
    """Runs that were updated at the same time are ordered by their ids."""
    runs = [run(f"r{id}", minutes) for id, minutes in ids]
    query = Query(oldest_first=oldest_first)
    collected_runs: list[RunSummary] = []
    position = None
    while page := find(runs, query, 2, position).runs:
        collected_runs += page
        position = Position(page[-1].updated_at, page[-1].id)
    ordered = sorted(runs, key=lambda run: (run.updated_at, run.id), reverse=not oldest_first)
    assert collected_runs == ordered


def test_only_statuses_and_workflows_are_counted_by_index() -> None:
    """Any other filter is counted by a bounded search."""
    assert is_counted_by_index(Query(statuses=("failed",), workflows=("a", "b")))
    assert not is_counted_by_index(Query(prefix="a"))
    assert not is_counted_by_index(Query(since=NOON))


def test_the_fields_of_a_query_are_distinct() -> None:
    """A backend reads each range once."""
    query = Query(statuses=("failed", "failed"), workflows=("a", "a"), tags=("a=1", "a=1"))
    assert check_query(query) == Query(statuses=("failed",), workflows=("a",), tags=("a=1",))
