"""FileStore implements the whole contract, and acknowledged writes survive a crash."""

import json
import logging
import subprocess
import sys
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from perdure.errors import InvalidArgument, StoreClosed, StoreCorrupted, StoreError
from perdure.store import Entry, Grant, LeaseRequest, NewRun, Store
from perdure.stores._documents.records import Wake
from perdure.stores.file import FileStore
from perdure.stores.file.disk import Disk
from perdure.stores.file.folder import Folder
from perdure.stores.file.layout import RunPaths
from perdure.stores.file.run import FileRun
from perdure.stores.file.storage import FileStorage
from perdure.stores.file.wakes import FileWakes
from perdure.testing.clock import TestClock
from perdure.testing.conformance import StoreConformance
from perdure.testing.conformance.harness import supports
from perdure.testing.conformance.samples import as_json, snapshot
from tests.stores.append_speed import cost_of_length
from tests.stores.crashes import VERBS, Crash, check_delete, check_rest_with_delete, survives_crash
from tests.stores.kit_parts import ClockConformance

HOUR = timedelta(hours=1)


class CrashingDisk(Disk):
    """Makes a number of changes; every later one crashes before it is made."""

    def __init__(self, changes: int) -> None:
        super().__init__(sync=False)
        self.left = changes

    def _count(self) -> None:
        if self.left == 0:
            raise Crash
        self.left -= 1

    def write(self, path: Path, content: bytes) -> None:
        self._count()
        super().write(path, content)

    def rename(self, path: Path, target: Path) -> None:
        self._count()
        super().rename(path, target)

    def overwrite(self, path: Path, content: bytes) -> None:
        self._count()
        super().overwrite(path, content)

    def append(self, descriptor: int, content: bytes) -> None:
        self._count()
        super().append(descriptor, content)

    def append_shared(self, descriptor: int, content: bytes) -> None:
        self._count()
        super().append_shared(descriptor, content)

    def truncate(self, descriptor: int, size: int) -> None:
        self._count()
        super().truncate(descriptor, size)

    def remove(self, path: Path) -> bool:
        self._count()
        return super().remove(path)


def crashing_store(directory: Path, clock: TestClock, changes: int) -> FileStore:
    store = FileStore(directory, clock=clock, durability="normal")
    storage = store._backend._storage
    assert isinstance(storage, FileStorage)
    storage.folder.disk = CrashingDisk(changes)
    return store


class TestFileStore(StoreConformance):
    """With a test clock."""

    @pytest.fixture
    async def store(self, tmp_path: Path) -> AsyncIterator[FileStore]:
        self.clock = TestClock()
        self.directory = tmp_path / "runs"
        self.crashed: list[FileStore] = []
        async with FileStore(self.directory, clock=self.clock) as store:
            yield store
        for crashed in self.crashed:
            await crashed.close()

    async def reopen(self, store: Store, *, prefix: str = "") -> FileStore:
        assert self.clock is not None
        return FileStore(self.directory, prefix=prefix, clock=self.clock)

    async def crashing(self, store: Store, writes: int) -> FileStore:
        assert self.clock is not None
        self.crashed.append(crashing_store(self.directory, self.clock, writes))
        return self.crashed[-1]


class TestFileStoreOnSystemClock(ClockConformance):
    """In real time, and with other processes."""

    @pytest.fixture
    async def store(self, tmp_path: Path) -> AsyncIterator[FileStore]:
        self.directory = tmp_path / "runs"
        self.url = f"file://{self.directory}"
        async with FileStore(self.directory, durability="normal") as store:
            yield store

    async def reopen(self, store: Store, *, prefix: str = "") -> FileStore:
        return FileStore(self.directory, prefix=prefix, durability="normal")


@pytest.fixture
def clock() -> TestClock:
    return TestClock()


@pytest.fixture
async def store(tmp_path: Path, clock: TestClock) -> AsyncIterator[FileStore]:
    async with FileStore(tmp_path, clock=clock) as store:
        yield store


async def granted(store: FileStore, id: str = "run") -> Grant:
    (grant,) = await store.acquire([LeaseRequest(id, "ana", HOUR, create=as_json(snapshot()))])
    assert isinstance(grant, Grant)
    return grant


def step(grant: Grant, n: int, key: str) -> Entry:
    return Entry(grant.lease.id, grant.lease.epoch, n, as_json(snapshot(key)))


def everything(wake: Wake) -> bool:
    return True


def the_file(directory: Path, kind: str) -> Path:
    (path,) = directory.glob(f"runs/*/*.{kind}")
    return path


