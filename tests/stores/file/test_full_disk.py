"""A full disk: calls fail with `StoreUnavailable`, and succeed when they are repeated."""

import errno
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from perdure import Ok, Step, durable
from perdure.errors import StoreError, StoreUnavailable
from perdure.store import Entry, Grant, LeaseRequest, Rest, Verdict
from perdure.stores._documents.records import Wake
from perdure.stores.file import FileStore
from perdure.stores.file.disk import Disk
from perdure.stores.file.folder import Folder
from perdure.stores.file.wakes import FileWakes
from perdure.testing.clock import TestClock
from perdure.testing.conformance.harness import FullStore, send_one
from perdure.testing.conformance.queues import queued
from perdure.testing.conformance.samples import as_json, snapshot
from tests.stores.crashes import HOUR, VERBS, Verb, step, survives_crash


class SmallDisk:
    """Has space for a number of writes and half of the next; then all fail until it is freed."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.error = errno.ENOSPC
        self.was_full = False
        self._writes_left: int | None = None
        self._write = os.write
        self._write_file = Disk.write
        patch.setattr(os, "write", self.write)
        # A function, which becomes a method of `Disk`.
        patch.setattr(Disk, "write", lambda disk, *file: self.write_file(disk, *file))  # noqa: PLW0108

    def fill(self, writes: int = 0) -> None:
        """Leave space for this number of writes."""
        self._writes_left = writes
        self.was_full = False

    def free(self) -> None:
        """Let all writes succeed again."""
        self._writes_left = None

    def write(self, descriptor: int, content: bytes) -> int:
        return self._write(descriptor, self._part(content))

    def write_file(self, disk: Disk, path: Path, content: bytes) -> None:
        self._write_file(disk, path, self._part(content))
        if self._writes_left == -1:
            raise OSError(self.error, os.strerror(self.error))

    def _part(self, content: bytes) -> bytes:
        if self._writes_left is None:
            return content
        if self._writes_left == -1:
            raise OSError(self.error, os.strerror(self.error))
        self._writes_left -= 1
        self.was_full = self._writes_left == -1
        return content[: len(content) // 2] if self.was_full else content


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> SmallDisk:
    return SmallDisk(monkeypatch)


@pytest.fixture
def clock() -> TestClock:
    return TestClock()


@pytest.fixture
async def store(tmp_path: Path, clock: TestClock) -> AsyncIterator[FileStore]:
    async with FileStore(tmp_path, clock=clock) as store:
        yield store


@pytest.fixture
async def another(tmp_path: Path, clock: TestClock) -> AsyncIterator[FileStore]:
    """A store that shares only the files, as one in another process does."""
    async with FileStore(tmp_path, clock=clock) as store:
        yield store


async def granted(store: FileStore) -> Grant:
    (grant,) = await store.acquire([LeaseRequest("run", "ana", HOUR, create=as_json(snapshot()))])
    assert isinstance(grant, Grant)
    return grant


async def steps(store: FileStore) -> list[str]:
    loaded = await store.load("run")
    assert loaded is not None
    return list(loaded["steps"])


@pytest.mark.parametrize("code", ["ENOSPC", "EDQUOT", "EIO"])
async def test_a_disk_that_fails_makes_the_store_unavailable(
    store: FileStore, disk: SmallDisk, tmp_path: Path, code: str
) -> None:
    """The error names the directory, and has the error of the file system as its cause."""
    grant = await granted(store)
    disk.error = getattr(errno, code)
    disk.fill()
    with pytest.raises(StoreUnavailable, match=f"{tmp_path}: the disk failed") as raised:
        await store.append([step(grant, 1, "a")])
    assert isinstance(raised.value.__cause__, OSError)
    assert raised.value.__cause__.errno == disk.error
    disk.free()
    assert await store.append([step(grant, 1, "a")]) == [Verdict.ACCEPTED]
    assert await steps(store) == ["a"]


async def test_a_run_continues_when_a_full_disk_has_space_again(
    tmp_path: Path, disk: SmallDisk
) -> None:
    """No step is called again."""
    calls: list[str] = []

    def work(name: str) -> str:
        calls.append(name)
        if name == "b":
            disk.fill()
        return name

    async def order(step: Step) -> str:
        return "".join([await step(name, work, name) for name in "abc"])

    store = FreedOnFailure(tmp_path, disk)
    result = await durable.run({}, order, id="run", store=store)
    await store.close()
    assert result == Ok("abc")
    assert (calls, store.failures) == (["a", "b", "c"], 1)


class FreedOnFailure(FileStore):
    """A store on a disk that has space again after an append has failed."""

    def __init__(self, directory: Path, disk: SmallDisk) -> None:
        super().__init__(directory)
        self.failures = 0
        self._disk = disk

    async def append(self, *arguments: Any) -> Any:
        try:
            return await super().append(*arguments)
        except StoreUnavailable:
            self.failures += 1
            self._disk.free()
            raise


@pytest.mark.parametrize("name", list(VERBS))
async def test_a_call_that_is_cut_off_at_any_write_can_be_repeated(
    name: str, tmp_path: Path, clock: TestClock, disk: SmallDisk
) -> None:
    """Both this process and another read what the repeated call has written."""
    for writes in range(100):
        directory = tmp_path / str(writes)
        async with (
            FileStore(directory, clock=clock, durability="normal") as store,
            FileStore(directory, clock=clock, durability="normal") as another,
        ):
            verb = repeated(VERBS[name], disk, writes)
            assert await survives_crash(another, store, clock, verb)
            assert await store.load("run") == await another.load("run")
        if not disk.was_full:
            return
    pytest.fail("this verb makes more than 100 writes")


def repeated(verb: Verb, disk: SmallDisk, writes: int) -> Verb:
    """Return the verb, on a disk that becomes full; if it fails, it is called again."""

    async def call(store: FullStore, grant: Grant) -> object:
        disk.fill(writes)
        try:
            return await verb(store, grant)
        except StoreUnavailable:
            disk.free()
            return await verb(store, grant)
        finally:
            disk.free()

    return call


async def test_a_torn_line_that_cannot_be_cut_off_is_not_read(
    store: FileStore,
    another: FileStore,
    disk: SmallDisk,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A full disk can refuse even that. The repeated entry replaces it."""
    grant = await granted(store)
    await store.append([step(grant, 1, "a")])
    with monkeypatch.context() as patch:
        patch.setattr(os, "ftruncate", refuse)
        disk.fill()
        with pytest.raises(StoreUnavailable):
            await store.append([step(grant, 2, "b")])
    assert await steps(another) == await steps(store) == ["a"]
    disk.free()
    for _ in range(2):
        assert await store.append([step(grant, 2, "b")]) == [Verdict.ACCEPTED]
    assert await another.append([step(grant, 3, "c")]) == [Verdict.ACCEPTED]
    assert await steps(another) == await steps(store) == ["a", "b", "c"]


