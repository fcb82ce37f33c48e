"""What is special about a libSQL server: requests, plans, transactions, sizes.

What all stores on servers have in common is tested in `tests/stores/test_server_failures.py`.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta

import httpx
import pytest

from perdure.errors import StoreError, StoreUnavailable, ValueTooLarge
from perdure.snapshot import Snapshot
from perdure.store import (
    Entry,
    Grant,
    Handoff,
    LeaseRequest,
    NewMessage,
    NewRun,
    Query,
    Refusal,
    Rest,
    SupportedVersions,
    Verdict,
)
from perdure.stores.libsql import LibsqlStore, Transaction, libsql
from perdure.stores.sqlite import handoff as handoff_sql
from perdure.stores.sqlite import search_statements as search_sql
from perdure.stores.sqlite import statements as sql
from perdure.stores.sqlite.schedule import DUE, DUE_RANGE, QUEUES
from perdure.stores.sqlite.statements import Statements
from perdure.testing.conformance.harness import send_one
from perdure.testing.conformance.samples import as_json, delta, snapshot
from tests.servers.proxy import TcpProxy
from tests.servers.sqld import query

HOUR = timedelta(hours=1)
FIRST = as_json(snapshot())


@pytest.fixture
async def store(sqld_url: str) -> AsyncIterator[LibsqlStore]:
    async with opened(sqld_url) as store:
        yield store


def opened(url: str, **options: object) -> LibsqlStore:
    store = libsql(url, **options)  # type: ignore[arg-type]
    assert isinstance(store, LibsqlStore)
    return store


async def granted(store: LibsqlStore, *ids: str) -> list[Grant]:
    create = as_json(snapshot())
    requests = [LeaseRequest(id, "ana", HOUR, create=create) for id in ids or ("run",)]
    return [grant for grant in await store.acquire(requests) if isinstance(grant, Grant)]


async def wait_for_go(store: LibsqlStore) -> None:
    """Create a run that waits for the event "go"."""
    rest = Rest("waiting", awaits=("go",))
    await store.enqueue([NewRun("run", "flow", FIRST, version=1, rest=rest)])


async def hand_off(store: LibsqlStore) -> Handoff:
    """Send the event "go" to the run, and claim it."""
    supports = [SupportedVersions("flow", 1, 1)]
    return await store.send_and_claim(
        [NewMessage("run", "go", b"1")], "ana", HOUR, 9, supports=supports
    )


def entry(grant: Grant, n: int = 1) -> Entry:
    return Entry(grant.lease.id, grant.lease.epoch, n, delta(f"step {n}"))


async def steps(store: LibsqlStore, id: str = "run") -> list[str]:
    loaded = await store.load(id)
    return [] if loaded is None else list(loaded["steps"])


class Counting:
    """A client that counts its requests."""

    def __init__(self) -> None:
        self.requests: list[httpx.Request] = []
        self.client = httpx.AsyncClient(verify=False, event_hooks={"request": [self._note]})

    async def _note(self, request: httpx.Request) -> None:
        self.requests.append(request)


async def test_a_batch_is_one_request(sqld_url: str) -> None:
    """A hundred entries, including rests, are one round trip and one transaction."""
    counting = Counting()
    async with counting.client, opened(sqld_url, client=counting.client) as store:
        grants = await granted(store, *(f"run {number}" for number in range(100)))
        whole = as_json(snapshot("end", status="completed"))
        entries = [
            Entry(g.lease.id, g.lease.epoch, 1, whole, rest=Rest("completed")) for g in grants[:10]
        ]
        counting.requests.clear()
        verdicts = await store.append([*entries, *map(entry, grants[10:])])
        assert verdicts == [Verdict.ACCEPTED] * 100
        assert len(counting.requests) == 1


async def test_a_run_that_is_lost_before_it_is_read_is_not_granted(sqld_url: str) -> None:
    """The lease and the journal are two requests. An owner that is paused between them must not
    get its old snapshot without the journal, which another owner has folded in the meantime."""
    counting = Counting()
    async with counting.client, opened(sqld_url) as another:
        (old,) = await granted(another)
        await another.append([entry(old)])
        await another.release([old.lease])
        store = opened(sqld_url, client=counting.client)
        await store.load("run")

        async def take_over(request: httpx.Request) -> None:
            if b"_inbox" in request.content:
                counting.client.event_hooks["request"].clear()
                (grant,) = await another.acquire([LeaseRequest("run", "cem", HOUR)])
                assert isinstance(grant, Grant)
                whole = as_json(snapshot("step 1", "b"))
                rest = Entry("run", grant.lease.epoch, 1, whole, rest=Rest("suspended"))
                await another.append([rest])

        counting.client.event_hooks["request"] = [take_over]
        (answer,) = await store.acquire([LeaseRequest("run", "bob", timedelta(0))])
        assert isinstance(answer, Refusal)
        await store.close()


async def test_concurrent_writes_share_requests(sqld_url: str) -> None:
    """Two hundred concurrent runs do not need a request each."""
    counting = Counting()
    async with counting.client, opened(sqld_url, client=counting.client) as store:
        await store.load("run")
        counting.requests.clear()
        grants = await asyncio.gather(*(granted(store, f"run {number}") for number in range(200)))
        await asyncio.gather(*(store.append([entry(grant)]) for [grant] in grants))
        assert len(counting.requests) < 20


async def test_a_bad_write_fails_alone(store: LibsqlStore) -> None:
    """Other writes in the same request succeed."""
    [good] = await granted(store, "good")
    first, bad, second = await asyncio.gather(
        store.append([entry(good, 1)]),
        send_one(store, "good", "\ud800", b"1"),
        store.append([entry(good, 2)]),
        return_exceptions=True,
    )
    assert first == second == [Verdict.ACCEPTED]
    assert isinstance(bad, StoreError)
    assert await steps(store, "good") == ["step 1", "step 2"]


async def test_a_failed_migration_is_retried(sqld_url: str) -> None:
    """Once the obstacle is removed, the same store works."""
    query(sqld_url, "CREATE TABLE perdure_runs_journal (something TEXT)")
    async with opened(sqld_url) as store:
        with pytest.raises(StoreError, match="perdure_runs_journal"):
            await store.save("run", snapshot())
        query(sqld_url, "DROP TABLE perdure_runs_journal")
        await store.save("run", snapshot())


STATEMENTS = {
    "load": (sql.LOAD, "", 0),
    "claim": (sql.CLAIM, "", 0),
    "handoff": (handoff_sql.GRANT, "", 0),
    "handoff, journals": (handoff_sql.NEW_JOURNALS, "", 0),
    "handoff, inboxes": (handoff_sql.NEW_INBOXES, "", 0),
    "due": (DUE, DUE_RANGE, 3),
    "queues": (QUEUES, "", 0),
    "search by update": (search_sql.NEWEST_FIRST, search_sql.BY_UPDATE, 1),
    "search by status": (search_sql.OLDEST_FIRST, search_sql.BY_STATUS, 3),
    "search by tag": (search_sql.NEWEST_FIRST, search_sql.BY_TAG, 1),
    "search by prefix": (search_sql.NEWEST_FIRST, search_sql.BY_PREFIX_AND_UPDATE, 1),
    "summaries": (search_sql.SUMMARIES, "", 0),
    "counts": (search_sql.COUNTS, "", 0),
    "prune by status": (search_sql.PRUNE_BY_STATUS, "", 0),
    "prune by tag": (search_sql.PRUNE_BY_TAG, "", 0),
}


@pytest.mark.parametrize("verb", STATEMENTS)
async def test_a_verb_uses_indexes(store: LibsqlStore, sqld_url: str, verb: str) -> None:
    """The server's SQLite uses the same indexes as the standard library's."""
    await store.load("run")
    check_plan(sqld_url, Statements("perdure_runs").sql(*STATEMENTS[verb]))


@pytest.mark.parametrize(
    "verb",
    [
        "ACQUIRE",
        "RENEW",
        "APPEND",
        "REST",
        "DELETE_FOLDED",
        "DELETE_OWNED_JOURNAL",
        "DELETE_OWNED",
        "CONSUME_DEDUPLICATED",
    ],
)
async def test_a_statement_on_many_runs_uses_indexes(
    store: LibsqlStore, sqld_url: str, verb: str
) -> None:
    """The cost of a batch depends on its size only."""
    await store.load("run")
    [statement] = Statements("perdure_runs").many(getattr(sql, verb), [(None,) * 12] * 100)
    check_plan(sqld_url, statement.sql)


def check_plan(url: str, statement: str) -> None:
    plan = [row[3] for row in query(url, f"EXPLAIN QUERY PLAN {unbound(statement)}")]
    assert not [line for line in plan if line.startswith("SCAN perdure")]
    assert [line for line in plan if "USING INDEX" in line or "USING COVERING INDEX" in line]


def unbound(statement: str) -> str:
    """Return a statement with NULL for each of its values."""
    words = (
        statement.replace("?", "NULL")
        .replace("(:", "( :")
        .replace(",", " , ")
        .replace(")", " )")
        .split()
    )
    return " ".join("NULL" if word.startswith(":") else word for word in words)


async def test_awaitlys_rows_are_read_and_not_changed(sqld_url: str) -> None:
    """On awaitly's own table, the store adds its columns and changes no row."""
    query(
        sqld_url,
        "CREATE TABLE awaitly_snapshots (id TEXT PRIMARY KEY, snapshot TEXT NOT NULL, "
        "updated_at TEXT DEFAULT (datetime('now')))",
    )
    text = json.dumps(snapshot("a"))
    query(
        sqld_url,
        f"INSERT INTO awaitly_snapshots VALUES ('run', '{text}', '2024-05-01 09:30:00')",
    )
    async with opened(sqld_url, table="awaitly_snapshots") as store:
        assert await store.load("run") == snapshot("a")
        [run] = await store.list()
        assert run.updated_at == datetime(2024, 5, 1, 9, 30, tzinfo=UTC)
        [grant] = await store.acquire([LeaseRequest("run", "ana", HOUR)])
        assert isinstance(grant, Grant)
        await store.append([entry(grant)])
        assert await steps(store) == ["a", "step 1"]
    rows = query(sqld_url, "SELECT id, snapshot, updated_at FROM awaitly_snapshots")
    assert rows == [["run", text, "2024-05-01 09:30:00"]]


