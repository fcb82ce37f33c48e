"""The operations on inboxes; see `runs`."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

from perdure.snapshot import RunStatus, is_over
from perdure.store import Delivery, Message, NewMessage, Receipt
from perdure.stores._checks import number_after
from perdure.stores._timestamps import from_microseconds
from perdure.stores.sqlite.runs import Verb, Verbs, decode_text
from perdure.stores.sqlite.statements import Outcome, Row, Statement

SEND = """
    INSERT INTO $inbox (run, name, payload, sent_at, dedup_id)
    SELECT e.column1, e.column2, e.column3, coalesce(e.column5, $clock), e.column4
    FROM ($rows) AS e CROSS JOIN $runs AS r
    WHERE r.id = e.column1 AND r.status NOT IN ('completed', 'failed', 'cancelled')
    ON CONFLICT DO NOTHING
"""

# Reads the inbox instead of relying on the previous statement, so that it can be repeated safely.
# With CASE, because SQLite would otherwise look for the message first, even for a run that awaits
# none.
WAKE_IF_MESSAGE = """
    UPDATE $runs SET wake_at = e.now
    FROM (
        SELECT column1 AS key, column2 AS name, coalesce(column3, $clock) AS now FROM ($rows)
    ) AS e
    WHERE id = e.key AND owner IS NULL AND (wake_at IS NULL OR wake_at > e.now)
        AND CASE WHEN e.name IN (SELECT value FROM json_each(awaits)) THEN EXISTS (
            SELECT 1 FROM $inbox WHERE run = e.key AND taken = 0 AND name = e.name
        ) END
"""

RECIPIENTS = """
    SELECT e.column1, e.column2, r.status,
        coalesce((SELECT messages FROM $unconsumed WHERE run = e.column1), 0),
        EXISTS (SELECT 1 FROM $inbox WHERE run = e.column1 AND dedup_id = e.column2)
    FROM ($rows) AS e CROSS JOIN $runs AS r
    WHERE r.id = e.column1
"""

INBOX = """
    SELECT seq, name, CAST(payload AS BLOB), sent_at FROM $inbox
    WHERE run = :id AND taken = 0 AND seq > :after
    ORDER BY seq
    LIMIT :limit
"""


class Recipient(NamedTuple):
    """A run before messages are sent to it; `duplicates` are dedup ids that it has received."""

    status: RunStatus
    unconsumed: int
    duplicates: set[str]


class Sending(NamedTuple):
    """The statements that send messages, in the order in which they are run.

    They read the recipients, insert the messages, and wake the unowned runs that await them.
    """

    recipients: Sequence[Statement]
    inserts: Sequence[Statement]
    wakes: Sequence[Statement]


def read_message(seq: int, name: str, payload: bytes, sent_at: int) -> Message:
    """Return the message in a row of the inbox."""
    return Message(str(seq), name, payload, from_microseconds(sent_at))


class InboxVerbs(Verbs):
    """The operations that send and read messages."""

    def send(self, messages: Sequence[NewMessage]) -> Verb[Sequence[Receipt]]:
        """Put messages in inboxes and wake the runs that wait for them."""
        recipients, inserts, wakes = self._sending(messages)
        outcomes = yield [*recipients, *inserts, *wakes]
        return self._read_receipts(messages, outcomes[: len(recipients)])

    def inbox(self, id: str, after: str | None, limit: int | None) -> Verb[Sequence[Message]]:
        """Return the run's unconsumed messages."""
        [messages] = yield [
            self._statement(
                INBOX,
                id=self._prefix + id,
                after=number_after(after),
                limit=-1 if limit is None else limit,
            )
        ]
        return [read_message(*row) for row in messages.rows]

    def _sending(self, messages: Sequence[NewMessage]) -> Sending:
        """Return the statements that send messages."""
        now, many = self._now(), self._statements.many
        keys = [self._prefix + message.to for message in messages]
        rows: list[Row] = [
            (key, message.name, decode_text(message.payload), message.dedup_id, now)
            for key, message in zip(keys, messages, strict=True)
        ]
        return Sending(
            many(RECIPIENTS, [*dict.fromkeys((row[0], row[3]) for row in rows)]),
            many(SEND, rows),
            many(WAKE_IF_MESSAGE, [*dict.fromkeys((*row[:2], now) for row in rows)]),
        )

    def _read_receipts(
        self, messages: Sequence[NewMessage], outcomes: Sequence[Outcome]
    ) -> Sequence[Receipt]:
        """Return a receipt for each message.

        The round is atomic, so the previous state of the recipients determines the outcome of each
        message.
        """
        runs = chain.from_iterable(outcome.rows for outcome in outcomes)
        keys = [self._prefix + message.to for message in messages]
        return [*_receipts(keys, messages, _read_recipients(runs))]


def _read_recipients(rows: Iterable[tuple[Any, ...]]) -> Mapping[str, Recipient]:
    recipients: dict[str, Recipient] = {}
    for key, dedup_id, status, unconsumed, is_duplicate in rows:
        recipient = recipients.setdefault(key, Recipient(status, unconsumed, set()))
        if is_duplicate:
            recipient.duplicates.add(dedup_id)
    return recipients


def _receipts(
    keys: Sequence[str], messages: Sequence[NewMessage], recipients: Mapping[str, Recipient]
) -> Iterator[Receipt]:
    unconsumed = {key: recipient.unconsumed for key, recipient in recipients.items()}
    for key, message in zip(keys, messages, strict=True):
        recipient = recipients.get(key)
        if recipient is None:
            yield Receipt(Delivery.UNKNOWN)
        elif message.dedup_id in recipient.duplicates:
            yield Receipt(Delivery.DUPLICATE, unconsumed[key])
        elif is_over(recipient.status):
            yield Receipt(Delivery.OVER)
        else:
            if message.dedup_id is not None:
                recipient.duplicates.add(message.dedup_id)
            unconsumed[key] += 1
            yield Receipt(Delivery.DELIVERED, unconsumed[key])
