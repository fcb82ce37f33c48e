"""Queues in directories: what a claim reads, and what remains of a queue."""

import logging
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from perdure.errors import StoreCorrupted, StoreError
from perdure.filenames import safe_name
from perdure.store import Grant, LeaseRequest, NewRun, Refusal, Rest, SupportedVersions
from perdure.stores._documents.records import Wake
from perdure.stores.file import FileStore
from perdure.stores.file.layout import RunPaths
from perdure.stores.file.run import FileRun
from perdure.stores.file.wakes import FileScan
from perdure.testing.clock import TestClock
from perdure.testing.conformance.harness import acquire_run, write_rest
from perdure.testing.conformance.queues import queued
from perdure.testing.conformance.samples import as_json, snapshot
from tests.stores.crashes import HOUR, MOVES, check_move
from tests.stores.file.test_conformance import crashing_store

SECOND = timedelta(seconds=1)


@pytest.fixture
def clock() -> TestClock:
    return TestClock()


@pytest.fixture
async def store(tmp_path: Path, clock: TestClock) -> AsyncIterator[FileStore]:
    async with FileStore(tmp_path, clock=clock, durability="normal") as store:
        yield store


@pytest.fixture
def read_files(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files whose wake lines were read."""
    files: list[Path] = []
    read_file = FileScan._file

    def spy(scan: FileScan, path: Path) -> list[Wake]:
        files.append(path)
        return read_file(scan, path)

    monkeypatch.setattr(FileScan, "_file", spy)
    return files


@pytest.fixture
def read_heads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The runs whose heads were read."""
    ids: list[str] = []
    read_head = FileRun.read_head

    def spy(run: FileRun) -> Any:
        ids.append(run.id)
        return read_head(run)

    monkeypatch.setattr(FileRun, "read_head", spy)
    return ids


async def claimed(store: FileStore, limit: int = 10, **options: Any) -> list[str]:
    grants = await store.claim("ana", HOUR, limit, **options)
    return [grant.lease.id for grant in grants]


class TestWhatIsRead:
    async def test_a_claim_reads_no_wake_file_of_another_queue(
        self, store: FileStore, tmp_path: Path, read_files: list[Path]
    ) -> None:
        """Nor does a claim of runs in no queue read those of any queue."""
        await store.enqueue(
            [queued(f"{queue}{n}", queue) for n in range(20) for queue in ("", "a", "a/1", "b")]
        )
        for queue, directory in (
            ("a", tmp_path / "queues" / safe_name("a")),
            ("", tmp_path / "wakes"),
        ):
            read_files.clear()
            assert await claimed(store, queues={queue: 10}) == [f"{queue}{n}" for n in range(10)]
            assert {path.parent for path in read_files} == {directory}

    async def test_a_claim_reads_no_run_that_it_cannot_drive(
        self, store: FileStore, read_heads: list[str]
    ) -> None:
        """Their wake lines say of which workflow and version they are."""
        await store.enqueue([queued(f"other{n}", workflow="other") for n in range(50)])
        await store.enqueue([queued(f"new{n}", version=2) for n in range(50)])
        await store.enqueue([queued("old", version=1)])
        read_heads.clear()
        assert await claimed(store, supports=[SupportedVersions("order", 1, 1)]) == ["old"]
        assert await claimed(store, supports=[SupportedVersions("order", 1, 1)]) == []
        assert set(read_heads) == {"old"}

    async def test_a_line_with_a_previous_version_is_read_once(
        self, store: FileStore, clock: TestClock, read_heads: list[str]
    ) -> None:
        """A worker that cannot drive a run does not read it at every poll."""
        await store.enqueue([queued("run")])
        await write_rest(store, await acquire_run(store), Rest("suspended", clock.now(), version=2))
        assert await claimed(store, supports=[SupportedVersions("order", 1, 1)]) == []
        read_heads.clear()
        assert await claimed(store, supports=[SupportedVersions("order", 1, 1)]) == []
        assert read_heads == []
        assert await claimed(store, supports=[SupportedVersions("order", 2, 2)]) == ["run"]

    async def test_a_line_that_is_out_of_date_does_not_change_the_order(
        self, store: FileStore, clock: TestClock
    ) -> None:
        """A run that was due before, and is due again, takes its turn."""
        others = [queued(f"{n}", "x", wake_at=clock.now()) for n in range(5)]
        await store.enqueue([queued("again"), *others])
        later = clock.now() + 10 * SECOND
        await write_rest(store, await acquire_run(store, "again"), Rest("suspended", later))
        await clock.advance(5 * SECOND)
        await store.enqueue([queued("first")])
        await clock.advance(10 * SECOND)
        assert await claimed(store, 1) == ["first"]
        assert await claimed(store, 1) == ["again"]


class TestWhatRemains:
    async def test_a_queue_without_runs_leaves_no_directory(
        self, store: FileStore, tmp_path: Path, clock: TestClock
    ) -> None:
        """Although no worker claims from a queue that is not listed."""
        await store.enqueue([queued("run", "emails/42"), queued("other", "emails/43")])
        (grant,) = await store.claim("ana", HOUR, 1, queues={"emails/42": 1})
        await write_rest(store, grant, Rest("completed"))
        await clock.advance(2 * HOUR)
        assert list(await store.queues(clock.now(), 10)) == ["emails/43"]
        assert [path.name for path in (tmp_path / "queues").iterdir()] == [safe_name("emails/43")]
        await store.enqueue([queued("new", "emails/42")])
        assert list(await store.queues(clock.now(), 10)) == ["emails/42", "emails/43"]

    async def test_another_process_lists_the_queues_by_their_lines(
        self, store: FileStore, tmp_path: Path, clock: TestClock
    ) -> None:
        """The names of directories are not those of the queues."""
        names = ["b", "a/ü", "x" * 500]
        await store.enqueue([queued(name[:9], name) for name in names])
        async with FileStore(tmp_path, clock=clock) as another:
            assert list(await another.queues(clock.now(), 10)) == sorted(names)

    async def test_a_run_that_left_its_queue_is_not_claimed_from_it(
        self, store: FileStore, clock: TestClock
    ) -> None:
        """Its old line is still there, but its head says that it is in no queue."""
        await store.enqueue([queued("run", "a")])
        await store.save("run", snapshot(status="suspended", wake_at=clock.now()))
        assert await claimed(store, queues={"a": 10}) == []
        assert list(await store.queues(clock.now(), 10)) == []
        assert await claimed(store) == ["run"]


class TestCrashes:
    @pytest.mark.parametrize("verb", list(MOVES))
    async def test_a_run_is_found_in_the_queue_and_version_that_it_has(
        self, verb: str, tmp_path: Path, clock: TestClock
    ) -> None:
        """After a crash between any two writes."""
        for changes in range(100):
            directory = tmp_path / str(changes)
            async with (
                FileStore(directory, clock=clock, durability="normal") as store,
                crashing_store(directory, clock, changes) as dying,
            ):
                if await check_move(store, dying, clock, MOVES[verb]):
                    return
        pytest.fail("this verb makes more than 100 changes")


class TestDamage:
    async def test_a_run_whose_head_is_damaged_is_logged_once(
        self,
        store: FileStore,
        tmp_path: Path,
        clock: TestClock,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        """However often it is found; once repaired, it is claimed."""
        await store.enqueue([queued("bad"), queued("good")])
        head = RunPaths(tmp_path / "runs", "bad").head
        content = head.read_bytes()
        head.write_bytes(b"?")
        with caplog.at_level(logging.ERROR):
            assert await claimed(store) == ["good"]
            for _ in range(20):
                await clock.advance(timedelta(minutes=1))
                assert await claimed(store) == []
        assert len(caplog.records) == 1
        head.write_bytes(content)
        await clock.advance(HOUR)
        assert "bad" in await claimed(store)

    async def test_a_request_for_a_damaged_run_affects_no_other(
        self, store: FileStore, tmp_path: Path
    ) -> None:
        """It is refused with the reason."""
        await store.enqueue([queued("bad"), queued("good")])
        RunPaths(tmp_path / "runs", "bad").head.write_bytes(b"?")
        requests = [LeaseRequest(id, "ana", HOUR) for id in ("bad", "good")]
        refusal, grant = await store.acquire(requests)
        assert isinstance(refusal, Refusal)
        assert refusal.reason == "unreadable"
        assert "damaged" in refusal.error
        assert isinstance(grant, Grant)
        assert list(await store.enqueue([queued("bad"), queued("new")])) == [False, True]


class TestLayout:
    async def test_a_newer_layout_is_refused(self, tmp_path: Path) -> None:
        """The error says what to do, and nothing is written."""
        (tmp_path / "layout").write_text("3")
        async with FileStore(tmp_path) as store:
            with pytest.raises(
                StoreError,
                match=r"newer .* \(layout 3; this version supports layouts up to 2\): upgrade",
            ):
                await store.load("run")
            assert not (tmp_path / "runs").exists()
            (tmp_path / "layout").write_text("2")
            assert await store.load("run") is None

    async def test_a_directory_without_a_number_is_given_one(self, tmp_path: Path) -> None:
        """Also one that an earlier version has written."""
        async with FileStore(tmp_path) as store:
            await store.enqueue([NewRun("run", "w", as_json(snapshot()))])
        assert (tmp_path / "layout").read_text() == "2"
        (tmp_path / "layout").unlink()
        async with FileStore(tmp_path) as store:
            assert await claimed(store) == ["run"]
        assert (tmp_path / "layout").read_text() == "2"

    async def test_a_damaged_number_is_corruption(self, tmp_path: Path) -> None:
        """It is not guessed."""
        (tmp_path / "layout").write_text("two")
        async with FileStore(tmp_path) as store:
            with pytest.raises(StoreCorrupted, match="layout"):
                await store.load("run")
