"""A single write on a SQLite file: committed on the event loop while that is fast, otherwise by the
writer thread."""

import asyncio
import sqlite3
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from perdure.snapshot import RunStatus
from perdure.store import (
    Entry,
    Grant,
    Handoff,
    LeaseRequest,
    NewMessage,
    NewRun,
    Rest,
    SupportedVersions,
    Verdict,
)
from perdure.stores.sqlite import SqliteStore, sqlite
from perdure.stores.sqlite import inline as inline_module
from perdure.stores.sqlite.connection import commit_round
from perdure.stores.sqlite.inline import InlineCommit
from perdure.stores.sqlite.jobs import Checkpoint
from perdure.testing.conformance.harness import send_one
from perdure.testing.conformance.samples import as_json, delta, snapshot

MINUTE = timedelta(minutes=1)


class Run:
    """A leased run that appends one entry after another."""

    def __init__(self, store: SqliteStore, epoch: int) -> None:
        self.store = store
        self.epoch = epoch
        self._n = 0

    async def append(self) -> Verdict:
        self._n += 1
        [verdict] = await self.store.append([Entry("run", self.epoch, self._n, delta("a"))])
        return verdict


def rest(run: Run, status: RunStatus, *awaits: str) -> Entry:
    return Entry("run", run.epoch, 1, as_json(snapshot()), rest=Rest(status, None, awaits))


async def hand_off(run: Run) -> Handoff:
    """Send the event "go" to the run, and claim it."""
    supports = [SupportedVersions("flow", 1, 1)]
    message = NewMessage("run", "go", b"1")
    return await run.store.send_and_claim([message], "me", MINUTE, 10, supports=supports)


@pytest.fixture
async def run(tmp_path: Path) -> AsyncIterator[Run]:
    async with sqlite(tmp_path / "runs.db", busy_timeout=5) as store:
        await store.load("run")  # creates the file
        [grant] = await store.acquire(
            [LeaseRequest("run", "me", MINUTE, create=as_json(snapshot()), workflow="flow")]
        )
        assert isinstance(grant, Grant)
        yield Run(store, grant.lease.epoch)


