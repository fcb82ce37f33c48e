"""Claims and leases while another process locks the file between two transactions."""

import sqlite3
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from perdure.errors import StoreUnavailable
from perdure.store import Entry, Grant, LeaseRequest, NewRun, SupportedVersions
from perdure.stores.sqlite import SqliteStore, connection, sqlite, threads
from perdure.stores.sqlite.statements import Outcome
from perdure.testing.conformance.harness import send_one
from perdure.testing.conformance.samples import as_json, delta, snapshot

MINUTE = timedelta(minutes=1)
SUPPORTS = [SupportedVersions("flow", 0, 1)]
# So many due runs are claimed by the writer thread.
RUNS = [NewRun(f"{number:02}", "flow", as_json(snapshot())) for number in range(40)]


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SqliteStore]:
    async with sqlite(tmp_path / "runs.db", busy_timeout=0.1) as store:
        yield store


@pytest.fixture
def other(tmp_path: Path) -> Iterator[sqlite3.Connection]:
    """Return a connection like that of another process."""
    path = tmp_path / "runs.db"
    with closing(sqlite3.connect(path, isolation_level=None, check_same_thread=False)) as opened:
        yield opened


@pytest.fixture
def after_round(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """Return a function that lets the writer thread call its argument after each round."""
    commit_round = connection.commit_round

    def add(call: Callable[[Any], None]) -> None:
        def commit(*arguments: Any) -> Any:
            outcomes = commit_round(*arguments)
            call(outcomes)
            return outcomes

        monkeypatch.setattr(threads, "commit_round", commit)

    return add


async def test_a_claim_returns_its_leases_if_the_file_is_locked_before_it_looks_for_more(
    store: SqliteStore, other: sqlite3.Connection, after_round: Any
) -> None:
    """Another process took one of the due runs. No process would execute the others for long."""
    await store.enqueue(RUNS)

    def interfere(outcomes: list[Outcome]) -> None:
        if len(outcomes) > 1 and not other.in_transaction:
            other.execute("BEGIN IMMEDIATE")
        else:
            other.execute("UPDATE perdure_runs SET wake_at = 2 * wake_at WHERE id = '07'")

    after_round(interfere)
    grants = await store.claim("me", MINUTE, 30, supports=SUPPORTS)
    other.execute("ROLLBACK")
    assert [each.lease.id for each in grants] == [run.id for run in RUNS[:30] if run.id != "07"]


async def test_a_granted_lease_is_returned_if_the_file_is_locked_before_the_run_is_read(
    store: SqliteStore, other: sqlite3.Connection, after_round: Any
) -> None:
    """In WAL mode, reading waits for no lock."""
    request = LeaseRequest("run", "me", MINUTE, create=as_json(snapshot()))
    [grant] = await store.acquire([request])
    assert isinstance(grant, Grant)
    await store.append([Entry("run", grant.lease.epoch, 1, delta("a"))])
    await send_one(store, "run", "paid", b"1")
    await store.release([grant.lease])
    after_round(lambda _: other.in_transaction or other.execute("BEGIN IMMEDIATE"))
    requests = [LeaseRequest("missing", "me", MINUTE), request]
    _, again = await store.acquire(requests)
    other.execute("ROLLBACK")
    assert isinstance(again, Grant)
    assert list(again.snapshot["steps"]) == ["a"]
    assert [message.name for message in again.inbox] == ["paid"]


async def test_all_leases_of_a_call_are_granted_in_one_transaction(
    store: SqliteStore, other: sqlite3.Connection, after_round: Any
) -> None:
    """Two requests are for the same run."""
    await store.load("run")
    after_round(lambda _: other.in_transaction or other.execute("BEGIN IMMEDIATE"))
    first = LeaseRequest("run", "me", MINUTE, create=as_json(snapshot()), workflow="flow")
    answers = await store.acquire([first, LeaseRequest("run", "me", MINUTE)])
    other.execute("ROLLBACK")
    assert [isinstance(each, Grant) for each in answers] == [True, True]


async def test_a_claim_that_cannot_lock_the_file_fails(
    store: SqliteStore, other: sqlite3.Connection
) -> None:
    await store.enqueue(RUNS)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreUnavailable, match="locked"):
        await store.claim("me", MINUTE, 50, supports=SUPPORTS)
    other.execute("ROLLBACK")
    assert len(await store.claim("me", MINUTE, 50, supports=SUPPORTS)) == len(RUNS)
