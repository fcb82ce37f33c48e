"""A run that is leased with its message on MySQL: its statements, and forced races.

What the handoff waits for is done by another store, in a transaction that is not committed yet.
"""

from collections.abc import AsyncIterator, Sequence
from datetime import timedelta

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
from perdure.stores import mysql
from perdure.stores.mysql import MysqlStore
from perdure.stores.mysql.database import Result, Transaction
from perdure.testing.conformance.harness import send_one, supports
from perdure.testing.conformance.samples import as_json, delta, snapshot
from tests.servers.mysql import query
from tests.stores.mysql.locks import blocked, uncommitted

LONG = timedelta(minutes=5)
ORDERS = supports("order")
PAID, EARLIER = NewMessage("run", "paid", b"1"), NewMessage("run", "paid", b"0")
AWAITS_PAID = Rest("waiting", None, ("paid",))
MESSAGE_COUNT = "SELECT messages FROM perdure_runs WHERE id = %s"


@pytest.fixture
async def store(mysql_url: str) -> AsyncIterator[MysqlStore]:
    async with mysql(mysql_url) as store:
        yield store


async def wait_for_paid(store: MysqlStore, *ids: str, rest: Rest = AWAITS_PAID) -> None:
    data = as_json(snapshot("a"))
    runs = [NewRun(id, "order", data, version=1, rest=rest) for id in ids or ["run"]]
    assert all(await store.enqueue(runs))


async def acquire(store: MysqlStore) -> Grant:
    request = LeaseRequest("run", "ana", LONG, create=as_json(snapshot()), workflow="order")
    (grant,) = await store.acquire([request])
    assert isinstance(grant, Grant)
    return grant


async def hand_off(store: MysqlStore, *messages: NewMessage, limit: int = 100) -> Handoff:
    return await store.send_and_claim(messages or [PAID], "bob", LONG, limit, supports=ORDERS)


def suspended(epoch: int, *steps: str, rest: Rest, consumes: tuple[str, ...] = ()) -> Entry:
    return Entry("run", epoch, 1, as_json(snapshot(*steps)), consumes, rest)


def contents(grant: Grant) -> tuple[list[str], list[bytes]]:
    return list(grant.snapshot["steps"]), [message.payload for message in grant.inbox]


async def has_messages(store: MysqlStore, grant: Grant) -> bool:
    """Return whether the owner still has the lease, and its renewal reports messages."""
    (lease,) = await store.renew([grant.lease], LONG)
    return lease is not None and lease.has_messages


async def test_the_second_of_two_handoffs_only_sends(store: MysqlStore, mysql_url: str) -> None:
    await wait_for_paid(store)
    async with uncommitted(mysql_url) as other:
        (grant,) = (await hand_off(other, EARLIER)).grants
        task = await blocked(mysql_url, hand_off(store))
    assert await task == Handoff((Receipt(Delivery.DELIVERED, 2),))
    assert contents(grant) == (["a"], [b"0"])
    assert await has_messages(store, grant)
    assert [message.payload for message in await store.inbox("run")] == [b"0", b"1"]


async def test_a_handoff_that_waited_for_one_that_fails_is_granted(
    store: MysqlStore, mysql_url: str
) -> None:
    await wait_for_paid(store)
    async with uncommitted(mysql_url, rolls_back=True) as other:
        await hand_off(other, EARLIER)
        task = await blocked(mysql_url, hand_off(store))
    (grant,) = (await task).grants
    assert contents(grant) == (["a"], [b"1"])
    assert list(grant.inbox) == list(await store.inbox("run"))


async def test_a_handoff_that_waited_for_a_rest_gets_its_snapshot(
    store: MysqlStore, mysql_url: str
) -> None:
    """And neither an entry that the snapshot contains, nor a message that the rest consumed."""
    owner = await acquire(store)
    await send_one(store, "run", "old", b"0")
    (message,) = await store.inbox("run")
    await store.append([Entry("run", owner.lease.epoch, 0, delta("a"))])
    rest = suspended(owner.lease.epoch, "a", "b", rest=AWAITS_PAID, consumes=(message.id,))
    async with uncommitted(mysql_url) as other:
        assert await other.append([rest]) == [Verdict.ACCEPTED]
        task = await blocked(mysql_url, hand_off(store))
    (grant,) = (await task).grants
    assert contents(grant) == (["a", "b"], [b"1"])
    late, next_entry = (Entry("run", each.lease.epoch, 2, delta("c")) for each in (owner, grant))
    assert await store.append([late]) == [Verdict.FENCED]
    assert await store.append([next_entry]) == [Verdict.ACCEPTED]


@pytest.mark.parametrize(
    ("rest", "delivery"),
    [(Rest("completed"), Delivery.OVER), (Rest("waiting", None, ("go",)), Delivery.DELIVERED)],
)
async def test_a_handoff_that_waited_for_another_rest_is_not_granted(
    store: MysqlStore, mysql_url: str, rest: Rest, delivery: Delivery
) -> None:
    """The run awaited the message before, and another process has executed it since."""
    await wait_for_paid(store)
    async with uncommitted(mysql_url) as other:
        (owner,) = await other.acquire([LeaseRequest("run", "ana", LONG)])
        assert isinstance(owner, Grant)
        await other.append([suspended(owner.lease.epoch, rest=rest)])
        task = await blocked(mysql_url, hand_off(store))
    handoff = await task
    assert not handoff.grants
    assert handoff.receipts[0].delivery is delivery
    assert await store.claim("cem", LONG, 1) == []


