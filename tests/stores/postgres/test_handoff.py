"""A run that is leased with its message on PostgreSQL: its statement, and forced races.

What the statement waits for is done by the statements of the store itself, in a transaction that
is not committed yet.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

import asyncpg
import pytest

from perdure.store import (
    INBOX_PAGE,
    Delivery,
    Entry,
    Grant,
    Handoff,
    LeaseRequest,
    NewMessage,
    NewRun,
    Receipt,
    Rest,
    Verdict,
)
from perdure.stores import postgres
from perdure.stores._handoff import Claimant
from perdure.stores.postgres import PostgresStore
from perdure.stores.postgres.append import Writer
from perdure.stores.postgres.handoff import Handoffs
from perdure.stores.postgres.inbox import Inboxes
from perdure.stores.postgres.leases import Leases
from perdure.stores.postgres.store import NotifyingPostgresStore
from perdure.testing.conformance.harness import send_one, supports
from perdure.testing.conformance.samples import as_json, delta, snapshot
from tests.stores.postgres.locks import blocked

LONG, SHORT = timedelta(minutes=5), timedelta(milliseconds=1)
ORDERS = supports("order")
PAID = NewMessage("run", "paid", b"1")
AWAITS_PAID = Rest("waiting", None, ("paid",))


@pytest.fixture
async def store(postgres_url: str) -> AsyncIterator[PostgresStore]:
    async with postgres(postgres_url) as store:
        yield store


@pytest.fixture
async def other(postgres_url: str) -> AsyncIterator[asyncpg.Connection]:
    connection = await asyncpg.connect(postgres_url)
    yield connection
    await connection.close()


class Uncommitted:
    """The statements of a store in an open transaction, which holds their locks."""

    def __init__(self, store: PostgresStore, connection: asyncpg.Connection) -> None:
        self._connection = connection
        statements, database = store._backend._statements, store._backend._database
        self.leases = Leases(self.fetch, statements, "")
        self.writer = Writer(self.fetch, statements, "")
        self.inboxes = Inboxes(database, statements, "")
        self.handoffs = Handoffs(database, statements, self.leases, "")
        self.inboxes._fetch = self.handoffs._fetch = self.fetch  # type: ignore[assignment]  # the transaction's

    async def fetch(
        self, statement: str, /, *values: object, repeatable: bool = True
    ) -> Sequence[Any]:
        rows: Sequence[Any] = await self._connection.fetch(statement, *values)
        return rows


@asynccontextmanager
async def uncommitted(
    store: PostgresStore, connection: asyncpg.Connection
) -> AsyncIterator[Uncommitted]:
    """Commit at the end of the block what is written in it."""
    async with connection.transaction():
        yield Uncommitted(store, connection)


async def wait_for_paid(store: PostgresStore, rest: Rest = AWAITS_PAID) -> None:
    data = as_json(snapshot("a"))
    assert await store.enqueue([NewRun("run", "order", data, version=1, rest=rest)]) == [True]


async def acquire(store: PostgresStore, owner: str = "ana") -> Grant:
    request = LeaseRequest("run", owner, LONG, create=as_json(snapshot()), workflow="order")
    (grant,) = await store.acquire([request])
    assert isinstance(grant, Grant)
    return grant


async def hand_off(
    store: PostgresStore, *more: NewMessage, ttl: timedelta = LONG, limit: int = 1
) -> Handoff:
    return await store.send_and_claim([PAID, *more], "bob", ttl, limit, supports=ORDERS)


@pytest.fixture(params=["one message", "two messages"])
def more(request: pytest.FixtureRequest) -> Sequence[NewMessage]:
    """The other messages of the call; several are sent by another statement."""
    return [NewMessage("missing", "paid", b"1")] if request.param == "two messages" else []


def suspended(epoch: int, *steps: str, rest: Rest, consumes: tuple[str, ...] = ()) -> Entry:
    return Entry("run", epoch, 1, as_json(snapshot(*steps)), consumes, rest)


def contents(grant: Grant) -> tuple[list[str], list[bytes]]:
    return list(grant.snapshot["steps"]), [message.payload for message in grant.inbox]


async def has_messages(store: PostgresStore, grant: Grant) -> bool:
    """Return whether the owner still has the lease, and its renewal reports messages."""
    (lease,) = await store.renew([grant.lease], LONG)
    return lease is not None and lease.has_messages


async def test_the_second_of_two_handoffs_only_sends(
    store: PostgresStore, other: asyncpg.Connection, more: Sequence[NewMessage]
) -> None:
    await wait_for_paid(store)
    async with uncommitted(store, other) as first:
        message = NewMessage("run", "paid", b"0")
        _, (grant,) = await first.handoffs.hand_off(
            [message, *more], Claimant("ana", LONG, 1, ORDERS)
        )
        task = await blocked(other, hand_off(store, *more))
    handoff = await task
    assert handoff.receipts[0] == Receipt(Delivery.DELIVERED, 2)
    assert not handoff.grants
    assert isinstance(grant, Grant)
    assert contents(grant) == (["a"], [b"0"])
    assert await has_messages(store, grant)
    assert [message.payload for message in await store.inbox("run")] == [b"0", b"1"]


async def test_a_handoff_that_waited_for_one_that_fails_is_granted(
    store: PostgresStore, other: asyncpg.Connection, more: Sequence[NewMessage]
) -> None:
    await wait_for_paid(store)
    transaction = other.transaction()
    await transaction.start()
    first = Uncommitted(store, other)
    await first.handoffs.hand_off([PAID, *more], Claimant("ana", LONG, 1, ORDERS))
    task = await blocked(other, hand_off(store, *more))
    await transaction.rollback()
    (grant,) = (await task).grants
    assert contents(grant) == (["a"], [b"1"])
    assert list(grant.inbox) == list(await store.inbox("run"))


async def test_a_handoff_that_waited_for_a_rest_gets_its_snapshot(
    store: PostgresStore, other: asyncpg.Connection, more: Sequence[NewMessage]
) -> None:
    """And no message that the rest consumed, which the statement would still see."""
    old = await acquire(store)
    epoch = old.lease.epoch
    await send_one(store, "run", "old", b"0")
    (message,) = await store.inbox("run")
    await store.append([Entry("run", epoch, 0, delta("a"))])
    rest = suspended(epoch, "a", "b", rest=AWAITS_PAID, consumes=(message.id,))
    async with uncommitted(store, other) as owner:
        assert await owner.writer.write([rest]) == [Verdict.ACCEPTED]
        task = await blocked(other, hand_off(store, *more))
    (grant,) = (await task).grants
    assert contents(grant) == (["a", "b"], [b"1"])
    assert await store.append([Entry("run", epoch, 2, delta("c"))]) == [Verdict.FENCED]
    assert await store.append([Entry("run", grant.lease.epoch, 1, delta("c"))]) == [
        Verdict.ACCEPTED
    ]


@pytest.mark.parametrize(
    ("rest", "delivery"),
    [(Rest("completed"), Delivery.OVER), (Rest("waiting", None, ("go",)), Delivery.DELIVERED)],
)
async def test_a_handoff_that_waited_for_another_rest_is_not_granted(
    store: PostgresStore,
    other: asyncpg.Connection,
    more: Sequence[NewMessage],
    rest: Rest,
    delivery: Delivery,
) -> None:
    """The run awaited the message when the statement began."""
    await wait_for_paid(store)
    owner = await acquire(store)
    await other.execute("""UPDATE perdure_runs SET owner = NULL, awaits = '["paid"]'""")
    async with uncommitted(store, other) as ending:
        await other.execute("UPDATE perdure_runs SET owner = 'ana'")
        entry = suspended(owner.lease.epoch, rest=rest)
        assert await ending.writer.write([entry]) == [Verdict.ACCEPTED]
        task = await blocked(other, hand_off(store, *more))
    handoff = await task
    assert not handoff.grants
    assert handoff.receipts[0].delivery is delivery
    assert await store.claim("cem", LONG, 1) == []


async def test_a_handoff_that_waited_for_a_claim_only_sends(
    store: PostgresStore, other: asyncpg.Connection, more: Sequence[NewMessage]
) -> None:
    await wait_for_paid(store)
    await send_one(store, "run", "paid", b"0")
    async with uncommitted(store, other) as claimant:
        (grant,) = await claimant.leases.claim("ana", LONG, 1, ORDERS, {"": 1})
        task = await blocked(other, hand_off(store, *more))
    handoff = await task
    assert handoff.receipts[0] == Receipt(Delivery.DELIVERED, 2)
    assert not handoff.grants
    assert isinstance(grant, Grant)
    assert contents(grant) == (["a"], [b"0"])
    assert await has_messages(store, grant)


async def test_a_handoff_that_waited_for_a_message_gets_both(
    store: PostgresStore, other: asyncpg.Connection, more: Sequence[NewMessage]
) -> None:
    """The other sender made the run due, but no other process has claimed it."""
    await wait_for_paid(store)
    async with uncommitted(store, other) as sender:
        await sender.inboxes.send([NewMessage("run", "paid", b"0")])
        task = await blocked(other, hand_off(store, *more))
    (grant,) = (await task).grants
    assert contents(grant) == (["a"], [b"0", b"1"])
    assert list(grant.inbox) == list(await store.inbox("run"))
    assert await store.claim("ana", LONG, 1) == []


async def test_a_message_or_a_claim_that_waited_for_a_handoff_changes_nothing(
    store: PostgresStore, other: asyncpg.Connection, more: Sequence[NewMessage]
) -> None:
    """The message is counted, and the run stays with its owner; a claim skips it."""
    await wait_for_paid(store, Rest("waiting", None, ("paid", "go")))
    async with uncommitted(store, other) as first:
        _, (grant,) = await first.handoffs.hand_off([PAID, *more], Claimant("ana", LONG, 1, ORDERS))
        assert await store.claim("bob", LONG, 1) == []
        task = await blocked(other, send_one(store, "run", "go", b"2"))
    assert await task is Delivery.DELIVERED
    assert await store.claim("bob", LONG, 1) == []
    assert isinstance(grant, Grant)
    assert await has_messages(store, grant)


async def test_a_run_that_is_lost_before_its_inbox_is_read_is_not_granted(
    store: PostgresStore, postgres_url: str
) -> None:
    """The messages that were sent before are read under the lease, which may have expired."""
    await wait_for_paid(store)
    await send_one(store, "run", "old", b"0")
    fetch = store._backend._database.fetch

    async def paused(statement: str, *values: object, repeatable: bool = True) -> object:
        async with postgres(postgres_url) as another:
            await acquire(another, "cem")
        return await fetch(statement, *values, repeatable=repeatable)

    store._backend._leases._fetch = paused  # type: ignore[assignment]  # runs between the statements
    assert await hand_off(store, ttl=SHORT) == Handoff((Receipt(Delivery.DELIVERED, 2),))


async def test_only_a_run_with_earlier_messages_takes_two_statements(store: PostgresStore) -> None:
    statements: list[str] = []
    fetch = store._backend._database.fetch

    async def counted(statement: str, *values: object, repeatable: bool = True) -> object:
        statements.append(statement)
        return await fetch(statement, *values, repeatable=repeatable)

    backend = store._backend
    await wait_for_paid(store)
    backend._handoffs._fetch = backend._leases._fetch = counted  # type: ignore[assignment]  # counts
    (grant,) = (await hand_off(store)).grants
    assert len(statements) == 1
    rest = suspended(grant.lease.epoch, "a", rest=AWAITS_PAID)
    await store.append([rest])
    statements.clear()
    (grant,) = (await hand_off(store)).grants
    assert contents(grant) == (["a"], [b"1", b"1"])
    assert len(statements) == 2


async def test_several_runs_are_granted_by_one_statement(store: PostgresStore) -> None:
    """Up to the limit, in the order of the messages; the others are due."""
    await wait_for_paid(store)
    data = as_json(snapshot("a"))
    ids = ["c", "b", "a"]
    await store.enqueue([NewRun(id, "order", data, version=1, rest=AWAITS_PAID) for id in ids])
    messages = [NewMessage(id, "paid", id.encode()) for id in [*ids, "c"]]
    handoff = await hand_off(store, *messages, limit=3)
    grants = {grant.lease.id: contents(grant) for grant in handoff.grants}
    assert grants == {"run": (["a"], [b"1"]), "c": (["a"], [b"c", b"c"]), "b": (["a"], [b"b"])}
    assert [grant.lease.id for grant in await store.claim("ana", LONG, 9)] == ["a"]


async def test_a_grant_has_one_page_of_the_messages_of_the_call(store: PostgresStore) -> None:
    await wait_for_paid(store)
    (grant,) = (await hand_off(store, *[PAID] * INBOX_PAGE)).grants
    inbox = await store.inbox("run")
    assert len(inbox) == INBOX_PAGE + 1
    assert list(grant.inbox) == list(inbox)[:INBOX_PAGE]


async def test_other_processes_are_notified_only_of_a_run_that_is_due(
    store: PostgresStore, other: asyncpg.Connection
) -> None:
    """The last notification follows all others, and a granted run has none."""
    payloads: asyncio.Queue[str] = asyncio.Queue()
    await other.add_listener("perdure_runs", lambda *arguments: payloads.put_nowait(arguments[3]))
    for supported, expected in ((ORDERS, ["end"]), (supports("Order"), ["announced", "end"])):
        await wait_for_paid(store)
        await store.send_and_claim([PAID], "bob", LONG, 1, supports=supported)
        await other.execute("NOTIFY perdure_runs, 'end'")
        received = [await asyncio.wait_for(payloads.get(), 10) for _ in expected]
        assert received == expected
        await store.delete("run")


@pytest.mark.parametrize("workflow", ["order", "Order"])
async def test_a_store_notifies_its_own_worker_of_a_run_that_is_due(
    store: PostgresStore, workflow: str
) -> None:
    """A worker that was granted the run does not have to look for it."""
    await wait_for_paid(store)
    assert isinstance(store, NotifyingPostgresStore)
    notifications = store.notifications()
    await anext(notifications)
    (listener,) = store._backend._notifications._listeners
    handoff = await store.send_and_claim([PAID], "bob", LONG, 1, supports=supports(workflow))
    assert len(handoff.grants) == (workflow == "order")
    assert listener._changed.is_set() is (workflow == "Order")
    await notifications.aclose()  # type: ignore[attr-defined]  # it is a generator
