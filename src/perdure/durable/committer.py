"""The group committer: requests that arrive while a write is in flight are written together.

A single run pays one commit per step; a thousand runs share commits. A request that makes a batch
fail affects only itself: the batch is then written one request at a time. A write whose reply was
lost is sent again. That is safe without guessing whether it was written: an entry carries its
number in the journal, and an owner may request its lease twice.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from datetime import timedelta
from operator import attrgetter
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary
from zlib import crc32

from perdure.clock import Clock, SystemClock
from perdure.engine.tasks import POSITION, Args, Interrupted, args_of_both, detached
from perdure.errors import PerdureError, StoreClosed, StoreError, StoreNotOpened, StoreUnavailable
from perdure.store import (
    Entry,
    Grant,
    JournalStore,
    LeaseRequest,
    LeaseStore,
    NewMessage,
    NewRun,
    Receipt,
    Refusal,
    Verdict,
    require_schedule,
)

logger = logging.getLogger(__name__)

Q = TypeVar("Q")
A = TypeVar("A")

MAX_BATCH = 500
MAX_BATCH_BYTES = 8 * 1024 * 1024
MAX_OUTAGE = timedelta(seconds=10)
# Two, so that the runs of one queue can work while the store writes for the other.
QUEUES = 2


class BatchQueue(Generic[Q, A]):
    """One kind of write, one batch at a time.

    The queue is in one of three states:

    - idle: `_busy` is false, and the queue is empty;
    - direct: a caller that found the queue idle writes in its own task, which saves a task switch;
      requests that arrive in the meantime are queued;
    - flushing: `_task` writes queued requests, in batches, until the queue is empty. After a batch
      of several requests, a caller that finds the queue idle starts this task instead of writing
      itself: it is probably the first of several again, which would all wait for its write.

    No request overtakes an earlier one: the next write begins only after the reply to the previous
    one, and a write whose reply was lost is sent again before anything else. Otherwise a later
    entry of a run could make the store mistake an earlier one for a repetition, and accept it
    without writing it.
    """

    def __init__(
        self,
        send: Callable[[Sequence[Q]], Awaitable[Sequence[A]]],
        *,
        clock: Clock = SystemClock(),
        data: Callable[[Q], bytes] | None = None,
        max_outage: timedelta = MAX_OUTAGE,
    ) -> None:
        self._send = send
        self._clock = clock
        self._data = data
        self._max_outage = max_outage
        self._loop = asyncio.get_running_loop()
        self._queue: deque[tuple[Q, asyncio.Future[A]]] = deque()
        self._successors: WeakKeyDictionary[asyncio.Future[A], asyncio.Future[A]] | None = None
        self._idle: asyncio.Future[None] | None = None
        self._task: asyncio.Task[None] | None = None
        self._batch: Sequence[tuple[Q, asyncio.Future[A]]] = ()
        self._busy = False
        self._is_shared = False
        self._closed = False

    def submit(self, request: Q) -> Awaitable[A]:
        """Return the store's reply to this request once it is durable; await it at once.

        Cancelling the caller does not withdraw the request. A caller that gets a `CancelledError`
        has to `outlast` it, to know the reply.
        """
        # The usual case under load: a future, which is half as expensive as a coroutine.
        if self._busy and not self._closed:
            reply: asyncio.Future[A] = asyncio.Future(loop=self._loop)
            self._queue.append((request, reply))
            return reply
        return self._write_now(request)

    async def finish(self, request: Q) -> A:
        """Submit a request, and return the reply to it.

        If the caller is cancelled, that is raised as `Interrupted`, once the reply is known.
        """
        reply = self.submit(request)
        try:
            return await reply
        except asyncio.CancelledError as error:
            raise await self.outlast(reply, error) from None

    async def outlast(self, reply: Awaitable[A], error: asyncio.CancelledError) -> Interrupted:
        """Return what to raise, with the reply, if `error` cancelled a caller that awaits `reply`.

        If the event loop is about to close, a cancellation is raised.
        """
        if isinstance(error, Interrupted):
            return error
        if not isinstance(reply, asyncio.Future):
            raise error
        args: Args = error.args
        # The reply may have come already: then the caller was cancelled before it continued.
        while not (current := self._current(reply)).done():
            try:
                await current
            except asyncio.CancelledError as again:
                args = args_of_both(args, again)
        return Interrupted(current.result(), args)

    def _current(self, reply: asyncio.Future[A]) -> asyncio.Future[A]:
        """Return the future for a reply: another one if a cancellation of its caller has ended it.

        Either the caller asks for the other one first, or the store has already replied.
        """
        if not reply.cancelled():
            return reply
        if self._successors is None:
            # Created by the first, because there are hardly ever any.
            self._successors = WeakKeyDictionary()
        current = self._successors.get(reply)
        if current is None or current.cancelled():
            # Replaced, not chained: a cancelled scope of anyio cancels its tasks in each iteration.
            current = self._successors[reply] = self._loop.create_future()
        return current

    async def _write_now(self, request: Q) -> A:
        if self._closed:
            raise StoreClosed("the committer is closed; nothing more can be written through it")
        self._busy = True
        if self._is_shared:
            return await self._write_next(request)
        # Tasks that the store starts must not become branches of the run that happens to write. By
        # hand, since `outside_runs` is two more calls for each step.
        token = POSITION.set(None)
        try:
            (answer,) = await self._send([request])
        except StoreNotOpened:
            self._flush_next()
            raise
        except StoreUnavailable:
            # Whether it was written is unknown. The store finds out when it is sent again.
            return await self._write_next(request)
        except asyncio.CancelledError as error:
            raise await self.outlast(self._enqueue_first(request), error) from None
        except Exception as error:  # noqa: BLE001  # raised to the caller
            self._flush_next()
            failure = _as_store_error(error)
            raise failure from failure.__cause__
        finally:
            POSITION.reset(token)
        # Without a call for a lone run, which finds the queue empty after each step.
        if self._queue or self._idle is not None:
            self._flush_next()
        else:
            self._busy = False
        return answer

    async def _write_next(self, request: Q) -> A:
        reply = self._enqueue_first(request)
        try:
            return await reply
        except asyncio.CancelledError as error:
            raise await self.outlast(reply, error) from None

    def _enqueue_first(self, request: Q) -> asyncio.Future[A]:
        """Write this request before all that were queued since."""
        reply: asyncio.Future[A] = self._loop.create_future()
        self._queue.appendleft((request, reply))
        self._flush_next()
        return reply

    def _flush_next(self) -> None:
        """Write queued requests, or become idle."""
        if self._queue:
            # The queue outlives the run that happens to write, so its task must not be a branch of
            # it.
            self._task = detached(self._write())
            self._task.add_done_callback(self._end_write)
            return
        self._busy = False
        if self._idle is not None:
            self._idle.set_result(None)
            self._idle = None

    def observe(self, observers: Collection[Callable[[float], None]]) -> None:
        """Call the observers with the duration in seconds of each write from now on."""
        send, clock = self._send, self._clock

        async def timed_send(requests: Sequence[Q]) -> Sequence[A]:
            start = clock.monotonic()
            try:
                return await send(requests)
            finally:
                for observe in observers:
                    observe(clock.monotonic() - start)

        self._send = timed_send

    async def close(self) -> None:
        """Write queued requests, then stop; later requests are refused."""
        self._closed = True
        while self._busy:
            if self._idle is None:
                self._idle = asyncio.get_running_loop().create_future()
            # Shielded, because other callers wait for the same future, and must not be cancelled
            # with this one.
            await asyncio.shield(self._idle)

    async def _write(self) -> None:
        while self._queue:
            batch = self._batch = self._next_batch()
            self._is_shared = len(batch) > 1
            await self._write_batch(batch)
            # Let callers that just got a reply join the next batch. They must also publish what was
            # written before another caller, with a store that answers at once, publishes later
            # entries: a replay has the order of the entries.
            await self._clock.sleep(0)
        self._batch = ()
        self._flush_next()

    def _end_write(self, task: asyncio.Task[None]) -> None:
        """Fail all callers if the task did not write everything."""
        # A callback, because an event loop that is about to close may cancel a task that has not
        # begun. Callers that were cancelled too would wait for their replies forever.
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if error is None:
            return
        for _, reply in (*self._batch, *self._queue):
            self._fail(reply, error)
        self._batch = ()
        self._queue.clear()
        self._flush_next()

    def _next_batch(self) -> list[tuple[Q, asyncio.Future[A]]]:
        queue, data = self._queue, self._data
        if data is None:
            return [queue.popleft() for _ in range(min(len(queue), MAX_BATCH))]
        batch = [queue.popleft()]
        size = len(data(batch[0][0]))
        while queue and len(batch) < MAX_BATCH:
            size += len(data(queue[0][0]))
            if size > MAX_BATCH_BYTES:
                break
            batch.append(queue.popleft())
        return batch

    async def _write_batch(self, batch: Sequence[tuple[Q, asyncio.Future[A]]]) -> None:
        """Write a batch, retrying while the store is unavailable; if it fails, one by one."""
        # The deadline counts from the first failure, so that a queue that was idle gets its full
        # time.
        error = await self._try(batch)
        if error is None:
            return
        deadline = self._clock.monotonic() + self._max_outage.total_seconds()
        pause = 0.05
        while _may_recover(error) and self._clock.monotonic() + pause <= deadline:
            logger.warning("store unavailable (%s); retrying in %.2fs", error, pause)
            await self._clock.sleep(pause)
            pause = min(pause * 2, 1.0)
            error = await self._try(batch)
        if error is None:
            return
        # If the store is unavailable, writing one by one would only take longer.
        if len(batch) == 1 or isinstance(error, StoreUnavailable):
            failure = _as_store_error(error)
            for _, reply in batch:
                self._fail(reply, failure)
            return
        logger.warning(
            "a batch of %d writes failed (%s); trying them one by one", len(batch), error
        )
        # One at a time and in order, so that only the bad request fails, and none overtakes
        # another.
        for pending in batch:
            await self._write_batch([pending])

    async def _try(self, batch: Sequence[tuple[Q, asyncio.Future[A]]]) -> Exception | None:
        try:
            answers = await self._send([request for request, _ in batch])
        except Exception as error:  # noqa: BLE001  # raised to the callers if it persists
            return error
        for (_, reply), answer in zip(batch, answers, strict=True):
            # Without a call for most, since all runs of the process are here.
            if reply.done():
                self._settle_late(reply, answer)
            else:
                reply.set_result(answer)
        return None

    def _settle_late(self, reply: asyncio.Future[A], answer: A) -> None:
        if not (current := self._current(reply)).done():
            current.set_result(answer)

    def _fail(self, reply: asyncio.Future[A], error: BaseException) -> None:
        if not (current := self._current(reply)).done():
            current.set_exception(error)
            # Marked as retrieved, because the caller may be gone, and asyncio would log it.
            current.exception()


def _may_recover(error: Exception | None) -> bool:
    # A store that was never reached has retried for as long as its user wants. Its address may be
    # wrong, and nothing was written that could be in doubt.
    return isinstance(error, StoreUnavailable) and not isinstance(error, StoreNotOpened)


def _as_store_error(error: Exception) -> Exception:
    if isinstance(error, PerdureError):
        return error
    failure = StoreError(f"the store could not write: {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure


class Committer:
    """The queues through which all runs of this process write to one store.

    It waits in real time, whatever clock the runs use, because the server is real.
    """

    def __init__(
        self,
        store: JournalStore,
        leases: LeaseStore,
        send: Callable[[Sequence[NewMessage]], Awaitable[Sequence[Receipt]]],
    ) -> None:
        self._send = send
        self._leases: BatchQueue[LeaseRequest, Grant | Refusal] = BatchQueue(leases.acquire)
        self._entries: list[BatchQueue[Entry, Verdict]] = [
            BatchQueue(store.append, data=attrgetter("data")) for _ in range(QUEUES)
        ]
        self._store = store
        self._starts: BatchQueue[NewRun, bool] | None = None
        self._messages: BatchQueue[NewMessage, Receipt] | None = None
        self._observers: set[Callable[[float], None]] = set()

    def observe_appends(self, callback: Callable[[float], None]) -> None:
        """Call `callback` with the duration in seconds of each write of entries."""
        if not self._observers:
            # Only on first use, so that unobserved writes do not pay for it.
            for queue in self._entries:
                queue.observe(self._observers)
        self._observers.add(callback)

    def queue_of(self, run_id: str) -> BatchQueue[Entry, Verdict]:
        """Return the queue for the entries of a run, which keep their order."""
        # One queue per run: if an entry could overtake another, the store would mistake the late
        # one for a repetition. By a checksum, because `hash` differs between processes, and a
        # simulation must be repeatable.
        return self._entries[crc32(run_id.encode()) % len(self._entries)]

    def acquire(self, request: LeaseRequest) -> Coroutine[Any, Any, Grant | Refusal]:
        """Return the requested lease, or a refusal."""
        return self._leases.finish(request)

    def enqueue(self, run: NewRun) -> Coroutine[Any, Any, bool]:
        """Return whether this run was created; `False` if its id was taken, even by itself."""
        if self._starts is None:
            send = require_schedule(self._store, "a run that starts runs").enqueue
            self._starts = BatchQueue(send, data=attrgetter("snapshot"))
        return self._starts.finish(run)

    def send(self, message: NewMessage) -> Coroutine[Any, Any, Receipt]:
        """Return the receipt of a message, which must have a `dedup_id`: it may be sent again."""
        if self._messages is None:
            self._messages = BatchQueue(self._send, data=attrgetter("payload"))
        return self._messages.finish(message)

    async def close(self) -> None:
        """Write queued requests, then stop."""
        for queue in (self._leases, *self._entries, self._starts, self._messages):
            if queue is not None:
                await queue.close()
