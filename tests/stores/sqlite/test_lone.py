"""A lone write on a SQLite file: in place while that is quick, in the writer's thread otherwise."""

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from perdure.store import Entry, LeaseRequest, Verdict
from perdure.stores.sqlite import inline as _sqlite_lone
from perdure.stores.sqlite.inline import Lone
from perdure.stores.sqlite.store import SqliteStore
from perdure.testing.conformance.harness import as_json, snapshot
from perdure.testing.conformance.samples import delta

MINUTE = timedelta(minutes=1)


class Run:
    """A leased run that adds one entry after another."""

    def __init__(self, store: SqliteStore, epoch: int) -> None:
        self.store = store
        self._epoch = epoch
        self._n = 0

    async def append(self) -> Verdict:
        self._n += 1
        [verdict] = await self.store.append([Entry("run", self._epoch, self._n, delta("a"))])
        return verdict


@pytest.fixture
async def run(tmp_path: Path) -> AsyncIterator[Run]:
    async with SqliteStore(tmp_path / "runs.db", busy_timeout=5) as store:
        await store.load("run")  # the file is there
        [grant] = await store.acquire(
            [LeaseRequest("run", "me", MINUTE, create=as_json(snapshot()))]
        )
        assert grant is not None
        yield Run(store, grant.lease.epoch)


@pytest.fixture
def outcomes(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each write that might have been was made in place."""
    made: list[bool] = []
    commit: Callable[..., Any] = Lone.commit

    def counted(lone: Lone, verb: Any) -> Any:
        done = commit(lone, verb)
        made.append(done is not None)
        return done

    monkeypatch.setattr(Lone, "commit", counted)
    # A disk that is slow today must not decide what is tested here.
    monkeypatch.setattr(_sqlite_lone, "_QUICK_SECONDS", 60)
    return made


async def test_a_lone_write_is_made_in_place(run: Run, outcomes: list[bool]) -> None:
    """Nobody else wants the event loop, and no thread is woken."""
    assert await run.append() is Verdict.ACCEPTED
    assert outcomes == [True]


async def test_others_are_not_kept_waiting(run: Run, outcomes: list[bool]) -> None:
    """Where something else is ready to go on, the writer's thread writes."""
    ran: list[str] = []
    asyncio.get_running_loop().call_soon(ran.append, "another")
    assert await run.append() is Verdict.ACCEPTED
    assert outcomes == [False]
    assert ran == ["another"]


async def test_on_a_slow_disk_a_thread_waits(
    run: Run, outcomes: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Commits that take long are kept from the event loop, until they are quick again."""
    monkeypatch.setattr(_sqlite_lone, "_QUICK_SECONDS", 0)
    await run.append()
    await run.append()
    assert outcomes[-1] is False
    monkeypatch.setattr(_sqlite_lone, "_QUICK_SECONDS", 60)
    assert await run.append() is Verdict.ACCEPTED
    assert outcomes[-1] is True


async def test_a_lock_is_waited_for_in_the_thread(
    run: Run, outcomes: list[bool], tmp_path: Path
) -> None:
    """Another process has the file: the event loop goes on, and the write is made after it."""
    other = sqlite3.connect(tmp_path / "runs.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    asyncio.get_running_loop().call_later(0.2, other.execute, "COMMIT")
    await asyncio.sleep(0)
    assert await run.append() is Verdict.ACCEPTED
    assert outcomes == [False]
    other.close()


async def test_a_stale_owner_is_fenced_in_place_too(run: Run, outcomes: list[bool]) -> None:
    """It is the same statement, whoever drives it."""
    await run.store.save("run", snapshot("b"))
    assert await run.append() is Verdict.FENCED
    assert outcomes == [True]


async def test_a_write_that_cannot_be_is_told_by_the_thread(
    run: Run, outcomes: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What fails in place has written nothing, and is done or refused as any other."""

    def torn(*_: Any) -> Any:
        raise sqlite3.OperationalError("disk I/O error")

    monkeypatch.setattr(_sqlite_lone, "drive", torn)
    assert await run.append() is Verdict.ACCEPTED
    assert outcomes == [False]
    monkeypatch.undo()
    found = await run.store.load("run")
    assert found is not None
    assert list(found["steps"]) == ["a"]


async def test_the_log_does_not_grow_for_ever(run: Run, tmp_path: Path) -> None:
    """The thread moves it into the file now and then, and it is used again from its beginning."""
    log = tmp_path / "runs.db-wal"
    for _ in range(600):
        await run.append()
    await asyncio.sleep(0.1)
    half = log.stat().st_size
    for _ in range(1200):
        await run.append()
    assert log.stat().st_size < 2 * half
