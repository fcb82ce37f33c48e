"""Send and read messages; the messages of one call are written in one statement."""

from collections import Counter
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

from perdure.store import Delivery, Message, NewMessage, Receipt
from perdure.stores._checks import number_after
from perdure.stores.postgres.database import Database
from perdure.stores.postgres.rows import read_message
from perdure.stores.postgres.statements import Statements

INBOX = """
    SELECT message.seq, message.name, message.payload, message.sent_at
    FROM {runs} AS run
    JOIN {inbox} AS message ON message.run = run.id AND message.first_epoch = run.first_epoch
    WHERE run.id = $1 AND NOT message.consumed AND message.seq > $2
    ORDER BY message.seq
    LIMIT $3
"""

# Messages are numbered while their run is locked, so a reader never sees a message before all
# earlier ones. `messages` is how many the inbox had before this statement.
SEND_ONE = """
    WITH target AS MATERIALIZED (
        SELECT id, first_epoch, messages,
            coalesce(status, 'running') IN ('completed', 'failed', 'cancelled') AS is_over
        FROM {runs} WHERE id = $1 FOR NO KEY UPDATE
    ), sent AS (
        INSERT INTO {inbox} (run, first_epoch, name, payload, dedup, sent_at)
        SELECT id, first_epoch, $2, $3, $4, statement_timestamp() FROM target WHERE NOT is_over
        ON CONFLICT DO NOTHING
        RETURNING seq
    ), updated AS (
        UPDATE {runs} AS run SET
            messages = run.messages + 1,
            wake_at = CASE WHEN owner IS NULL AND awaits ? $2
                THEN statement_timestamp() ELSE run.wake_at END
        WHERE run.id = $1 AND EXISTS (SELECT FROM sent)
        RETURNING {notify_others_if_due}
    )
    SELECT 1, is_over, EXISTS (SELECT FROM sent), messages, is_over AND EXISTS (
        SELECT FROM {inbox} AS stored
        WHERE stored.run = target.id AND stored.first_epoch = target.first_epoch
            AND stored.dedup = $4
    )
    FROM target
"""

SEND = """
    WITH target AS MATERIALIZED (
        SELECT run.* FROM unnest((SELECT $1::text[])) AS target (id)
        CROSS JOIN LATERAL (
            SELECT id, first_epoch, messages, owner IS NULL AS is_unowned, awaits,
                coalesce(status, 'running') IN ('completed', 'failed', 'cancelled') AS is_over
            FROM {runs} AS run WHERE run.id = target.id FOR NO KEY UPDATE
        ) AS run
    ), message AS MATERIALIZED (
        SELECT message.*, target.first_epoch, target.messages, target.is_over,
            target.is_unowned AND target.awaits ? message.name AS is_awaited
        FROM unnest(
            (SELECT $2::text[]), (SELECT $3::text[]), (SELECT $4::bytea[]), (SELECT $5::bytea[])
        ) WITH ORDINALITY AS message (id, name, payload, dedup, i)
        JOIN target USING (id)
    ), sent AS (
        INSERT INTO {inbox} (run, first_epoch, name, payload, dedup, sent_at)
        SELECT id, first_epoch, name, payload, dedup, statement_timestamp()
        FROM message WHERE NOT is_over ORDER BY i
        ON CONFLICT DO NOTHING
        RETURNING run, dedup
    ), receipt AS MATERIALIZED (
        SELECT message.*, NOT is_over AND (message.dedup IS NULL OR sent.run IS NOT NULL) AS is_sent
        FROM message LEFT JOIN sent ON sent.run = message.id AND sent.dedup = message.dedup
    ), counted AS MATERIALIZED (
        SELECT id, count(*) AS messages, bool_or(is_awaited) AS is_awaited
        FROM receipt WHERE is_sent GROUP BY id
    ), updated AS (
        UPDATE {runs} AS run SET
            messages = run.messages + counted.messages,
            wake_at = CASE WHEN counted.is_awaited
                THEN statement_timestamp() ELSE run.wake_at END
        FROM counted WHERE run.id = counted.id
        RETURNING {notify_others_if_due}
    )
    SELECT i, is_over, is_sent, messages, is_over AND (
        SELECT true FROM {inbox} AS stored
        WHERE stored.run = receipt.id AND stored.first_epoch = receipt.first_epoch
            AND stored.dedup = receipt.dedup
    ) IS NOT NULL AS is_duplicate
    FROM receipt
"""


