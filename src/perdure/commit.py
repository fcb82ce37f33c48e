"""The group committer: while one write is in flight, what all runs want written gathers and goes
out together.

A lone run pays one commit per step; a thousand runs share commits. Requests keep their order. One
that spoils a batch harms only itself: the batch is tried again one by one. A write whose answer was
lost is sent again: an entry carries its place in the journal and an owner may ask twice for its
lease, so the store itself tells what had been written; nothing is guessed.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from datetime import timedelta
from typing import Generic, TypeVar

from perdure.clock import Clock, SystemClock
from perdure.errors import PerdureError, StoreClosed, StoreError, StoreUnavailable
from perdure.store import Entry, Grant, JournalStore, LeaseStore, Verdict, Want

logger = logging.getLogger(__name__)

Q = TypeVar("Q")
A = TypeVar("A")

MAX_BATCH = 500
MAX_BATCH_BYTES = 8 * 1024 * 1024
MAX_WAITING = 10_000
PATIENCE = timedelta(seconds=10)


class Lane(Generic[Q, A]):
    """One kind of write, in batches, one batch at a time."""

    def __init__(
        self,
        send: Callable[[Sequence[Q]], Awaitable[Sequence[A]]],
        *,
        clock: Clock,
        size: Callable[[Q], int] = lambda _: 0,
        patience: timedelta = PATIENCE,
        max_waiting: int = MAX_WAITING,
    ) -> None:
        self._send = send
        self._clock = clock
        self._size = size
        self._patience = patience
        self._max_waiting = max_waiting
        self._queue: deque[tuple[Q, asyncio.Future[A]]] = deque()
        self._work: asyncio.Future[None] | None = None
        self._room: asyncio.Future[None] | None = None
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    def submit(self, request: Q) -> Awaitable[A]:
        """Give the store's answer to this request once it is durable.

        Cancelling the caller does not take the request back: it is written in its place all the
        same.
        """
        if len(self._queue) < self._max_waiting:
            return self._enqueue(request)
        return self._submit_later(request)

    async def _submit_later(self, request: Q) -> A:
        while len(self._queue) >= self._max_waiting and not self._closed:
            await self._wait_for_room()
        return await self._enqueue(request)

    def _enqueue(self, request: Q) -> asyncio.Future[A]:
        if self._closed:
            raise StoreClosed("the committer is closed; nothing more can be written through it")
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[A] = loop.create_future()
        self._queue.append((request, answer))
        if self._work is not None:
            if not self._work.done():
                self._work.set_result(None)
        elif self._task is None:
            # The lane outlives the run that opened it, and must be no branch of that run.
            self._task = asyncio.Task(self._run(), loop=loop)
        return answer

    def __len__(self) -> int:
        """How many requests wait for the next write."""
        return len(self._queue)

    async def close(self) -> None:
        """Write what is waiting, then stop; later requests are refused."""
        self._closed = True
        task, self._task = self._task, None
        if task is not None:
            if self._work is not None and not self._work.done():
                self._work.set_result(None)
            await task

    async def _wait_for_room(self) -> None:
        if self._room is None:
            self._room = asyncio.get_running_loop().create_future()
        await asyncio.shield(self._room)

    async def _run(self) -> None:
        while True:
            if not self._queue:
                if self._closed:
                    return
                self._work = asyncio.get_running_loop().create_future()
                await self._work
                self._work = None
                continue
            batch = self._next_batch()
            if self._room is not None:
                self._room.set_result(None)
                self._room = None
            await self._deliver(batch)

    def _next_batch(self) -> list[tuple[Q, asyncio.Future[A]]]:
        queue = self._queue
        batch = [queue.popleft()]
        size = self._size(batch[0][0])
        while queue and len(batch) < MAX_BATCH:
            size += self._size(queue[0][0])
            if size > MAX_BATCH_BYTES:
                break
            batch.append(queue.popleft())
        return batch

    async def _deliver(self, batch: Sequence[tuple[Q, "asyncio.Future[A]"]]) -> None:
        try:
            answers = await self._persist([request for request, _ in batch])
        except Exception as error:  # noqa: BLE001  # handed to whoever waits for the write
            if len(batch) == 1 or isinstance(error, StoreUnavailable):
                failure = _as_store_error(error)
                for _, future in batch:
                    if not future.done():
                        future.set_exception(failure)
                return
            logger.warning(
                "a batch of %d writes failed (%s); trying them one by one", len(batch), error
            )
            for single in batch:
                await self._deliver([single])
            return
        for (_, future), answer in zip(batch, answers, strict=True):
            if not future.done():
                future.set_result(answer)

    async def _persist(self, requests: Sequence[Q]) -> Sequence[A]:
        deadline = self._clock.monotonic() + self._patience.total_seconds()
        pause = 0.05
        while True:
            try:
                return await self._send(requests)
            except StoreUnavailable as error:
                if self._clock.monotonic() + pause > deadline:
                    raise
                logger.warning("the store is away (%s); trying again in %.2fs", error, pause)
            await self._clock.sleep(pause)
            pause = min(pause * 2, 1.0)


def _as_store_error(error: Exception) -> Exception:
    if isinstance(error, PerdureError):
        return error
    failure = StoreError(f"the store could not write: {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure


class Committer:
    """What all runs of this process write to one store."""

    def __init__(
        self,
        store: JournalStore,
        leases: LeaseStore,
        *,
        clock: Clock = SystemClock(),
        patience: timedelta = PATIENCE,
        max_waiting: int = MAX_WAITING,
    ) -> None:
        self._entries: Lane[Entry, Verdict] = Lane(
            store.append,
            clock=clock,
            size=lambda entry: len(entry.data),
            patience=patience,
            max_waiting=max_waiting,
        )
        self._wants: Lane[Want, Grant | None] = Lane(
            leases.acquire, clock=clock, patience=patience, max_waiting=max_waiting
        )

    def append(self, entry: Entry) -> Awaitable[Verdict]:
        """Give the verdict on an entry once it is durable."""
        return self._entries.submit(entry)

    def acquire(self, want: Want) -> Awaitable[Grant | None]:
        """Give the lease that was asked for, or None."""
        return self._wants.submit(want)

    async def close(self) -> None:
        """Write what is waiting, then stop."""
        await self._wants.close()
        await self._entries.close()
