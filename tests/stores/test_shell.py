"""What the shell of all stores does before a backend is called."""

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any, TypeAlias

import pytest

from perdure.clock import SystemClock
from perdure.errors import (
    InvalidArgument,
    StoreClosed,
    StoreNotOpened,
    StoreUnavailable,
    ValueTooLarge,
)
from perdure.store import LeaseRequest, NewRun
from perdure.stores.memory import MemoryStore
from perdure.stores.memory.backend import MemoryBackend
from perdure.stores.memory.rows import Runs
from perdure.testing.conformance.harness import send_one
from perdure.testing.conformance.samples import as_json, snapshot

MINUTE = timedelta(minutes=1)
DATA = as_json(snapshot())

Verb: TypeAlias = Callable[["RecordingStore"], Awaitable[object]]


class RecordingBackend(MemoryBackend):
    """Records its calls and counts how often it was opened; the first `failures` times fail."""

    def __init__(self) -> None:
        super().__init__(Runs(), "", SystemClock())
        self.calls: list[str] = []
        self.failures = 0
        self.opened = 0

    def __getattribute__(self, name: str) -> Any:
        attribute = super().__getattribute__(name)
        if not name.startswith("_") and callable(attribute):
            self.calls.append(name)
        return attribute

    async def open(self) -> None:
        await asyncio.sleep(0)
        if self.failures:
            self.failures -= 1
            raise StoreUnavailable("down")
        self.opened += 1


class RecordingStore(MemoryStore):
    """A memory store on a recording backend, whose values are at most 1,000 bytes."""

    def __init__(self) -> None:
        super().__init__(max_value_size=1000)
        self.backend = self._backend = RecordingBackend()
        self._life._set_up = self.backend.open
        self.backend.calls.clear()


EMPTY: dict[str, tuple[Verb, object]] = {
    "append nothing": (lambda store: store.append([]), []),
    "acquire nothing": (lambda store: store.acquire([]), []),
    "renew nothing": (lambda store: store.renew([], MINUTE), []),
    "release nothing": (lambda store: store.release([]), None),
    "enqueue nothing": (lambda store: store.enqueue([]), []),
    "list none": (lambda store: store.list(limit=0), []),
    "due none": (lambda store: store.due(SystemClock().now(), 0), []),
    "due of no workflow": (lambda store: store.due(SystemClock().now(), 1, supports=[]), []),
    "claim none": (lambda store: store.claim("ana", MINUTE, 0), []),
    "claim of no workflow": (lambda store: store.claim("ana", MINUTE, 1, supports=[]), []),
    "prune none": (lambda store: store.prune(MINUTE, limit=0), 0),
    "prune what is not over": (lambda store: store.prune(MINUTE, status="waiting"), 0),
}


@pytest.mark.parametrize("call", EMPTY)
async def test_an_empty_call_does_not_reach_the_backend(call: str) -> None:
    """A backend never gets an empty batch or a limit of 0."""
    store = RecordingStore()
    verb, expected = EMPTY[call]
    assert await verb(store) == expected
    assert store.backend.calls == []


REFUSED: dict[str, Verb] = {
    "id of save": lambda store: store.save("", snapshot()),
    "workflow of save": lambda store: store.save("run", snapshot(workflow="")),
    "id of load": lambda store: store.load("a\0b"),
    "id of acquire": lambda store: store.acquire([LeaseRequest("", "ana", MINUTE)]),
    "owner of acquire": lambda store: store.acquire([LeaseRequest("run", "", MINUTE)]),
    "workflow of acquire": lambda store: store.acquire(
        [LeaseRequest("run", "ana", MINUTE, create=DATA, workflow="")]
    ),
    "id of enqueue": lambda store: store.enqueue([NewRun("", "order", DATA)]),
    "workflow of enqueue": lambda store: store.enqueue([NewRun("run", "", DATA)]),
    "owner of claim": lambda store: store.claim("", MINUTE, 1),
    "limit of claim": lambda store: store.claim("ana", MINUTE, -1),
    "limit of list": lambda store: store.list(limit=-1),
    "prefix of list": lambda store: store.list(prefix="a\0b"),
    "limit of prune": lambda store: store.prune(MINUTE, limit=-1),
    "id of send": lambda store: send_one(store, "", "paid", b"1"),
    "id of inbox": lambda store: store.inbox(""),
}


@pytest.mark.parametrize("argument", REFUSED)
async def test_an_invalid_argument_does_not_reach_the_backend(argument: str) -> None:
    """A backend may rely on checked arguments."""
    store = RecordingStore()
    with pytest.raises(InvalidArgument):
        await REFUSED[argument](store)
    assert store.backend.calls == []


BIG = as_json(snapshot(big="x" * 1000))

TOO_LARGE: dict[str, Verb] = {
    "save": lambda store: store.save("run", snapshot(big="x" * 1000)),
    "acquire": lambda store: store.acquire([LeaseRequest("run", "ana", MINUTE, create=BIG)]),
    "enqueue": lambda store: store.enqueue([NewRun("run", "order", BIG)]),
    "send": lambda store: send_one(store, "run", "paid", BIG),
}


@pytest.mark.parametrize("verb", TOO_LARGE)
async def test_a_value_that_is_too_large_does_not_reach_the_backend(verb: str) -> None:
    """The error names the run."""
    store = RecordingStore()
    with pytest.raises(ValueTooLarge, match="'run'"):
        await TOO_LARGE[verb](store)
    assert store.backend.calls == []


async def test_a_backend_is_opened_once_before_the_first_call() -> None:
    """Concurrent first calls wait for one set-up."""
    store = RecordingStore()
    await asyncio.gather(*(store.load(f"{n}") for n in range(10)))
    assert store.backend.opened == 1
    assert store.backend.calls == ["load"] * 10


async def test_a_failed_set_up_is_tried_again_by_the_next_call() -> None:
    """The first error is not remembered."""
    store = RecordingStore()
    store.backend.failures = 1
    with pytest.raises(StoreUnavailable):
        await store.load("run")
    assert await store.load("run") is None


async def test_calls_that_wait_for_a_set_up_fail_with_it() -> None:
    """Otherwise the last of them would wait for as many timeouts as there are calls."""
    store = RecordingStore()
    store.backend.failures = 1
    calls = [store.load(f"{n}") for n in range(10)]
    errors = await asyncio.gather(*calls, return_exceptions=True)
    assert [(type(error), str(error)) for error in errors] == [(StoreNotOpened, "down")] * 10
    assert await store.load("run") is None


async def test_a_backend_is_closed_once() -> None:
    """A second `close` does nothing, and no call follows it."""
    store = RecordingStore()
    await store.close()
    await store.close()
    with pytest.raises(StoreClosed):
        await store.load("run")
    assert store.backend.calls == ["close"]
