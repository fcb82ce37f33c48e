"""Put messages in an inbox, which is one document."""

from collections.abc import Sequence

from perdure.store import Delivery, NewMessage, Receipt
from perdure.stores._documents.records import StoredMessage
from perdure.stores.keyvalue.layout import Inbox, decode_inbox, encode


class Deliver:
    """The edit that adds messages to an inbox; `existing_ids` are the messages it had before.

    It is called again if the document changes in the meantime; the last call counts.
    """

    def __init__(self, messages: Sequence[NewMessage], now: int, *, is_over: bool) -> None:
        self._messages = messages
        self._now = now
        self._is_over = is_over
        self._answers: list[tuple[Delivery, int]] = []
        self.existing_ids: set[str] = set()

    def __call__(self, text: str | None) -> str | None:
        inbox = decode_inbox(text)
        self.existing_ids = {message.id for message in inbox.messages}
        before = inbox.count
        self._answers = [self._add(message, inbox) for message in self._messages]
        return text if inbox.count == before else encode(inbox)

    def receipts(self, consumed_ids: set[str]) -> list[Receipt]:
        """Return the receipts; `consumed` are messages that may still be in the inbox."""
        excess = len(self.existing_ids & consumed_ids)
        return [Receipt(delivery, max(number - excess, 0)) for delivery, number in self._answers]

    def _add(self, message: NewMessage, inbox: Inbox) -> tuple[Delivery, int]:
        if message.dedup_id is not None and message.dedup_id in inbox.dedup_ids:
            return Delivery.DUPLICATE, len(inbox.messages)
        if self._is_over:
            return Delivery.OVER, 0
        inbox.count += 1
        stored_message = StoredMessage(
            str(inbox.count), message.name, message.payload.decode(), self._now
        )
        inbox.messages.append(stored_message)
        if message.dedup_id is not None:
            inbox.dedup_ids.append(message.dedup_id)
        return Delivery.DELIVERED, len(inbox.messages)
