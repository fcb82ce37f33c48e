"""Access paths of MySQL: statements find their rows by key, however small the table is.

A scan would lock rows of other runs, not in the order of their ids: a deadlock with a transaction
that locks them in order.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from datetime import UTC, datetime, timedelta

import asyncmy
import pytest

from perdure.store import Entry, Grant, LeaseRequest, Rest, Verdict
from perdure.stores import mysql
from perdure.stores.mysql import MysqlStore, enqueue, handoff, inbox, maintenance, tags
from perdure.stores.mysql import statements as sql
from perdure.stores.mysql.literals import Statement, Value
from perdure.testing.conformance.harness import send_one
from perdure.testing.conformance.samples import as_json, delta, snapshot
from tests.servers.mysql import connect_arguments, query

LONG = timedelta(minutes=5)
AT = datetime(2030, 1, 1, tzinfo=UTC)
MANY = 30
IDS = [f"run {number}" for number in range(MANY)]


@pytest.fixture
async def store(mysql_url: str) -> AsyncIterator[MysqlStore]:
    async with mysql(mysql_url) as store:
        yield store


@pytest.fixture
async def grants(store: MysqlStore, mysql_url: str) -> Sequence[Grant]:
    """Leases of many runs with an entry and two messages each; one more run exists."""
    requests = [
        LeaseRequest(id, "ana", LONG, create=as_json(snapshot()), tags=("a=1", "b=2"))
        for id in ("another", *IDS)
    ]
    _, *grants = [grant for grant in await store.acquire(requests) if isinstance(grant, Grant)]
    await store.append([Entry(g.lease.id, g.lease.epoch, 1, delta("a")) for g in grants])
    for id in IDS:
        await send_one(store, id, "paid", b"1", dedup_id="x")
        await send_one(store, id, "paid", b"1")
    # Now the server knows how small the tables are, as it would find out by itself later.
    for table in ("runs", "runs_journal", "runs_inbox", "runs_tags"):
        query(mysql_url, f"ANALYZE TABLE perdure_{table}")
    return grants


MESSAGES = [*range(1, 2 * MANY)]
STATEMENTS: dict[str, tuple[str, Sequence[Value]]] = {
    "lock": (sql.LOCK, [IDS]),
    "lock leased": (sql.LOCK_LEASED, [IDS]),
    "lock requested": (sql.LOCK_REQUESTED, [["ana"], IDS]),
    "lock receivers": (inbox.LOCK_RECEIVERS, [IDS]),
    "lock candidates": (handoff.LOCK_CANDIDATES, [IDS]),
    "snapshots": (handoff.SNAPSHOTS, [IDS]),
    "lock old": (maintenance.LOCK_OLD, [IDS, Statement(b"run.folded = -1")]),
    "queue inserted": (enqueue.QUEUE_INSERTED, [IDS]),
    "set created": (tags.SET_CREATED, [IDS]),
    "count sent": (inbox.COUNT_SENT, [1, True, AT, IDS]),
    "count consumed": (sql.COUNT_CONSUMED, [1, IDS]),
    "lease": (sql.LEASE, [False, AT, 1, "ana", AT, 1, IDS]),
    "renew": (sql.RENEW, [AT, IDS]),
    "release": (sql.RELEASE, [AT, IDS]),
    "delete runs": (sql.DELETE_RUNS, [IDS]),
    "delete journals": (sql.DELETE_JOURNALS, [IDS]),
    "delete inboxes": (sql.DELETE_INBOXES, [IDS]),
    "delete tags": (tags.DELETE_TAGS, [IDS]),
    "consume": (sql.CONSUME, [MESSAGES]),
    "mark consumed": (sql.MARK_CONSUMED, [MESSAGES]),
}


@pytest.mark.usefixtures("grants")
@pytest.mark.parametrize("name", STATEMENTS)
async def test_a_statement_that_locks_rows_does_not_scan(
    store: MysqlStore, mysql_url: str, name: str
) -> None:
    """Even for nearly all rows, where reading the whole table would be cheaper."""
    statement, values = STATEMENTS[name]
    text = store._backend._bind(statement, *values).encode(backslashes=True).decode()
    locking, *looked_up = [access for _, _, _, access, *_ in query(mysql_url, f"EXPLAIN {text}")]
    assert locking == "range"
    assert set(looked_up) <= {"ref", "eq_ref"}


async def rest(store: MysqlStore, grants: Sequence[Grant]) -> Sequence[Verdict]:
    data = as_json(snapshot("a"))
    rest = Rest("suspended")
    return await store.append(
        [Entry(g.lease.id, g.lease.epoch, 2, data, rest=rest) for g in grants]
    )


async def end(store: MysqlStore, grants: Sequence[Grant]) -> Sequence[Verdict]:
    delete = Rest("completed", delete=True)
    return await store.append(
        [Entry(g.lease.id, g.lease.epoch, 2, b"", rest=delete) for g in grants]
    )


async def take(store: MysqlStore, grants: Sequence[Grant]) -> Sequence[Verdict]:
    entries = []
    for lease in [grant.lease for grant in grants]:
        consumes = tuple(message.id for message in await store.inbox(lease.id))
        entries.append(Entry(lease.id, lease.epoch, 2, delta("b"), consumes=consumes))
    return await store.append(entries)


@pytest.mark.parametrize("write", [rest, end, take])
async def test_a_batch_does_not_wait_for_rows_of_other_runs(
    store: MysqlStore,
    mysql_url: str,
    grants: Sequence[Grant],
    write: Callable[[MysqlStore, Sequence[Grant]], Awaitable[Sequence[Verdict]]],
) -> None:
    """Another transaction that locks a run, an entry and a message blocks no other run."""
    async with asyncmy.connect(**connect_arguments(mysql_url)) as other, other.cursor() as cursor:
        await cursor.execute("SELECT * FROM perdure_runs WHERE id = 'another' FOR UPDATE")
        await cursor.execute("INSERT INTO perdure_runs_journal VALUES ('another', 1, 1, '{}')")
        await cursor.execute(
            "INSERT INTO perdure_runs_inbox (run, name, payload, sent_at) "
            "VALUES ('another', 'paid', '1', UTC_TIMESTAMP(6))"
        )
        verdicts = await asyncio.wait_for(write(store, grants), 5)
    assert verdicts == [Verdict.ACCEPTED] * MANY
