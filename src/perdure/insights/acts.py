"""The audit trail: acts of operators, stored in the runs themselves and in documents."""

import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
from msgspec.structs import replace

from perdure.errors import InvalidArgument
from perdure.insights.model import Act, ActsPage
from perdure.insights.redaction import Redact
from perdure.insights.terms import Field, Term, parse_terms, parse_time
from perdure.runtime.acts import ACT, KEPT_FOR
from perdure.snapshot.acts import acts_of
from perdure.store import SearchStore

_BATCH = 200
_KEY = re.compile(re.escape(ACT) + r"\d{4}-\d{2}-\d{2}T")
_MAX_DRIFT = timedelta(minutes=1)
"""How far ahead the clock of another machine may be."""


def run_acts(metadata: Mapping[str, Any], run_id: str, redact: Redact) -> tuple[Act, ...]:
    """Return the acts stored in a run, newest first."""
    acts = [read_act(document, redact) for document in reversed(acts_of(dict(metadata)))]
    return tuple(replace(act, run_id=run_id) for act in acts if act is not None)


def act_count_of(metadata: Mapping[str, Any], stored_count: int) -> int:
    """Return the total number of acts on a run, which keeps only the latest."""
    count = metadata.get("actCount")
    return max(count, stored_count) if type(count) is int else stored_count


def read_act(document: Any, redact: Redact) -> Act | None:
    """Return a stored act, or `None` if it cannot be read."""
    try:
        act = msgspec.convert({**document, "run_id": document.get("run", "")}, Act)
    except (msgspec.ValidationError, TypeError, AttributeError):
        return None
    if act.at.tzinfo is None:
        return None
    return replace(
        act, why=redact.text(act.why), was=redact.text(act.was), refused=redact.text(act.refused)
    )


def _check_word(value: str) -> None:
    if not value:
        raise ValueError("a non-empty string")


def _check_time(value: str) -> None:
    parse_time(value, datetime(2000, 1, 1, tzinfo=UTC))


FIELDS: dict[str, Field] = {
    "by": Field("by:ana, an operator", _check_word),
    "verb": Field("verb:retry,cancel", _check_word, is_list=True),
    "via": Field("via:cli", _check_word),
    "since": Field("since:7d", _check_time),
    "older": Field("older:1d", _check_time),
}


class ActSearch:
    """A search of the audit trail, newest first."""

    def __init__(self, store: SearchStore, query: str, redact: Redact, now: datetime) -> None:
        self._store = store
        self._redact = redact
        self._terms = parse_terms(query, FIELDS)
        times = {term.field: term.values[0] for term in self._terms}
        self._since = max(parse_time(times.get("since", "3650d"), now), now - KEPT_FOR)
        self._until = parse_time(times["older"], now) if "older" in times else now + _MAX_DRIFT

    async def page(self, limit: int, after: str | None) -> ActsPage:
        """Return up to `limit` acts; `after` is the cursor of the previous page."""
        if after is not None and (not isinstance(after, str) or _KEY.match(after) is None):
            raise InvalidArgument("after", after, "the cursor of a page of acts")
        acts: list[Act] = []
        end = after
        for prefix in self._prefixes(after):
            keys = await self._store.documents.keys(f"{prefix}*")
            keys = sorted((key for key in keys if end is None or key < end), reverse=True)
            for first in range(0, len(keys), _BATCH):
                for key, act in await self._read(keys[first : first + _BATCH]):
                    if len(acts) == limit:
                        return ActsPage(tuple(acts), after)
                    acts.append(act)
                    after = key
            end = prefix
        return ActsPage(tuple(acts))

    def _prefixes(self, after: str | None) -> Iterable[str]:
        """Yield prefixes of keys: of the newest day, of its month, and of earlier months."""
        day = self._until.date().isoformat()
        if after is not None:
            day = min(day, after.removeprefix(ACT)[:10])
        yield f"{ACT}{day}"
        year, month = int(day[:4]), int(day[5:7])
        while (year, month) >= (self._since.year, self._since.month):
            yield f"{ACT}{year:04}-{month:02}"
            year, month = (year, month - 1) if month > 1 else (year - 1, 12)

    async def _read(self, keys: Sequence[str]) -> list[tuple[str, Act]]:
        pairs: list[tuple[str, Act]] = []
        for key, value in zip(keys, await self._store.documents.get_many(keys), strict=True):
            act = None if value is None else read_act(_loads(value), self._redact)
            if act is not None and self._matches(act):
                pairs.append((key, act))
        return pairs

    def _matches(self, act: Act) -> bool:
        is_in_time = self._since <= act.at < self._until
        return is_in_time and all(_has(act, term) for term in self._terms)


def _has(act: Act, term: Term) -> bool:
    match term.field:
        case "":
            return act.run_id.startswith(term.values[0])
        case "by":
            return act.by == term.values[0]
        case "verb":
            return act.verb in term.values
        case "via":
            return act.via == term.values[0]
        case _:
            return True


def _loads(value: str) -> Any:
    try:
        return msgspec.json.decode(value)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None
