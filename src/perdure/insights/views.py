"""Saved views: named queries of operators, stored in documents.

In a query, `view:stuck` stands for the view with this name. It is replaced before the query is
parsed, so that a stored or running query never changes its meaning later.
"""

import re

import msgspec

from perdure.insights.model import SavedView
from perdure.insights.query import FIELDS
from perdure.insights.terms import Field, InvalidQuery, Term, parse_terms
from perdure.store import SearchStore

KEY = "view:"
"""The prefix of the keys of saved views; the name follows."""

_NAME = re.compile(r"[\w-]{1,60}")


def check_view(name: str) -> str:
    """Return the name of a view, or raise `ValueError` with what was expected."""
    if not _NAME.fullmatch(name):
        raise ValueError("a name of at most 60 letters, digits, - and _")
    return name


async def read_views(store: SearchStore) -> tuple[SavedView, ...]:
    """Return the saved views, by name."""
    keys = sorted(await store.documents.keys(f"{KEY}*"))
    values = await store.documents.get_many(keys) if keys else []
    views = [_read(value) for value in values]
    return tuple(view for view in views if view is not None)


def _read(value: str | None) -> SavedView | None:
    try:
        return None if value is None else msgspec.json.decode(value, type=SavedView)
    except (msgspec.MsgspecError, UnicodeError):
        return None


async def expand(store: SearchStore, query: str) -> str:
    """Return a query with its views replaced by their queries."""
    terms = parse_terms(query, {**FIELDS, "view": Field("view:stuck", check_view, repeats=True)})
    if not any(term.field == "view" for term in terms):
        return query
    queries = {view.name: view.query for view in await read_views(store)}
    return " ".join(_expand_term(term, queries, query) for term in terms)


def _expand_term(term: Term, queries: dict[str, str], query: str) -> str:
    if term.field != "view":
        return str(term)
    name = term.values[0]
    if name not in queries:
        raise InvalidQuery(f"there is no view {name!r}", query, query.find(name))
    return queries[name]