@pytest.fixture
def attempts(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each attempt to commit inline, whether it was committed."""
    results: list[bool] = []
    commit: Callable[..., Any] = InlineCommit.commit

    def recorded(inline: InlineCommit, verb: Any) -> Any:
        committed = commit(inline, verb)
        results.append(committed is not None)
        return committed

    monkeypatch.setattr(InlineCommit, "commit", recorded)
    # The speed of this machine's disk must not affect these tests.
    monkeypatch.setattr(inline_module, "_FAST_SECONDS", 60)
    return results


async def test_a_single_write_is_committed_inline(run: Run, attempts: list[bool]) -> None:
    """Nothing else is ready on the event loop, and no thread is woken."""
    assert await run.append() is Verdict.ACCEPTED
    assert attempts == [True]


async def test_other_callbacks_are_not_delayed(run: Run, attempts: list[bool]) -> None:
    """If another callback is ready, the writer thread commits."""
    called: list[str] = []
    asyncio.get_running_loop().call_soon(called.append, "another")
    assert await run.append() is Verdict.ACCEPTED
    assert attempts == [False]
    assert called == ["another"]


async def test_on_a_slow_disk_the_thread_commits(
    run: Run, attempts: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slow commits do not block the event loop, until they are fast again."""
    monkeypatch.setattr(inline_module, "_FAST_SECONDS", 0)
    await run.append()
    await run.append()
    assert attempts[-1] is False
    monkeypatch.setattr(inline_module, "_FAST_SECONDS", 60)
    assert await run.append() is Verdict.ACCEPTED
    assert attempts[-1] is True


async def test_the_thread_waits_for_a_lock(run: Run, attempts: list[bool], tmp_path: Path) -> None:
    """While another process has locked the file, the event loop continues to run."""
    other = sqlite3.connect(tmp_path / "runs.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    asyncio.get_running_loop().call_later(0.2, other.execute, "COMMIT")
    await asyncio.sleep(0)
    assert await run.append() is Verdict.ACCEPTED
    assert attempts == [False]
    other.close()


async def test_a_stale_owner_is_fenced_inline_too(run: Run, attempts: list[bool]) -> None:
    """Inline commits run the same statements."""
    await run.store.save("run", snapshot("b"))
    assert await run.append() is Verdict.FENCED
    assert attempts == [True]


async def test_a_write_that_fails_inline_is_repeated_by_the_thread(
    run: Run, attempts: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The failed attempt has written nothing; the thread succeeds, or reports the error."""

    def fail(*_: Any) -> Any:
        raise sqlite3.OperationalError("disk I/O error")

    monkeypatch.setattr(inline_module, "drive", fail)
    assert await run.append() is Verdict.ACCEPTED
    assert attempts == [False]
    monkeypatch.undo()
    loaded = await run.store.load("run")
    assert loaded is not None
    assert list(loaded["steps"]) == ["a"]


async def test_a_message_and_a_claim_are_committed_inline(run: Run, attempts: list[bool]) -> None:
    """From a signal to the next step, no thread is woken."""
    await run.store.append([rest(run, "waiting", "go")])
    await send_one(run.store, "run", "go", b"1")
    [grant] = await run.store.claim("me", MINUTE, 10)
    assert [message.name for message in grant.inbox] == ["go"]
    assert attempts == [True, True, True]


async def test_a_message_and_its_run_are_one_commit(run: Run, attempts: list[bool]) -> None:
    """The run is leased in the transaction of the message, with everything that its owner reads."""
    await run.store.append([rest(run, "waiting", "go")])
    trace: list[str] = []
    connection = run.store._backend._database._inline._connection
    assert connection is not None
    connection.set_trace_callback(trace.append)
    handoff = await hand_off(run)
    connection.set_trace_callback(None)
    assert [grant.inbox[0].name for grant in handoff.grants] == ["go"]
    assert attempts == [True, True]
    assert trace[0] == "BEGIN IMMEDIATE"
    assert [one for one in trace if "COMMIT" in one] == trace[-1:]


async def test_a_message_and_its_run_wait_for_a_lock_in_the_thread(
    run: Run, attempts: list[bool], tmp_path: Path
) -> None:
    """The attempt on the event loop has written nothing, so the message is sent once."""
    await run.store.append([rest(run, "waiting", "go")])
    with closing(sqlite3.connect(tmp_path / "runs.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        asyncio.get_running_loop().call_later(0.2, other.execute, "COMMIT")
        await asyncio.sleep(0)
        handoff = await hand_off(run)
    [grant] = handoff.grants
    assert handoff.receipts[0].unconsumed == len(grant.inbox) == 1
    assert attempts == [True, False]


async def test_many_runs_are_claimed_by_the_thread(run: Run, attempts: list[bool]) -> None:
    """They would block the event loop; nothing was leased before they were counted."""
    ids = [f"due {number}" for number in range(5)]
    await run.store.enqueue([NewRun(id, "flow", as_json(snapshot())) for id in ids])
    grants = await run.store.claim("me", MINUTE, 10)
    assert [grant.lease.id for grant in grants] == ids
    assert attempts == [False]


async def test_a_claim_returns_its_leases_before_it_can_fail(run: Run, tmp_path: Path) -> None:
    """Another process takes one of two due runs, and more become due.

    A claim that looked for them could find the file locked. The thread would then repeat it,
    without the run that it has leased.
    """
    supports = [SupportedVersions("flow", 0, 1)]
    new = [NewRun(str(number), "flow", as_json(snapshot())) for number in range(8)]
    await run.store.enqueue(new[:2])
    verb = run.store._backend._leases.claim("me", MINUTE, 10, supports, {"": 10}, at_most=2)
    with closing(sqlite3.connect(tmp_path / "runs.db", isolation_level=None)) as connection:
        two_due = commit_round(connection, next(verb))
        await run.store.claim("other", MINUTE, 1, supports=supports)
        await run.store.enqueue(new[2:])
        claim = verb.send(two_due)
        granted = commit_round(connection, claim)
        with pytest.raises(StopIteration) as end:
            verb.send(granted)
    assert [each.lease.id for each in end.value.value] == ["1"]


async def test_slow_claims_do_not_block_the_event_loop(run: Run, attempts: list[bool]) -> None:
    """They may read many rows to find few. After a while it is tried again."""
    run.store._backend._database._inline._average_claim = 70.0
    for _ in range(3):
        assert await run.store.claim("me", MINUTE, 10) == []
    assert attempts == []
    await run.store.claim("me", MINUTE, 10)
    assert attempts == [True]


async def test_a_claim_that_finds_nothing_needs_no_lock(
    run: Run, attempts: list[bool], tmp_path: Path
) -> None:
    """An idle worker does not delay the writers of other processes, nor wait for them."""
    with closing(sqlite3.connect(tmp_path / "runs.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        assert await run.store.claim("me", MINUTE, 10) == []
    assert attempts == [True]


async def test_a_claim_that_finds_nothing_does_not_count_as_a_commit(
    run: Run, attempts: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Polling is fast on a slow disk, too: that must not make the next write block the loop."""
    durations: list[float] = []
    monkeypatch.setattr(InlineCommit, "record_duration", lambda _, each: durations.append(each))
    await run.store.claim("me", MINUTE, 10)
    assert attempts == [True]
    assert durations == []
    await run.append()
    assert len(durations) == 1


async def test_nothing_is_appended_to_the_log_during_a_checkpoint(
    run: Run, attempts: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite would not start the log from its beginning; such a write waits for the thread."""
    has_begun, may_end = threading.Event(), threading.Event()
    serve: Callable[..., None] = Checkpoint.serve

    def slow(checkpoint: Checkpoint, connection: sqlite3.Connection) -> None:
        has_begun.set()
        may_end.wait(10)
        serve(checkpoint, connection)

    monkeypatch.setattr(Checkpoint, "serve", slow)
    monkeypatch.setattr(inline_module, "_COMMITS_PER_CHECKPOINT", 1)
    await run.append()
    assert await asyncio.to_thread(has_begun.wait, 10)
    during = asyncio.create_task(run.append())
    done, _ = await asyncio.wait([during], timeout=0.05)
    assert not done
    may_end.set()
    assert await during is Verdict.ACCEPTED
    assert attempts == [True, False]


async def test_the_log_does_not_grow_without_bound(
    run: Run, attempts: list[bool], tmp_path: Path
) -> None:
    """The thread moves it into the file regularly, and SQLite reuses it from the beginning."""
    log = tmp_path / "runs.db-wal"
    for _ in range(600):
        await run.append()
    size = log.stat().st_size
    for _ in range(1200):
        await run.append()
    assert log.stat().st_size < 2 * size
    assert attempts.count(True) > 1700
