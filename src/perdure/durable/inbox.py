"""The messages of a run that no wait has received yet, as known to this process."""

import logging
from bisect import insort
from collections.abc import Awaitable, Callable, Iterator, Sequence
from datetime import datetime, timedelta

from perdure.clock import Clock
from perdure.errors import StoreUnavailable
from perdure.store import Message

logger = logging.getLogger(__name__)

_TICK = timedelta(milliseconds=1)


class Inbox:
    """Hands out each message once; `messages` were read at `checked_at`.

    A message that was handed out stays in the store's inbox until the record of the receiving wait
    is accepted, so it is ignored in reads in the meantime. `reads` counts the reads that began,
    `is_stale` says that the last one failed.
    """

    def __init__(
        self,
        read_messages: Callable[[], Awaitable[list[Message]]],
        clock: Clock,
        messages: Sequence[Message],
        checked_at: datetime,
    ) -> None:
        self._read_messages = read_messages
        self._clock = clock
        self._messages = list(messages)
        self._checked_at = checked_at
        self._last_read = 0
        self._handed_out_ids: set[str] = set()
        self._local_ids: set[str] = set()
        self.reads = 0
        self.is_stale = False

    def __iter__(self) -> Iterator[Message]:
        """Yield the messages that were not handed out, in the order they were sent."""
        return iter(tuple(self._messages))

    def hand_out(self, message: Message) -> None:
        """Reserve a message for the wait that receives it."""
        self._messages.remove(message)
        self._handed_out_ids.add(message.id)

    def put_back(self, message: Message) -> None:
        """Make the message of an abandoned wait available again, in its original position."""
        self._handed_out_ids.discard(message.id)
        insort(self._messages, message, key=self._order)

    def _order(self, message: Message) -> tuple[bool, datetime]:
        # Local messages were already received once, so they are older than all others.
        return message.id not in self._local_ids, message.sent_at

    def add_local(self, message: Message) -> None:
        """Add a message that is not in the store's inbox."""
        self._local_ids.add(message.id)
        self.put_back(message)

    async def refresh(self) -> None:
        """Read the store's inbox; if the store is unavailable, keep the known messages."""
        self.reads += 1
        number, start = self.reads, self._clock.now()
        try:
            messages = await self._read_messages()
        except StoreUnavailable as error:
            logger.warning("the inbox cannot be read (%s); retrying", error)
            self.is_stale = True
            return
        self.is_stale = False
        self._messages = [message for message in self._messages if message.id in self._local_ids]
        self._messages += (each for each in messages if each.id not in self._handed_out_ids)
        # The time before the read: a message that was sent during it may be missing.
        self._checked_at, self._last_read = start, number

    def known_until(self, reads: int) -> datetime:
        """Return the time up to which a wait that began after `reads` reads knows its events.

        Times are stored in milliseconds, so a read in the same millisecond counts only if it began
        after the wait.
        """
        return self._checked_at if self._last_read > reads else self._checked_at - _TICK
