"""Inboxes in files: messages are counted without reading them all."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from perdure.store import Delivery, Entry, NewMessage, Receipt, Rest
from perdure.stores.file import FileStore
from perdure.stores.file.inbox import InboxContents
from perdure.testing.conformance.harness import acquire_run
from perdure.testing.conformance.queues import queued
from perdure.testing.conformance.samples import as_json, snapshot


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[FileStore]:
    async with FileStore(tmp_path, durability="normal") as store:
        yield store


@pytest.fixture
async def another(tmp_path: Path) -> AsyncIterator[FileStore]:
    """A store that shares only the files, as one in another process does."""
    async with FileStore(tmp_path, durability="normal") as store:
        yield store


async def send(store: FileStore, dedup_id: str | None = None, payload: bytes = b"1") -> Receipt:
    (receipt,) = await store.send([NewMessage("run", "paid", payload, dedup_id)])
    return receipt


async def consume_all(store: FileStore) -> None:
    """Consume all messages and let the run wait for others."""
    grant = await acquire_run(store)
    consumes = tuple(message.id for message in await store.inbox("run"))
    data = as_json(snapshot(status="waiting"))
    rest = Rest("waiting", None, ("other",))
    await store.append([Entry("run", grant.lease.epoch, 1, data, consumes, rest)])


async def test_a_message_costs_the_same_in_a_long_inbox(
    store: FileStore, another: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What one process has read, and what it wrote itself, is not read again."""
    await store.enqueue([queued("run", rest=Rest("waiting"))])
    await store.send([NewMessage("run", "paid", b"1", f"{n}") for n in range(500)])
    assert await send(another) == Receipt(Delivery.DELIVERED, 501)
    read: list[int] = []
    add = InboxContents.add

    def spy(contents: InboxContents, lines: bytes) -> None:
        read.append(lines.count(b"\n"))
        add(contents, lines)

    monkeypatch.setattr(InboxContents, "add", spy)
    assert await send(store, "499") == Receipt(Delivery.DUPLICATE, 501)
    assert await send(store) == Receipt(Delivery.DELIVERED, 502)
    assert await send(another) == Receipt(Delivery.DELIVERED, 503)
    assert sum(read) == 4


async def test_an_inbox_that_another_process_swept_is_read_again(
    store: FileStore, another: FileStore
) -> None:
    """The process that knew it knows neither less nor more than it contains."""
    await acquire_run(store)
    assert await send(store, "a") == Receipt(Delivery.DELIVERED, 1)
    await consume_all(another)
    await send(another, payload=b"1" * 100)
    for n in range(3):
        assert await send(store, f"{n}") == Receipt(Delivery.DELIVERED, n + 2)
        assert await send(store, "a") == Receipt(Delivery.DUPLICATE, n + 2)


async def test_an_inbox_that_another_process_removed_is_forgotten(
    store: FileStore, another: FileStore
) -> None:
    """The run that has its id now knows none of its messages."""
    await acquire_run(store)
    await send(store, "a")
    await another.delete("run")
    await acquire_run(another)
    await send(another, "b")
    assert await send(store, "a") == Receipt(Delivery.DELIVERED, 2)
    assert await send(store, "b") == Receipt(Delivery.DUPLICATE, 2)


async def test_a_torn_message_is_cut_off(store: FileStore, another: FileStore) -> None:
    """It was not acknowledged; the next one is in its place."""
    await acquire_run(store)
    await send(store, "a")
    with (await _file(store)).open("ab") as file:
        file.write(b'12345678 ["9","pa')
    assert await send(store, "b") == Receipt(Delivery.DELIVERED, 2)
    assert await send(another, "b") == Receipt(Delivery.DUPLICATE, 2)
    assert [message.name for message in await another.inbox("run")] == ["paid", "paid"]


async def _file(store: FileStore) -> Path:
    (path,) = store._backend._storage.folder.runs.glob("*/*.inbox")  # type: ignore[attr-defined]
    assert isinstance(path, Path)
    return path