async def test_a_transaction_reads_its_own_writes(store: LibsqlStore) -> None:
    """Values of every type are written and read, bound by position or by name."""
    [grant] = await granted(store)
    row = (1, 1.5, "text", b"\x00bytes", None)

    async def work(transaction: Transaction) -> Entry:
        await transaction.execute("CREATE TABLE note (a, b, c, d, e)")
        assert await transaction.execute("INSERT INTO note VALUES (?, ?, ?, ?, ?)", row) == 1
        assert await transaction.fetchall("SELECT * FROM note") == [row]
        by_name = "SELECT c FROM note WHERE a = :a"
        assert await transaction.fetchone(by_name, {"a": 1}) == ("text",)
        with pytest.raises(StoreError, match="syntax"):
            await transaction.execute("INSERT NOTHING")
        return entry(grant)

    assert await store.transact("run", grant.lease.epoch, work) is Verdict.ACCEPTED
    assert await steps(store) == ["step 1"]


async def test_a_cancelled_transaction_frees_the_server(store: LibsqlStore) -> None:
    """The next write does not wait for the server to notice."""
    [grant] = await granted(store)
    has_begun = asyncio.Event()

    async def work(transaction: Transaction) -> Entry:
        await transaction.execute("CREATE TABLE note (text)")
        has_begun.set()
        await asyncio.Event().wait()
        return entry(grant)

    transacting = asyncio.ensure_future(store.transact("run", grant.lease.epoch, work))
    await has_begun.wait()
    transacting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await transacting
    assert await asyncio.wait_for(store.append([entry(grant)]), 3) == [Verdict.ACCEPTED]