class _Row(NamedTuple):
    key: str
    name: str
    payload: bytes
    dedup: bytes | None


class _Outcome(NamedTuple):
    is_over: bool
    is_sent: bool
    messages: int
    is_duplicate: bool


class MessageBatch:
    """The messages of one call: the rows to insert, and the receipts.

    Of two messages with one dedup id, only the first is inserted.
    """

    def __init__(self, messages: Sequence[NewMessage], prefix: str) -> None:
        self._messages = messages
        rows = [_row_of(message, prefix) for message in messages]
        first: dict[object, int] = {}
        self._originals = [
            index if dedup is None else first.setdefault((key, dedup), index)
            for index, (key, _, _, dedup) in enumerate(rows)
        ]
        self._inserted_indexes = [
            index for index, original in enumerate(self._originals) if original == index
        ]
        self.rows = [rows[index] for index in self._inserted_indexes]
        # If repeated after a lost reply, a message without a dedup id would be there twice.
        self.is_repeatable = all(row.dedup is not None for row in self.rows)

    def columns(self) -> list[object]:
        """Return the columns of the rows, after the ids of the runs in the order of the locks."""
        keys = sorted({row.key for row in self.rows})
        return [keys, *zip(*self.rows, strict=True)]

    def receipts(self, outcomes: Iterable[Sequence[Any]]) -> list[Receipt]:
        """Return a receipt for each message, in order.

        An outcome is the place of a row, which begins at 1, and what happened to it; a row without
        an outcome has no run.
        """
        outcome_of = {
            self._inserted_indexes[place - 1]: _Outcome(*outcome) for place, *outcome in outcomes
        }
        return _receipts(self._messages, self._originals, outcome_of)


class Inboxes:
    """The inboxes of the runs whose stored ids begin with `prefix`."""

    def __init__(self, database: Database, statements: Statements, prefix: str) -> None:
        self._fetch = database.fetch
        self._statements = statements
        self._prefix = prefix

    async def send(self, messages: Sequence[NewMessage]) -> list[Receipt]:
        """Insert the messages and wake the runs that await them; return a receipt for each."""
        batch = MessageBatch(messages, self._prefix)
        return batch.receipts(await self._insert(batch))

    async def _insert(self, batch: MessageBatch) -> Sequence[Any]:
        is_one = len(batch.rows) == 1
        statement = self._statements.sql(SEND_ONE if is_one else SEND)
        values: Sequence[object] = batch.rows[0] if is_one else batch.columns()
        return await self._fetch(statement, *values, repeatable=batch.is_repeatable)

    async def read(self, id: str, after: str | None, limit: int | None) -> list[Message]:
        """Return unconsumed messages in the order they were sent."""
        values = (self._prefix + id, number_after(after), limit)
        rows = await self._fetch(self._statements.sql(INBOX), *values)
        return [read_message(*row) for row in rows]


def _receipts(
    messages: Sequence[NewMessage], originals: Sequence[int], outcomes: dict[int, _Outcome]
) -> list[Receipt]:
    """Return a receipt for each message; counts of one run increase in the call's order."""
    sent_counts: Counter[str] = Counter()
    receipts: list[Receipt] = []
    for index, (message, original) in enumerate(zip(messages, originals, strict=True)):
        outcome = outcomes.get(original)
        delivery = _delivery(outcome, is_inserted=original == index)
        if outcome is None or delivery is Delivery.OVER:
            receipts.append(Receipt(delivery))
        else:
            sent_counts[message.to] += delivery is Delivery.DELIVERED
            receipts.append(Receipt(delivery, outcome.messages + sent_counts[message.to]))
    return receipts


def _delivery(outcome: _Outcome | None, *, is_inserted: bool) -> Delivery:
    if outcome is None:
        return Delivery.UNKNOWN
    if outcome.is_over and not outcome.is_duplicate:
        return Delivery.OVER
    return Delivery.DELIVERED if outcome.is_sent and is_inserted else Delivery.DUPLICATE


def _row_of(message: NewMessage, prefix: str) -> _Row:
    return _Row(prefix + message.to, message.name, message.payload, _digest(message.dedup_id))


def _digest(dedup_id: str | None) -> bytes | None:
    return None if dedup_id is None else blake2b(dedup_id.encode(), digest_size=16).digest()
