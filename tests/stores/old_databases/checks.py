"""What must be true of an old database when the current code has opened it."""

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import pytest

from perdure.store import Delivery, Grant, LeaseRequest, Refusal
from perdure.testing.conformance.harness import send_one
from tests.stores.mongo.databases import ignore_driver_leaks
from tests.stores.old_databases import Run

HOUR = timedelta(hours=1)
DUE = ("due", "queued", "orphaned", "released", "taken over")
URLS = {
    "postgres": "postgres_url",
    "postgres_jsonb": "postgres_url",
    "sql_postgres": "postgres_url",
    "mysql": "mysql_url",
    "sql_mysql": "mysql_url",
    "libsql": "sqld_url",
    "mongo": "mongo_url",
    "redis": "redis_url",
}


def of_kinds(*kinds: str) -> pytest.MarkDecorator:
    marks = {"mongo": [ignore_driver_leaks]}
    params = [
        pytest.param(kind, marks=[*marks.get(kind, []), *_server_mark(kind)]) for kind in kinds
    ]
    return pytest.mark.parametrize("place", params, indirect=True)


def _server_mark(kind: str) -> list[pytest.MarkDecorator]:
    return [pytest.mark.server] if kind in URLS else []


async def check_found(store: Any, runs: Mapping[str, Run]) -> None:
    """Check that exactly these runs are listed, each with its header."""
    listed = await list_all(store)
    assert listed.keys() == runs.keys()
    for id, summary in listed.items():
        assert summary.status in statuses_of(id, runs[id]), id
        assert summary.owner == runs[id]["owner"], id
        if not id.startswith("awaitly"):
            assert summary.workflow == "order", id


def statuses_of(id: str, run: Run) -> tuple[str, ...]:
    """Return the status of a run; one that no worker has claimed yet may have got its own."""
    return ("running", "queued") if shape_of(id) == "queued" else (run["status"],)


def shape_of(id: str) -> str:
    name, _, number = id.rpartition(" ")
    return name if number.isdigit() else id


async def list_all(store: Any) -> dict[str, Any]:
    listed: dict[str, Any] = {}
    after = None
    while page := await store.list(limit=1000, after=after):
        assert listed.keys().isdisjoint(summary.id for summary in page)
        listed |= {summary.id: summary for summary in page}
        after = page[-1].cursor
    return listed


async def claim_all(store: Any) -> dict[str, Grant]:
    grants: dict[str, Grant] = {}
    while page := await store.claim("ana", HOUR, 500):
        assert grants.keys().isdisjoint(grant.lease.id for grant in page)
        grants |= {grant.lease.id: grant for grant in page}
    return grants


async def send(store: Any, id: str, name: str, *, dedup_id: str | None = None) -> Delivery:
    return await send_one(store, id, name, b'{"by":"eva"}', dedup_id=dedup_id)


async def acquire(store: Any, id: str, **options: Any) -> Grant | Refusal:
    [answer] = await store.acquire([LeaseRequest(id, "ana", HOUR, **options)])
    assert isinstance(answer, Grant | Refusal)
    return answer


async def check_claimed(store: Any, runs: Mapping[str, Run]) -> None:
    """Check that every due run is claimed once, with all its steps."""
    grants = await claim_all(store)
    assert grants.keys() == {id for id in runs if shape_of(id) in DUE}
    for id, grant in grants.items():
        assert grant.snapshot == runs[id]["snapshot"], id
        assert grant.takeovers == (2 if id == "taken over" else 0), id