@pytest.mark.slow
async def test_a_transaction_that_blocks_others_is_ended(sqld_url: str) -> None:
    """The server's limit is 5 seconds; the error says so, and nothing is written."""
    async with opened(sqld_url) as store, opened(sqld_url) as other:
        [grant] = await granted(store)

        async def work(transaction: Transaction) -> Entry:
            await transaction.execute("CREATE TABLE note (text)")
            await other.save("another", snapshot())
            return entry(grant)

        with pytest.raises(StoreUnavailable, match="ended the transaction"):
            await store.transact("run", grant.lease.epoch, work)
        assert await steps(store) == []
    assert query(sqld_url, "SELECT 1 FROM sqlite_master WHERE name = 'note'") == []


async def test_transactions_wait_for_each_other(sqld_url: str) -> None:
    """Ten concurrent increments are all counted."""
    query(sqld_url, "CREATE TABLE counter (value INTEGER)")
    query(sqld_url, "INSERT INTO counter VALUES (0)")
    async with opened(sqld_url) as store:
        grants = await granted(store, *(f"run {number}" for number in range(10)))

        async def count_up(grant: Grant) -> Verdict:
            async def work(transaction: Transaction) -> Entry:
                row = await transaction.fetchone("SELECT value FROM counter")
                assert row is not None
                await transaction.execute("UPDATE counter SET value = ?", (row[0] + 1,))
                return entry(grant)

            return await store.transact(grant.lease.id, grant.lease.epoch, work)

        assert set(await asyncio.gather(*map(count_up, grants))) == {Verdict.ACCEPTED}
    assert query(sqld_url, "SELECT value FROM counter") == [["10"]]