async def test_a_handoff_that_waited_for_a_claim_only_sends(
    store: MysqlStore, mysql_url: str
) -> None:
    await wait_for_paid(store)
    await store.send([EARLIER])
    async with uncommitted(mysql_url) as other:
        (grant,) = await other.claim("ana", LONG, 1, supports=ORDERS)
        task = await blocked(mysql_url, hand_off(store))
    assert await task == Handoff((Receipt(Delivery.DELIVERED, 2),))
    assert contents(grant) == (["a"], [b"0"])
    assert await has_messages(store, grant)


async def test_a_handoff_that_waited_for_a_message_gets_both(
    store: MysqlStore, mysql_url: str
) -> None:
    """The other sender made the run due, but no other process has claimed it."""
    await wait_for_paid(store)
    async with uncommitted(mysql_url) as other:
        await other.send([EARLIER])
        task = await blocked(mysql_url, hand_off(store))
    (grant,) = (await task).grants
    assert contents(grant) == (["a"], [b"0", b"1"])
    assert list(grant.inbox) == list(await store.inbox("run"))
    assert await store.claim("ana", LONG, 1) == []


async def test_a_message_or_a_claim_that_waited_for_a_handoff_changes_nothing(
    store: MysqlStore, mysql_url: str
) -> None:
    """The message is counted, and the run stays with its owner; a claim skips it."""
    await wait_for_paid(store, rest=Rest("waiting", None, ("paid", "go")))
    async with uncommitted(mysql_url) as other:
        (grant,) = (await hand_off(other)).grants
        assert await store.claim("cem", LONG, 1) == []
        task = await blocked(mysql_url, send_one(store, "run", "go", b"2"))
    assert await task is Delivery.DELIVERED
    assert await store.claim("cem", LONG, 1) == []
    assert await has_messages(store, grant)


async def test_a_handoff_after_a_deadlock_sends_each_message_once(
    store: MysqlStore, mysql_url: str
) -> None:
    """The other transaction has written more, so the server rolls back the handoff."""
    await wait_for_paid(store, "a", "b")
    messages = [NewMessage(id, "paid", b"1") for id in ("a", "b")]
    async with uncommitted(mysql_url) as other:
        await other.send([NewMessage("b", "paid", b"0")] * 50)
        task = await blocked(mysql_url, hand_off(store, *messages))
        await other.send([NewMessage("a", "paid", b"0")])
    handoff = await task
    assert [receipt.unconsumed for receipt in handoff.receipts] == [2, 51]
    assert [len(grant.inbox) for grant in handoff.grants] == [2, 51]


async def test_the_first_runs_of_a_batch_are_granted_up_to_the_limit(
    store: MysqlStore, mysql_url: str
) -> None:
    """In the order of the messages, however many each run gets; all messages are counted."""
    await wait_for_paid(store, "a", "b", "c", "d")
    ids = ("d", "b", "missing", "d", "a", "c", "c", "c")
    handoff = await hand_off(store, *(NewMessage(id, "paid", b"1") for id in ids), limit=2)
    assert [receipt.unconsumed for receipt in handoff.receipts] == [1, 1, 0, 2, 1, 1, 2, 3]
    granted = {grant.lease.id: len(grant.inbox) for grant in handoff.grants}
    assert granted == {"d": 2, "b": 1}
    claimed = await store.claim("cem", LONG, 9)
    assert {grant.lease.id: len(grant.inbox) for grant in claimed} == {"a": 1, "c": 3}
    for id, count in {"a": 1, "b": 1, "c": 3, "d": 2}.items():
        assert query(mysql_url, MESSAGE_COUNT, id) == ((count,),)


async def test_a_grant_contains_the_first_page_of_messages(store: MysqlStore) -> None:
    await wait_for_paid(store)
    await store.send([NewMessage("run", "other", b"0")] * (INBOX_PAGE - 1))
    (grant,) = (await hand_off(store, PAID, PAID)).grants
    assert len(grant.inbox) == INBOX_PAGE
    assert [message.payload for message in grant.inbox[-2:]] == [b"0", b"1"]


async def test_an_unreadable_run_is_sent_its_message_and_left_out_for_a_while(
    store: MysqlStore, mysql_url: str
) -> None:
    await wait_for_paid(store, "bad", "good")
    query(mysql_url, "UPDATE perdure_runs SET snapshot = '{' WHERE id = 'bad'")
    handoff = await hand_off(store, *(NewMessage(id, "paid", b"1") for id in ("bad", "good")))
    assert [receipt.unconsumed for receipt in handoff.receipts] == [1, 1]
    assert [grant.lease.id for grant in handoff.grants] == ["good"]
    assert await store.claim("cem", LONG, 9) == []
    assert len(await store.inbox("bad")) == 1


async def sent_packets(store: MysqlStore, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Return a list that will contain the first word of each statement sent, by round trip."""
    packets: list[list[str]] = []
    send = Transaction._send

    async def recorded(self: Transaction, queries: Sequence[bytes]) -> list[Result]:
        packets.append([each.split()[0].decode() for each in queries])
        return await send(self, queries)

    await store.load("none")
    monkeypatch.setattr(Transaction, "_send", recorded)
    return packets


async def test_a_handoff_is_one_transaction_of_two_round_trips(
    store: MysqlStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as those of the message alone; a grant reads its snapshot and inbox besides."""
    await wait_for_paid(store)
    lock, sent = ["START", "SELECT"], ["INSERT", "UPDATE"]
    packets = await sent_packets(store, monkeypatch)
    assert len((await hand_off(store)).grants) == 1
    assert packets == [lock, [*sent, "SELECT", "SELECT", "COMMIT"]]
    packets.clear()
    assert not (await hand_off(store)).grants
    assert packets == [lock, [*sent, "COMMIT"]]
    packets.clear()
    await hand_off(store, NewMessage("missing", "paid", b"1"))
    assert packets == [lock]