def refuse(descriptor: int, size: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("partly", [False, True])
async def test_a_wake_line_that_is_cut_off_harms_no_line_of_another_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, partly: bool
) -> None:
    """The other line was written at the same time, to the same file, and fitted."""
    folder = Folder(tmp_path, Disk(sync=False))
    folder.create()
    write = os.write

    def write_after_another(descriptor: int, content: bytes) -> int:
        monkeypatch.setattr(os, "write", write)
        written = write(descriptor, content[:10])
        FileWakes(folder)._add([Wake(1, "other", None)])
        if partly:
            return written
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", write_after_another)
    wakes = FileWakes(folder)
    if partly:
        wakes._add([Wake(2, "run", None)])
    else:
        with pytest.raises(OSError, match="space"):
            wakes._add([Wake(2, "run", None)])
        wakes._add([Wake(2, "run", None)])
    found = await wakes.scan("", 5, 5, lambda wake: True).next(10)
    assert [wake.id for wake in found] == ["other", "run"]


async def _append(store: FileStore, grant: Grant) -> None:
    await store.append([step(grant, 1, "a")])


async def _send(store: FileStore, grant: Grant) -> None:
    await send_one(store, "run", "paid", b"1")


async def _enqueue(store: FileStore, grant: Grant) -> None:
    await store.enqueue([queued("new", "emails")])


@pytest.mark.parametrize(
    ("verb", "file"),
    [(_append, "runs/*/*.journal"), (_send, "runs/*/*.inbox"), (_enqueue, "queues/*/*")],
    ids=["journal", "inbox", "wakes"],
)
async def test_the_name_of_a_file_that_a_failed_write_left_empty_is_made_durable(
    store: FileStore,
    disk: SmallDisk,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    verb: Callable[[FileStore, Grant], Any],
    file: str,
) -> None:
    """The repeated write finds the file, whose name a power loss could still erase."""
    grant = await granted(store)
    synced: list[Path] = []

    def spy(disk: Disk, directory: Path) -> None:
        synced.extend(path for path in tmp_path.glob(file) if path.parent == directory)

    monkeypatch.setattr(Disk, "sync_directory", spy)
    # The first write of `send` is the id of the message.
    disk.fill(1 if verb is _send else 0)
    with pytest.raises(StoreUnavailable):
        await verb(store, grant)
    (path,) = tmp_path.glob(file)
    disk.free()
    await verb(store, grant)
    assert path in synced


async def test_a_snapshot_that_is_cut_off_takes_no_space(
    store: FileStore, disk: SmallDisk, tmp_path: Path
) -> None:
    """Other writes need it."""
    await store.save("run", snapshot("a"))
    disk.fill(1)  # for the epoch
    with pytest.raises(StoreUnavailable):
        await store.save("run", snapshot("a", "b"))
    assert [*tmp_path.rglob("*.tmp")] == []
    assert await steps(store) == ["a"]


async def test_a_lease_that_is_cut_off_is_not_granted(
    store: FileStore, another: FileStore, disk: SmallDisk
) -> None:
    """A file system may write a part of it without an error."""
    grant = await granted(store)
    data = as_json(snapshot(status="suspended"))
    rest = Rest("suspended", grant.now)
    await store.append([Entry("run", grant.lease.epoch, 1, data, rest=rest)])
    disk.fill(2)  # for the wake line and the epoch
    with pytest.raises(StoreUnavailable):
        await store.acquire([LeaseRequest("run", "ana", HOUR)])
    disk.free()
    (again,) = await another.acquire([LeaseRequest("run", "bob", HOUR)])
    assert isinstance(again, Grant)


async def test_a_flush_that_failed_is_not_repeated(
    store: FileStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel reports lost data once, and the next flush succeeds without it."""
    grant = await granted(store)

    def fail(descriptor: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(StoreError, match=str(tmp_path)) as raised:
            await store.append([step(grant, 1, "a")])
    assert not isinstance(raised.value, StoreUnavailable)