async def test_the_store_cannot_be_called_inside_its_own_transaction(store: LibsqlStore) -> None:
    """It would deadlock: the error says what to use instead."""
    [grant] = await granted(store)

    async def work(_: Transaction) -> Entry:
        await store.load("run")
        return entry(grant)

    with pytest.raises(StoreError, match="use the connection"):
        await store.transact("run", grant.lease.epoch, work)


async def test_appends_in_the_same_request_as_such_a_write_are_repeated(sqld_url: str) -> None:
    """Writes that share a request are retried independently."""
    async with TcpProxy.before(sqld_url) as proxy, opened(proxy.url) as store:
        [grant] = await granted(store)
        proxy.drop_next_reply(to=b"_inbox")
        sent, appended = await asyncio.gather(
            send_one(store, "run", "hello", b"1"),
            store.append([entry(grant)]),
            return_exceptions=True,
        )
        assert isinstance(sent, StoreUnavailable)
        assert appended == [Verdict.ACCEPTED]
        assert await steps(store) == ["step 1"]


async def test_a_transaction_whose_commit_was_not_answered_can_be_repeated(sqld_url: str) -> None:
    """It is accepted again, and its second writes have no effect."""
    query(sqld_url, "CREATE TABLE note (text)")
    async with TcpProxy.before(sqld_url) as proxy, opened(proxy.url) as store:
        [grant] = await granted(store)

        async def work(transaction: Transaction) -> Entry:
            await transaction.execute("INSERT INTO note VALUES ('x')")
            return entry(grant)

        proxy.drop_next_reply(to=b'"COMMIT"')
        with pytest.raises(StoreUnavailable):
            await store.transact("run", grant.lease.epoch, work)
        assert await store.transact("run", grant.lease.epoch, work) is Verdict.ACCEPTED
    assert query(sqld_url, "SELECT text FROM note") == [["x"]]


async def test_a_connection_lost_in_the_work_makes_the_store_unavailable(sqld_url: str) -> None:
    """Whatever `work` raises instead: the step has not failed, and can be retried."""
    async with TcpProxy.before(sqld_url) as proxy, opened(proxy.url) as store:
        (grant,) = await granted(store)

        async def work(transaction: Transaction) -> Entry:
            proxy.refuse()
            try:
                await transaction.execute("SELECT 1")
            except StoreError:
                raise RuntimeError("payment failed") from None
            return entry(grant)

        with pytest.raises(StoreUnavailable) as caught:
            await store.transact("run", grant.lease.epoch, work)
        assert isinstance(caught.value.__cause__, RuntimeError)
        proxy.accept()


def large(key: str, size: int) -> Snapshot:
    """Return a snapshot with one step whose value has `size` bytes."""
    return {**snapshot(), "steps": {key: {"ok": True, "value": "x" * size}}}


async def test_a_run_that_is_too_large_for_one_answer_is_read_in_pages(store: LibsqlStore) -> None:
    """The server returns at most 10 MB; a journal may be larger, when loaded and when granted."""
    (grant,) = await granted(store)
    keys = [f"step {n}" for n in range(24)]
    for n, key in enumerate(keys):
        await store.append([Entry("run", grant.lease.epoch, n, as_json(large(key, 1_000_000)))])
    assert await steps(store) == keys
    (again,) = await store.acquire([LeaseRequest("run", "ana", HOUR)])
    assert isinstance(again, Grant)
    assert list(again.snapshot["steps"]) == keys


