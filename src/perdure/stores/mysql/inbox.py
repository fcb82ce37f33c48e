"""Send and read messages; the messages of one call are written in one transaction."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from hashlib import blake2b
from typing import NamedTuple

from perdure.snapshot import RunStatus, is_over
from perdure.store import Delivery, Message, NewMessage, Receipt
from perdure.stores._checks import number_after
from perdure.stores.mysql import statements as sql
from perdure.stores.mysql.database import Database, Result, Transaction
from perdure.stores.mysql.literals import Rows, Statement, Value, read_datetime
from perdure.stores.mysql.rows import chunks, read_inboxes, read_names
from perdure.stores.mysql.statements import Statements

_ANY_NUMBER = 2**63 - 1

LOCK_RECEIVERS = """
    SELECT id, status, owner IS NULL, awaits, wake_at, messages, UTC_TIMESTAMP(6)
    FROM {runs} FORCE INDEX (PRIMARY) WHERE id IN (%s) ORDER BY id FOR UPDATE
"""
FIND_DUPLICATES = """
    SELECT STRAIGHT_JOIN message.run, message.dedup
    FROM (SELECT %s COLLATE {collation} AS run, %s AS dedup %s) AS new
    JOIN {inbox} AS message FORCE INDEX (by_dedup)
        ON message.run = new.run AND message.dedup = new.dedup
"""
_FIND_ROW = b" UNION ALL SELECT %s, %s"
# Messages are numbered while their runs are locked, so a reader never sees a message before all
# earlier ones.
SEND = "INSERT INTO {inbox} (run, name, payload, sent_at, dedup) VALUES %s"
COUNT_SENT = """
    UPDATE {runs} FORCE INDEX (PRIMARY) SET messages = messages + %s, wake_at = IF(%s, %s, wake_at)
    WHERE id IN (%s)
"""


class Receiver(NamedTuple):
    """A locked run as of `now`."""

    status: RunStatus
    is_unowned: bool
    awaits: Sequence[str]
    wake_at: datetime | None
    messages: int
    now: datetime

    @property
    def is_due(self) -> bool:
        """Return whether the wake time has passed."""
        return self.wake_at is not None and self.wake_at <= self.now

    def is_awaiting(self, name: str) -> bool:
        """Return whether a message with this name makes the run due."""
        return self.is_unowned and name in self.awaits


class Inboxes:
    """The inboxes of the runs whose stored ids begin with `prefix`."""

    def __init__(self, database: Database, statements: Statements, prefix: str) -> None:
        self._database = database
        self._bind = statements.bind
        self._prefix = prefix

    async def send(self, messages: Sequence[NewMessage]) -> list[Receipt]:
        """Insert the messages and wake the runs that await them, while the runs are locked."""

        async def work(transaction: Transaction) -> list[Receipt]:
            batch = MessageBatch(messages, self._prefix)
            lock = self._bind(LOCK_RECEIVERS, batch.keys)
            receivers, *duplicates = await transaction.run(lock, *self.find_duplicates(batch))
            runs = {key: _receiver(*columns) for key, *columns in receivers.rows}
            receipts = batch.judge(runs, duplicates)
            if batch.rows:
                await transaction.finish(*self.write(batch))
            return receipts

        return await self._database.transact(work, repeatable=is_repeatable(messages))

    async def read(self, id: str, after: str | None, limit: int | None) -> list[Message]:
        """Return unconsumed messages in the order they were sent."""
        seq = number_after(after)
        key = self._prefix + id
        most = _ANY_NUMBER if limit is None else limit
        result = await self._database.run_alone(self._bind(sql.INBOX, key, seq, most))
        return read_inboxes(result.rows)[key]

    def find_duplicates(self, batch: "MessageBatch") -> Iterator[Statement]:
        """Yield the statements that look for the dedup ids of the messages."""
        rows = sorted({(key, digest) for key, digest in batch.places if digest is not None})
        for first, *others in chunks(rows):
            yield self._bind(FIND_DUPLICATES, *first, Rows(_FIND_ROW, others, b""))

    def write(self, batch: "MessageBatch") -> Iterator[Statement]:
        """Yield the statements that insert the messages, and count them and wake their runs."""
        for rows in chunks(batch.rows):
            yield self._bind(SEND, rows)
        keys: dict[tuple[int, bool], list[Value]] = defaultdict(list)
        for key, number in batch.sent_counts.items():
            keys[number, batch.wakes(key)].append(key)
        for (number, wakes), receivers in keys.items():
            yield self._bind(COUNT_SENT, number, wakes, batch.now, receivers)


class MessageBatch:
    """The messages of one call, their receipts, and what has to be written.

    `sent_counts` are the numbers of messages that are sent to each run, by the run's stored id.
    `awaiting` are the unowned runs that await one of these messages, in the messages' order.
    """

    def __init__(self, messages: Sequence[NewMessage], prefix: str) -> None:
        self.places = [(prefix + message.to, _digest(message.dedup_id)) for message in messages]
        self.rows: list[tuple[Value, ...]] = []
        self.sent_counts: Counter[str] = Counter()
        self.awaiting: dict[str, Receiver] = {}
        self.now: datetime | None = None
        self._messages = messages

    @property
    def keys(self) -> list[str]:
        """The stored ids of the runs, in the order in which they are locked."""
        return sorted({key for key, _ in self.places})

    def wakes(self, key: str) -> bool:
        """Return whether the messages make the run due before its time."""
        return key in self.awaiting and not self.awaiting[key].is_due

    def judge(self, runs: Mapping[str, Receiver], duplicates: Sequence[Result]) -> list[Receipt]:
        """Return the receipts, in order, and record what has to be written.

        `runs` are the locked runs by their stored ids.
        """
        used_digests = {(key, digest) for result in duplicates for key, digest in result.rows}
        return [
            self._deliver(message, key, digest, runs.get(key), used_digests)
            for message, (key, digest) in zip(self._messages, self.places, strict=True)
        ]

    def _deliver(
        self,
        message: NewMessage,
        key: str,
        digest: bytes | None,
        run: Receiver | None,
        used_digests: set[tuple[str, bytes]],
    ) -> Receipt:
        if run is None:
            return Receipt(Delivery.UNKNOWN)
        if digest is not None and (key, digest) in used_digests:
            return Receipt(Delivery.DUPLICATE, run.messages + self.sent_counts[key])
        if is_over(run.status):
            return Receipt(Delivery.OVER)
        if digest is not None:
            used_digests.add((key, digest))
        self.now = run.now
        self.sent_counts[key] += 1
        self.rows.append((key, message.name, message.payload, run.now, digest))
        if run.is_awaiting(message.name):
            self.awaiting[key] = run
        return Receipt(Delivery.DELIVERED, run.messages + self.sent_counts[key])


def is_repeatable(messages: Sequence[NewMessage]) -> bool:
    """Return whether sending the messages twice has the effect of sending them once."""
    return all(message.dedup_id is not None for message in messages)


def _receiver(
    status: RunStatus,
    is_unowned: int,
    awaits: str | None,
    wake_at: datetime | None,
    messages: int,
    now: datetime,
) -> Receiver:
    wakes = None if wake_at is None else read_datetime(wake_at)
    now = read_datetime(now)
    return Receiver(status, bool(is_unowned), read_names(awaits), wakes, messages, now)


def _digest(dedup_id: str | None) -> bytes | None:
    return None if dedup_id is None else blake2b(dedup_id.encode(), digest_size=16).digest()
