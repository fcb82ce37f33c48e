"""Messages for runs that are stored as documents."""

from collections.abc import Sequence
from itertools import islice

from perdure.store import Delivery, Message, NewMessage, Receipt
from perdure.stores._checks import number_after
from perdure.stores._documents.records import H, Head, Wake
from perdure.stores._documents.runs import DocumentRuns, unconsumed_messages


class DocumentInboxes(DocumentRuns[H]):
    """Runs with inboxes."""

    async def send(self, messages: Sequence[NewMessage], now: int) -> list[Receipt]:
        """Put messages in inboxes, grouped by run, and wake the runs that await them."""
        async with self.wakes.gate():
            return await self.by_run(
                lambda group: self._send(group, now), messages, lambda message: message.to
            )

    async def _send(self, messages: Sequence[NewMessage], now: int) -> Sequence[Receipt]:
        run = self.run(messages[0].to)
        names = {message.name for message in messages}
        async with run.lock():
            head = await run.head()
            if head is None:
                return [Receipt(Delivery.UNKNOWN)] * len(messages)
            wake = _wake(head, names, now)
            if wake is not None:
                await self.wakes.add([wake], now)
            receipts = await run.deliver(head, messages, now)
            # Another process may have suspended the run in the meantime without seeing a message.
            last = await run.head()
            new_wake = None if last is None else _wake(last, names, now)
            if new_wake is not None and new_wake != wake:
                await self.wakes.add([new_wake], now)
        return receipts

    async def inbox(self, id: str, after: str | None, limit: int | None) -> list[Message]:
        """Return a run's unconsumed messages."""
        run = self.run(id)
        async with run.lock(shared=True):
            head = await run.head()
            messages = [] if head is None else await unconsumed_messages(run, head)
        last = number_after(after)
        following = (message for message in messages if int(message.id) > last)
        return [message.as_message() for message in islice(following, limit)]


def _wake(head: Head, names: set[str], now: int) -> Wake | None:
    """Return the wake line for a run that awaits one of the messages, or `None`."""
    return None if names.isdisjoint(head.awaits) else head.wake(now)
