"""The query language: parsing, formatting, error messages, completion."""

from contextlib import suppress
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.insights.completion import complete
from perdure.insights.query import ORDERS, STATUSES, parse_query
from perdure.insights.terms import InvalidQuery, Term

NOW = datetime(2026, 11, 3, 9, 0, tzinfo=UTC)


def test_the_index_answers_statuses_workflows_queue_tags_and_times() -> None:
    query = parse_query(
        "status:paused,failed workflow:order,refund queue:emails/acme tag:customer=acme "
        "since:24h older:1h sort:oldest order-",
        NOW,
    ).index
    assert query.statuses == ("paused", "failed")
    assert (query.workflows, query.prefix) == (("order", "refund"), "order-")
    assert query.queue == "emails/acme"
    assert query.tags == ("customer=acme",)
    assert (query.since, query.until) == (NOW - timedelta(days=1), NOW - timedelta(hours=1))
    assert query.oldest_first


def test_the_other_terms_are_filters() -> None:
    query = parse_query("status:failed version:1,2 payload.customer.id:42 payload.total:>=9", NOW)
    assert query.filters == (
        Term("version", ("1", "2")),
        Term("payload", ("42",), path=("customer", "id")),
        Term("payload", ("9",), ">=", ("total",)),
    )


def test_a_comparison_may_replace_the_colon_after_a_payload_path() -> None:
    assert parse_query("payload.total>100", NOW) == parse_query("payload.total:>100", NOW)


def test_quotes_protect_spaces_colons_commas_and_operators() -> None:
    query = parse_query(r'"order:1 a" error:"a \"b\" \\c" payload."x.y":">5"', NOW)
    assert query.index.prefix == "order:1 a"
    assert query.terms[1].values == ('a "b" \\c',)
    assert query.terms[2] == Term("payload", (">5",), "=", ("x.y",))


@pytest.mark.parametrize("id", ["order:0f066b19-9f06-4896-96bb-1cc8cee8a5bb", "order:0f066b19"])
def test_a_generated_id_needs_no_quotes(id: str) -> None:
    query = parse_query(f"{id} status:failed", NOW)
    assert query.index.prefix == id
    assert parse_query(" ".join(map(str, query.terms)), NOW) == query


def test_times_may_be_iso_dates_in_utc_or_with_an_offset() -> None:
    assert parse_query("since:2026-11-01", NOW).index.since == datetime(2026, 11, 1, tzinfo=UTC)
    query = parse_query('older:"2026-11-01T10:00+01:00"', NOW)
    assert query.index.until == datetime(2026, 11, 1, 9, tzinfo=UTC)


@pytest.mark.parametrize(
    ("text", "problem", "position"),
    [
        ("statos:failed", "unknown field 'statos'; did you mean 'status'? Fields: status, ", 0),
        ("order:17", 'An id with a colon is quoted: "order:17"', 0),
        ("a status:fail", "did you mean 'failed'?", 2),
        ("status:failed status:paused", "write status:a,b for either of two", 14),
        ("one two", "a query has one bare word", 4),
        ("since:yesterday", 'expected a duration such as "24h"', 0),
        ("tag:customer", "a name and a value, such as tag:customer=acme", 0),
        ("version:two", "version: expected an int >= 0, got 'two'", 0),
        ("sort:up", "newest or oldest", 0),
        ("payload:5", "'payload' needs a path", 0),
        ("payload..a:5", "'payload' needs a path", 0),
        ("status.x:5", "unknown field 'status.x'", 0),
        ('a error:"x', "the quote is not closed", 8),
        ('""', "id: expected a non-empty string", 0),
        ("workflow:", "workflow: expected a non-empty string", 0),
        ("x" * 513, "id: expected a non-empty string of at most 512", 0),
    ],
)
def test_errors_explain_the_mistake_and_its_position(
    text: str, problem: str, position: int
) -> None:
    with pytest.raises(InvalidQuery) as caught:
        parse_query(text, NOW)
    assert problem in str(caught.value)
    assert caught.value.position == position


TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12)
WORD = TEXT.filter(bool)
TAG_NAME = WORD.filter(lambda name: "=" not in name)
OPERATOR = st.sampled_from(["=", ">", "<", ">=", "<="])
UNIQUE = st.fixed_dictionaries(
    {},
    optional={
        "": st.tuples(WORD),
        "status": st.lists(st.sampled_from(STATUSES), min_size=1, unique=True).map(tuple),
        "workflow": st.lists(WORD, min_size=1, unique=True).map(tuple),
        "queue": st.tuples(TEXT),
        "since": st.sampled_from([("24h",), ("2026-11-01T10:00:00+01:00",)]),
        "sort": st.sampled_from([(order,) for order in ORDERS]),
        "version": st.lists(st.integers(0, 99).map(str), min_size=1, unique=True).map(tuple),
        "owner": st.tuples(WORD),
        "waiting": st.tuples(WORD),
    },
)
REPEATED = st.one_of(
    st.builds(Term, st.just("tag"), st.tuples(st.builds("{}={}".format, TAG_NAME, TEXT))),
    st.builds(Term, st.just("error"), st.tuples(WORD)),
    st.builds(
        Term,
        st.just("payload"),
        st.tuples(TEXT),
        OPERATOR,
        st.lists(WORD, min_size=1, max_size=3).map(tuple),
    ),
)


@given(UNIQUE, st.lists(REPEATED, max_size=4))
def test_the_text_of_a_query_means_the_same_query(
    unique: dict[str, tuple[str, ...]], repeated: list[Term]
) -> None:
    terms = [Term(field, values) for field, values in unique.items()] + repeated
    query = parse_query(" ".join(map(str, terms)), NOW)
    assert query.terms == tuple(terms)
    assert parse_query(str(query), NOW) == query


@given(st.text(max_size=40))
def test_any_text_is_a_query_or_an_invalid_one(text: str) -> None:
    with suppress(InvalidQuery):
        query = parse_query(text, NOW)
        assert parse_query(str(query), NOW) == query


def test_fields_are_completed() -> None:
    (first, *_) = complete("status:failed st")
    assert (first.text, first.start, first.end) == ("status:", 14, 16)
    assert [each.text for each in complete("pay")] == ["payload."]


def test_values_of_a_list_are_completed_one_by_one() -> None:
    (only,) = complete("status:failed,pa x", cursor=16)
    assert (only.text, only.start, only.end) == ("paused", 14, 16)


def test_known_values_are_completed_and_quoted() -> None:
    (only,) = complete("workflow:send", known={"workflow": ["order", "send it"]})
    assert only.text == '"send it"'


def test_a_space_inside_quotes_does_not_begin_a_word() -> None:
    assert complete('error:"a st') == ()
