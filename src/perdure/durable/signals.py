"""Signals that one process sends at the same time share a write."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from perdure.durable.committer import MAX_BATCH, MAX_BATCH_BYTES
from perdure.engine.tasks import Interrupted, detached
from perdure.errors import InvalidArgument, ValueTooLarge
from perdure.store import NewMessage, Receipt

_REFUSED_ARGUMENTS = (InvalidArgument, ValueTooLarge)


class _Pending(NamedTuple):
    message: NewMessage
    receipt: "asyncio.Future[Receipt]"


class Signals:
    """Sends messages; those that arrive during a write are sent together with the next one.

    Unlike the queues of the committer, this one never sends a message again: without a `dedup_id`,
    it would be there twice. A cancelled caller withdraws its message, unless it is already being
    written.
    """

    def __init__(
        self, send: Callable[[Sequence[NewMessage]], Awaitable[Sequence[Receipt]]]
    ) -> None:
        self._write = send
        self._queue: deque[_Pending] = deque()
        self._is_busy = False
        self._flusher: asyncio.Task[None] | None = None

    async def send(self, message: NewMessage) -> Receipt:
        """Return the receipt of a message once it is durable."""
        if self._is_busy:
            pending = _Pending(message, asyncio.get_running_loop().create_future())
            self._queue.append(pending)
            return await pending.receipt
        self._is_busy = True
        try:
            (receipt,) = await self._write([message])
            return receipt
        except Interrupted as interruption:
            raise interruption.plain() from None
        finally:
            # Even if the write failed or was cancelled: others may wait in the queue.
            self._send_next()

    def _send_next(self) -> None:
        if self._queue:
            self._flusher = detached(self._flush())
        else:
            self._is_busy = False

    async def _flush(self) -> None:
        try:
            while batch := self._next_batch():
                await self._send_batch(batch)
        except asyncio.CancelledError:
            # The event loop is about to close, so callers must not wait any longer.
            for pending in self._queue:
                pending.receipt.cancel()
            self._queue.clear()
            raise
        finally:
            self._send_next()

    def _next_batch(self) -> list[_Pending]:
        batch: list[_Pending] = []
        size, queue = 0, self._queue
        while queue and len(batch) < MAX_BATCH:
            size += len(queue[0].message.payload)
            if batch and size > MAX_BATCH_BYTES:
                break
            pending = queue.popleft()
            if not pending.receipt.done():
                batch.append(pending)
        return batch

    async def _send_batch(self, batch: Sequence[_Pending]) -> None:
        try:
            _answer(batch, await self._write([pending.message for pending in batch]))
        except asyncio.CancelledError:
            for pending in batch:
                pending.receipt.cancel()
            raise
        except Exception as error:  # noqa: BLE001  # raised to the callers
            if len(batch) == 1 or not isinstance(error, _REFUSED_ARGUMENTS):
                return _fail(batch, error)
            # Refused before anything was written: the message at fault fails alone.
            for pending in batch:
                await self._send_batch([pending])


def _answer(batch: Sequence[_Pending], receipts: Sequence[Receipt]) -> None:
    for pending, receipt in zip(batch, receipts, strict=True):
        if not pending.receipt.done():
            pending.receipt.set_result(receipt)


def _fail(batch: Sequence[_Pending], error: Exception) -> None:
    for pending in batch:
        if not pending.receipt.done():
            pending.receipt.set_exception(error)