class TestDamage:
    async def test_a_torn_last_line_is_reported_and_cut_off(
        self, store: FileStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        """It was not acknowledged: the next owner continues in its place."""
        await store.append([step(await granted(store), 1, "a")])
        journal = the_file(tmp_path, "journal")
        whole = journal.read_bytes()
        for torn in (b"0", b"12345678 [[", whole[:-1], whole[: len(whole) // 2], b"\0" * 9, b"x\n"):
            journal.write_bytes(whole + torn)
            assert await self.steps(store) == ["a"]
            caplog.clear()
            with caplog.at_level(logging.WARNING):
                await store.append([step(await granted(store), 2, "b")])
            assert str(journal) in caplog.text
            assert await self.steps(store) == ["a", "b"]

    async def test_a_line_damaged_in_the_middle_is_corruption(
        self, store: FileStore, tmp_path: Path
    ) -> None:
        """An acknowledged entry is never silently skipped."""
        grant = await granted(store)
        for n in (1, 2):
            await store.append([step(grant, n, f"{n}")])
        journal = the_file(tmp_path, "journal")
        journal.write_bytes(journal.read_bytes().replace(b'"1"', b'"7"', 1))
        with pytest.raises(StoreCorrupted, match="journal"):
            await store.load("run")

    @pytest.mark.parametrize("damage", [b"", b"{", b'{"id":"run"}\n', b"\0" * 100])
    async def test_a_damaged_snapshot_is_corruption(
        self, store: FileStore, tmp_path: Path, damage: bytes
    ) -> None:
        """A run that cannot be read is not treated as missing."""
        await store.save("run", snapshot("a"))
        the_file(tmp_path, "json").write_bytes(damage)
        with pytest.raises(StoreCorrupted, match="json"):
            await store.load("run")

    async def test_a_changed_byte_is_detected(self, store: FileStore, tmp_path: Path) -> None:
        """The snapshot has a checksum."""
        await store.save("run", snapshot("a"))
        head = the_file(tmp_path, "json")
        head.write_bytes(head.read_bytes().replace(b'"value":"a"', b'"value":"b"'))
        with pytest.raises(StoreCorrupted):
            await store.load("run")

    async def test_a_damaged_run_is_not_listed_and_can_be_deleted(
        self, store: FileStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        """It is logged, and the others are listed and counted."""
        await store.save("good", snapshot())
        await store.save("bad", snapshot())
        RunPaths(tmp_path / "runs", "bad").head.write_bytes(b"?")
        assert [line.id for line in await store.list()] == ["good"]
        assert "bad" in caplog.text
        assert sum((await store.stats()).by_status.values()) == 1
        assert await store.delete("bad")
        assert await store.load("bad") is None

    async def test_a_run_that_cannot_be_read_does_not_block_others(
        self, store: FileStore, tmp_path: Path, clock: TestClock
    ) -> None:
        """It is logged and postponed; later runs are claimed."""
        earlier = clock.now() - HOUR
        await store.enqueue([NewRun("bad", "w", as_json(snapshot()), earlier)])
        await store.enqueue([NewRun("worse", "w", as_json(snapshot()), earlier)])
        await store.enqueue([NewRun("good", "w", as_json(snapshot()))])
        head = RunPaths(tmp_path / "runs", "bad").head
        head.write_bytes(head.read_bytes().replace(b'"steps"', b'"stepS"'))
        RunPaths(tmp_path / "runs", "worse").head.write_bytes(b"?")
        for expected in (["good"], []):
            grants = await store.claim("ana", HOUR, 10)
            assert [grant.lease.id for grant in grants] == expected
        assert [due.id for due in await store.due(clock.now(), 10)] == []

    async def test_a_run_survives_the_loss_of_its_lease_file(
        self, store: FileStore, tmp_path: Path, clock: TestClock
    ) -> None:
        """Leases are not synced: a power loss may take one, and the run continues regardless."""
        await store.save("run", snapshot("a", status="waiting", event="paid"))
        grant = await granted(store)
        await store.append([step(grant, 1, "b")])
        the_file(tmp_path, "lease").unlink()
        await clock.advance(HOUR)
        (again,) = await store.claim("bob", HOUR, 10)
        assert list(again.snapshot["steps"]) == ["a", "b"]
        assert again.lease.epoch > grant.lease.epoch

    @staticmethod
    async def steps(store: FileStore) -> list[str]:
        loaded = await store.load("run")
        assert loaded is not None
        return list(loaded["steps"])


class TestCrashes:
    @pytest.mark.parametrize("verb", list(VERBS))
    async def test_a_crash_between_any_two_writes_loses_no_run(
        self, verb: str, tmp_path: Path, clock: TestClock
    ) -> None:
        """Acknowledged writes are stored, and every run that is not over is found again."""
        for changes in range(100):
            directory = tmp_path / str(changes)
            async with (
                FileStore(directory, clock=clock, durability="normal") as store,
                crashing_store(directory, clock, changes) as dying,
            ):
                if await survives_crash(store, dying, clock, VERBS[verb]):
                    return
        pytest.fail("this verb makes more than 100 changes")

    async def test_a_run_deleted_by_its_rest_is_deleted_whole(
        self, tmp_path: Path, clock: TestClock
    ) -> None:
        """After a crash it exists with all its steps, or not at all."""
        for changes in range(20):
            directory = tmp_path / str(changes)
            async with (
                FileStore(directory, clock=clock, durability="normal") as store,
                crashing_store(directory, clock, changes) as dying,
            ):
                if await check_rest_with_delete(store, dying):
                    return
        pytest.fail("this rest makes more than 20 changes")

    async def test_a_deleted_run_stays_deleted(self, tmp_path: Path, clock: TestClock) -> None:
        """After a crash it exists whole or not at all: nothing of it reappears."""
        for changes in range(20):
            directory = tmp_path / str(changes)
            async with (
                FileStore(directory, clock=clock, durability="normal") as store,
                crashing_store(directory, clock, changes) as dying,
            ):
                if await check_delete(store, dying):
                    return
        pytest.fail("deleting makes more than 20 changes")

    def test_acknowledged_entries_survive_a_kill(self, tmp_path: Path) -> None:
        """A hundred kills; an entry that was not acknowledged is stored whole or not at all."""
        script = Path(__file__).with_name("killed_store.py")
        process = subprocess.run(
            [sys.executable, str(script), str(tmp_path), "100", "7"],
            capture_output=True,
            text=True,
            timeout=110,
            check=False,
        )
        assert process.returncode == 0, process.stderr
        counts = json.loads(process.stdout)
        assert 0 < counts["acknowledged"] <= counts["stored"]


class TestCost:
    @pytest.mark.alone
    async def test_an_entry_costs_the_same_in_a_long_run(self, tmp_path: Path) -> None:
        """The cost of an append does not grow with the journal."""
        async with FileStore(tmp_path, durability="normal") as store:
            assert await cost_of_length(store) < 1.3

    async def test_due_reads_only_runs_that_may_be_due(
        self, store: FileStore, clock: TestClock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The files of sleeping runs are not opened."""
        sleeping = [NewRun(f"{n}", "w", as_json(snapshot()), clock.now() + HOUR) for n in range(99)]
        await store.enqueue([*sleeping, NewRun("due", "w", as_json(snapshot()))])
        read: list[str] = []
        read_head = FileRun.read_head

        def spy(run: FileRun) -> Any:
            read.append(run.id)
            return read_head(run)

        monkeypatch.setattr(FileRun, "read_head", spy)
        assert [due.id for due in await store.due(clock.now(), 10)] == ["due"]
        assert set(read) == {"due"}


class TestWakes:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Folder:
        folder = Folder(tmp_path / "store", Disk(sync=False))
        folder.create()
        return folder

    @pytest.fixture
    def wakes(self, folder: Folder) -> FileWakes:
        return FileWakes(folder)

    async def lines(self, wakes: FileWakes, until: int, queue: str = "") -> list[Wake]:
        return await wakes.scan(queue, until, until, everything).next(10_000)

    async def test_many_lines_are_split_into_parts_in_order(
        self, wakes: FileWakes, folder: Folder
    ) -> None:
        """A claim of a few runs then reads a few lines; later lines are merged in order."""
        await wakes.add([Wake(60_000_000 + n % 7, f"{n:05}", None) for n in range(5_000)], 0)
        scan = wakes.scan("", 120_000_000, 0, everything)
        before = await scan.next(10_000)
        (path,) = scan.large_files()
        wakes.split(path)
        await wakes.add([Wake(60_000_003, "late", "w")], 0)
        assert len(list(folder.wakes.iterdir())) == 6
        after = await self.lines(wakes, 120_000_000)
        assert [wake for wake in after if wake.id != "late"] == before
        assert sorted(after, key=lambda wake: (wake.at, wake.id)) == after

    async def test_sweeping_keeps_lines_that_are_current(
        self, wakes: FileWakes, folder: Folder
    ) -> None:
        """Lines of runs that are over are removed, those of postponed runs are moved."""
        await wakes.add([Wake(1, id, None) for id in ("over", "moved", "true")], 0)
        plans = {"moved": Wake(600_000_000, "moved", "w"), "true": Wake(1, "true", None)}

        async def plan(wake: Wake) -> Wake | None:
            return plans.get(wake.id)

        await wakes.sweep(folder.wakes / "0000000000", plan)
        assert [wake.id for wake in await self.lines(wakes, 2)] == ["true"]
        assert [wake.id for wake in await self.lines(wakes, 600_000_000)] == ["true", "moved"]
        plans.clear()
        await wakes.sweep(folder.wakes / "0000000000", plan)
        assert [path.name for path in folder.wakes.iterdir()] == ["0000000010"]

    async def test_a_torn_line_harms_no_other(self, wakes: FileWakes, folder: Folder) -> None:
        """It is skipped, and the next line starts on its own."""
        await wakes.add([Wake(1, "a", None)], 0)
        with (folder.wakes / "0000000000").open("ab") as file:
            file.write(b"\n12345678 [1,")
        await wakes.add([Wake(2, "b", None)], 0)
        assert [wake.id for wake in await self.lines(wakes, 2)] == ["a", "b"]

    async def test_lines_do_not_accumulate(
        self, store: FileStore, tmp_path: Path, clock: TestClock
    ) -> None:
        """A run that is claimed and renewed for days leaves few lines."""
        await store.enqueue([NewRun("run", "w", as_json(snapshot()))])
        for _ in range(50):
            (grant,) = await store.claim("ana", HOUR, 10)
            await store.renew([grant.lease], 2 * HOUR)
            await clock.advance(HOUR)
            assert list(await store.claim("bob", HOUR, 10)) == []
            await clock.advance(HOUR)
        assert len(list((tmp_path / "wakes").iterdir())) < 5


class TestUse:
    async def test_a_line_with_a_previous_workflow_claims_nothing(
        self, store: FileStore, clock: TestClock
    ) -> None:
        """A run that was saved with another workflow belongs to that one."""
        await store.enqueue([NewRun("run", "old", as_json(snapshot()))])
        whole = snapshot(status="suspended", wake_at=clock.now(), workflow="new")
        await store.save("run", whole)
        assert list(await store.due(clock.now(), 10, supports=supports("old"))) == []
        assert list(await store.claim("ana", HOUR, 10, supports=supports("old"))) == []
        assert len(await store.claim("ana", HOUR, 10, supports=supports("new"))) == 1

    async def test_the_file_is_json_that_other_programs_can_read(
        self, store: FileStore, tmp_path: Path
    ) -> None:
        """One object with the head and the snapshot."""
        await store.save("checkout/1", snapshot("a", workflow="order"))
        content = json.loads(the_file(tmp_path, "json").read_text())
        assert content["id"] == "checkout/1"
        assert content["snapshot"] == snapshot("a", workflow="order")
        assert "checkout_1" in the_file(tmp_path, "json").name

    async def test_durability_is_declared(self, tmp_path: Path) -> None:
        """In the capabilities."""
        async with FileStore(tmp_path) as full, FileStore(tmp_path, durability="normal") as normal:
            assert full.capabilities.survives == "power_loss"
            assert normal.capabilities.survives == "process_crash"

    @pytest.mark.parametrize(
        ("parameter", "options"),
        [
            ("directory", {"directory": 5}),
            ("directory", {"directory": ""}),
            ("durability", {"directory": "x", "durability": "maybe"}),
            ("prefix", {"directory": "x", "prefix": "\0"}),
        ],
    )
    def test_parameters_are_checked(self, parameter: str, options: dict[str, Any]) -> None:
        """The error names the parameter."""
        with pytest.raises(InvalidArgument, match=f"^{parameter}: expected"):
            FileStore(**options)

    async def test_a_bad_cursor_is_refused(self, store: FileStore) -> None:
        """`after` must be the cursor of a listed run."""
        with pytest.raises(InvalidArgument, match="after"):
            await store.list(after="yesterday")

    async def test_set_up_is_retried_after_a_failure(self, tmp_path: Path) -> None:
        """A directory that cannot be created raises `StoreError` until it can."""
        (tmp_path / "place").write_text("a file")
        async with FileStore(tmp_path / "place" / "runs") as store:
            with pytest.raises(StoreError, match="place"):
                await store.load("run")
            (tmp_path / "place").unlink()
            assert await store.load("run") is None

    async def test_a_closed_store_refuses_calls(self, tmp_path: Path) -> None:
        """With `StoreClosed`."""
        store = FileStore(tmp_path)
        await store.close()
        with pytest.raises(StoreClosed):
            await store.append([])

    def test_a_store_that_was_used_before_a_fork_raises(self, tmp_path: Path) -> None:
        """Its threads do not exist in the child, which would wait for them forever."""
        process = subprocess.run(
            [sys.executable, "-c", USED_BEFORE_A_FORK, str(tmp_path)],
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        )
        assert "used before this process was forked" in process.stdout


USED_BEFORE_A_FORK = """
import asyncio, os, sys
from perdure.errors import StoreError
from perdure.stores import FileStore

async def use(store):
    try:
        await store.load("run")
    except StoreError as error:
        print(error, flush=True)
        await store.close()

store = FileStore(sys.argv[1])
asyncio.run(use(store))
if child := os.fork():
    os.waitpid(child, 0)
else:
    asyncio.run(use(store))
    os._exit(0)
"""
