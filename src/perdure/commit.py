"""The group committer: while one write is in flight, what other runs want written gathers and goes
out together.

A lone run pays one commit per step; a thousand runs share commits. Requests of a lane keep their
order. One that spoils a batch harms only itself: the batch is tried again one by one. A write whose
answer was lost is sent again: an entry carries its place in the journal and an owner may ask twice
for its lease, so the store itself tells what had been written; nothing is guessed.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from datetime import timedelta
from typing import Any, Generic, TypeAlias, TypeVar

from perdure.clock import Clock, SystemClock
from perdure.errors import PerdureError, StoreClosed, StoreError, StoreUnavailable
from perdure.lineage import outside
from perdure.store import Entry, Grant, JournalStore, LeaseStore, Verdict, Want

logger = logging.getLogger(__name__)

Q = TypeVar("Q")
A = TypeVar("A")
Waiting: TypeAlias = tuple[Q, asyncio.Future[A]]

MAX_BATCH = 500
MAX_BATCH_BYTES = 8 * 1024 * 1024
MAX_WAITING = 10_000
PATIENCE = timedelta(seconds=10)
# Two, so that the runs of one work while the store writes for those of the other.
LANES = 2


class Lane(Generic[Q, A]):
    """One kind of write, one batch at a time.

    Who finds it idle writes in their own task, at no detour. What comes meanwhile gathers, and then
    goes out together.
    """

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
        self._queue: deque[Waiting[Q, A]] = deque()
        self._room: asyncio.Future[None] | None = None
        self._quiet: asyncio.Future[None] | None = None
        self._task: asyncio.Task[None] | None = None
        self._busy = False
        self._closed = False

    def submit(self, request: Q) -> Awaitable[A]:
        """Give the store's answer to this request once it is durable; to be awaited at once.

        Cancelling the caller does not take the request back: it is written all the same.
        """
        if self._busy and not self._closed and len(self._queue) < self._max_waiting:
            return self._enqueue(request)
        return self._lead(request)

    async def _lead(self, request: Q) -> A:
        while len(self._queue) >= self._max_waiting and not self._closed:
            await self._wait_for_room()
        if self._closed:
            raise StoreClosed("the committer is closed; nothing more can be written through it")
        if self._busy:
            return await self._enqueue(request)
        self._busy = True
        try:
            # What the store starts is no branch of the run that happens to write.
            with outside():
                (answer,) = await self._send([request])
                return answer
        except asyncio.CancelledError:
            self._send_again(request)
            raise
        except Exception as error:  # noqa: BLE001  # told to the caller, if it stays
            return await self._insist_alone(request, error)
        finally:
            self._go_on()

    async def _insist_alone(self, request: Q, error: Exception) -> A:
        answer: asyncio.Future[A] = asyncio.get_running_loop().create_future()
        try:
            with outside():
                await self._insist([(request, answer)], error)
        except asyncio.CancelledError:
            self._send_again(request)
            raise
        return answer.result()

    def _send_again(self, request: Q) -> None:
        """Write what a cancelled caller may have written or not: the store knows what it has."""
        unheard = self._enqueue(request, first=True)
        unheard.add_done_callback(_tell_if_failed)

    def _enqueue(self, request: Q, *, first: bool = False) -> asyncio.Future[A]:
        answer: asyncio.Future[A] = asyncio.get_running_loop().create_future()
        if first:
            self._queue.appendleft((request, answer))
        else:
            self._queue.append((request, answer))
        return answer

    def _go_on(self) -> None:
        if self._queue:
            # The lane outlives the run that happens to write, and must be no branch of that run.
            self._task = asyncio.Task(self._write(), loop=asyncio.get_running_loop())
            return
        self._busy = False
        if self._quiet is not None:
            self._quiet.set_result(None)
            self._quiet = None

    def __len__(self) -> int:
        """How many requests wait for the next write."""
        return len(self._queue)

    async def close(self) -> None:
        """Write what is waiting, then stop; later requests are refused."""
        self._closed = True
        while self._busy:
            if self._quiet is None:
                self._quiet = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._quiet)

    async def _wait_for_room(self) -> None:
        if self._room is None:
            self._room = asyncio.get_running_loop().create_future()
        await asyncio.shield(self._room)

    async def _write(self) -> None:
        """Write what has gathered."""
        batch: Sequence[Waiting[Q, A]] = ()
        try:
            while self._queue:
                batch = self._next_batch()
                if self._room is not None:
                    self._room.set_result(None)
                    self._room = None
                try:
                    _answer(batch, await self._send([request for request, _ in batch]))
                except Exception as error:  # noqa: BLE001  # told to those who wait, if it stays
                    await self._insist(batch, error)
                if len(batch) > 1:
                    # Those who were just answered join the next batch.
                    await self._clock.sleep(0)
        except asyncio.CancelledError:
            # The event loop is about to end, and whoever waits with it.
            for _, answer in (*batch, *self._queue):
                answer.cancel()
            self._queue.clear()
            raise
        finally:
            self._go_on()

    def _next_batch(self) -> list[Waiting[Q, A]]:
        queue = self._queue
        batch = [queue.popleft()]
        size = self._size(batch[0][0])
        while queue and len(batch) < MAX_BATCH:
            size += self._size(queue[0][0])
            if size > MAX_BATCH_BYTES:
                break
            batch.append(queue.popleft())
        return batch

    async def _insist(self, batch: Sequence[Waiting[Q, A]], error: Exception) -> None:
        """Write a batch that failed: again while the store is away, else each request alone."""
        deadline = self._clock.monotonic() + self._patience.total_seconds()
        pause = 0.05
        while isinstance(error, StoreUnavailable) and self._clock.monotonic() + pause <= deadline:
            logger.warning("the store is away (%s); trying again in %.2fs", error, pause)
            await self._clock.sleep(pause)
            pause = min(pause * 2, 1.0)
            try:
                _answer(batch, await self._send([request for request, _ in batch]))
            except Exception as another:  # noqa: BLE001  # told to those who wait, if it stays
                error = another
            else:
                return
        if len(batch) == 1 or isinstance(error, StoreUnavailable):
            _refuse(batch, error)
            return
        logger.warning(
            "a batch of %d writes failed (%s); trying them one by one", len(batch), error
        )
        for single in batch:
            try:
                _answer([single], await self._send([single[0]]))
            except Exception as another:  # noqa: BLE001  # told to the one who waits, if it stays
                await self._insist([single], another)


def _answer(batch: Sequence[Waiting[Q, A]], answers: Sequence[A]) -> None:
    for (_, future), answer in zip(batch, answers, strict=True):
        if not future.done():
            future.set_result(answer)


def _refuse(batch: Sequence[Waiting[Q, A]], error: Exception) -> None:
    failure = error
    if not isinstance(error, PerdureError):
        failure = StoreError(f"the store could not write: {type(error).__name__}: {error}")
        failure.__cause__ = error
    for _, future in batch:
        if not future.done():
            future.set_exception(failure)


def _tell_if_failed(answer: "asyncio.Future[Any]") -> None:
    if not answer.cancelled() and (error := answer.exception()) is not None:
        logger.warning("what a cancelled task had to write was not written: %s", error)


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
        options: dict[str, Any] = {
            "clock": clock,
            "patience": patience,
            "max_waiting": max_waiting,
        }
        self._wants: Lane[Want, Grant | None] = Lane(leases.acquire, **options)
        self._entries: list[Lane[Entry, Verdict]] = [
            Lane(store.append, size=lambda entry: len(entry.data), **options) for _ in range(LANES)
        ]

    def append(self, entry: Entry) -> Awaitable[Verdict]:
        """Give the verdict on an entry once it is durable; a run's entries keep their order."""
        lanes = self._entries
        return lanes[hash(entry.id) % len(lanes)].submit(entry)

    def acquire(self, want: Want) -> Awaitable[Grant | None]:
        """Give the lease that was asked for, or None."""
        return self._wants.submit(want)

    async def close(self) -> None:
        """Write what is waiting, then stop."""
        await self._wants.close()
        for lane in self._entries:
            await lane.close()