async def test_large_runs_are_claimed_a_few_at_a_time(store: LibsqlStore) -> None:
    """Their snapshots do not fit in one answer: a claim leases as many as do."""
    runs = [NewRun(f"{n}", "w", as_json(large("a", 4_000_000))) for n in range(5)]
    for run in runs:
        await store.enqueue([run])
    claimed = [grant.lease.id for _ in range(5) for grant in await store.claim("ana", HOUR, 5)]
    assert claimed == ["0", "1", "2", "3", "4"]


async def test_a_claim_from_many_queues_takes_two_requests(sqld_url: str) -> None:
    """One finds the due runs of all queues, the other leases and reads them."""
    counting = Counting()
    async with counting.client as client, opened(sqld_url, client=client) as store:
        queues = [f"emails/{number}" for number in range(100)]
        await store.enqueue([NewRun(queue, "mail", FIRST, queue=queue) for queue in queues])
        counting.requests.clear()
        supports = [SupportedVersions("mail", 1, 1), SupportedVersions("other", 1, 1)]
        grants = await store.claim(
            "ana", HOUR, 100, supports=supports, queues=dict.fromkeys(queues, 1)
        )
        assert [grant.lease.id for grant in grants] == queues
        assert len(counting.requests) == 2


async def test_a_message_and_its_run_are_one_request(sqld_url: str) -> None:
    """The message, the lease and all that is read under it are one transaction."""
    counting = Counting()
    async with counting.client as client, opened(sqld_url, client=client) as store:
        await wait_for_go(store)
        counting.requests.clear()
        [grant] = (await hand_off(store)).grants
        assert [message.name for message in grant.inbox] == ["go"]
        assert len(counting.requests) == 1


async def test_a_run_whose_inbox_is_too_large_for_one_answer_is_leased(
    store: LibsqlStore,
) -> None:
    """Its inbox is then read by itself, in pages; each message is sent once."""
    await wait_for_go(store)
    for _ in range(3):
        await send_one(store, "run", "other", b'"%s"' % (b"x" * 4_000_000))
    handoff = await hand_off(store)
    assert handoff.receipts[0].unconsumed == 4
    [grant] = handoff.grants
    assert [message.name for message in grant.inbox] == ["other", "other", "other", "go"]


async def test_a_run_whose_journal_is_too_large_for_one_answer_is_claimed(
    store: LibsqlStore,
) -> None:
    """Its journal is then read by itself, in pages."""
    [grant] = await granted(store)
    value = "x" * 4_000_000
    for n in range(1, 5):
        data = as_json({"steps": {f"step {n}": {"ok": True, "value": value}}})
        await store.append([Entry("run", grant.lease.epoch, n, data)])
    await store.release([grant.lease])
    [again] = await store.claim("bob", HOUR, 5)
    assert list(again.snapshot["steps"]) == ["step 1", "step 2", "step 3", "step 4"]


async def test_a_page_that_is_too_large_for_one_answer_is_found(store: LibsqlStore) -> None:
    """Summaries of ten thousand runs are read in pages of the answer."""
    runs = [NewRun(f"{n:05}", "mail", FIRST, summary=b"x" * 1024) for n in range(10_000)]
    await store.enqueue(runs)
    page = await store.search(Query(workflows=("mail",)), 10_000)
    assert len(page.runs) == 10_000
    assert {len(run.summary) for run in page.runs} == {1024}


async def test_a_value_that_is_too_large_is_refused(store: LibsqlStore) -> None:
    """A value of the declared size is accepted; a larger one is refused before it is sent."""
    limit = store.capabilities.max_value_size
    room = limit - len(as_json(large("a", 0)))
    await store.save("run", large("a", room))
    assert await steps(store) == ["a"]
    with pytest.raises(ValueTooLarge):
        await store.save("run", large("a", room + 1))


async def test_a_value_that_the_server_refuses_is_too_large(sqld_url: str) -> None:
    """`max_value_size` can be larger than the server's limit; the error is the same."""
    async with opened(sqld_url, max_value_size=20_000_000) as store:
        with pytest.raises(ValueTooLarge, match="6,000,") as caught:
            await store.save("run", large("a", 6_000_000))
        assert "too big" in str(caught.value.__cause__)
