"""Messages of `SqlStore`."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from perdure.store import INBOX_PAGE, Delivery, Message, NewMessage, Receipt
from perdure.stores._checks import number_after
from perdure.stores._timestamps import from_microseconds
from perdure.stores.sql import statements as sql
from perdure.stores.sql.executor import Executor, chunks, digest

# More messages than any inbox has.
_NO_LIMIT = 2**62


class Inbox(Executor):
    """Sends and reads messages."""

    async def send(self, messages: Sequence[NewMessage]) -> list[Receipt]:
        """Return a receipt for each message, in order; messages to one run are sent together."""
        by_key: dict[str, list[int]] = defaultdict(list)
        for index, message in enumerate(messages):
            by_key[self._key(message.to)].append(index)
        receipts: dict[int, Receipt] = {}
        for key, indexes in by_key.items():
            for chunk in chunks(indexes):
                chunk_receipts = await self._send(key, [messages[index] for index in chunk])
                receipts.update(zip(chunk, chunk_receipts, strict=True))
        return [receipts[index] for index in range(len(messages))]

    async def inbox(self, id: str, after: str | None, limit: int | None) -> list[Message]:
        """Return a page of the run's unconsumed messages."""
        return await self._page(self._key(id), number_after(after), limit or _NO_LIMIT)

    async def _send(self, key: str, messages: Sequence[NewMessage]) -> list[Receipt]:
        """Send messages to one run."""
        dedups = [None if m.dedup_id is None else digest(m.dedup_id) for m in messages]
        deliveries = await self._deliver(key, messages, dedups)
        if not {*deliveries} & {Delivery.DELIVERED, Delivery.DUPLICATE}:
            return [Receipt(delivery) for delivery in deliveries]
        # Even for duplicates: the first sender may have crashed before it woke the run.
        names = sorted({digest(message.name) for message in messages})
        await self._run_many(sql.WAKE_IF_MESSAGE, len(names), key, *names, key)
        result = await self._run(sql.COUNT_UNCONSUMED, key)
        return [*_receipts(deliveries, sum(count for (count,) in result.rows))]

    async def _deliver(
        self, key: str, messages: Sequence[NewMessage], dedups: Sequence[str | None]
    ) -> list[Delivery]:
        """Put messages in the inbox of one run; return the outcome of each."""
        ticket = self._new_ticket()
        first = {dedup: place for place, dedup in reversed([*enumerate(dedups)])}
        new = [n for n, dedup in enumerate(dedups) if dedup is None or first[dedup] == n]
        values = (value for n in new for value in (n, *_columns(messages[n]), dedups[n], ticket))
        result = await self._run_many(sql.SEND, len(new), *values, key)
        if result.rowcount == len(new):
            outcomes = dict.fromkeys(new, Delivery.DELIVERED)
        else:
            default = Delivery.DELIVERED if result.rowcount else await self._why_refused(key)
            tickets = await self._tickets(key, [dedups[n] for n in new])
            outcomes = {n: _outcome(dedups[n], tickets, ticket, default) for n in new}
        return [*_with_repeated(outcomes, dedups, first)]

    async def _why_refused(self, key: str) -> Delivery:
        """Return why a run did not receive a message that is not a duplicate."""
        run = await self._run(sql.COUNT_UNCONSUMED, key)
        return Delivery.OVER if run.rows else Delivery.UNKNOWN

    async def _tickets(self, key: str, dedups: Iterable[str | None]) -> Mapping[str, str | None]:
        """Return the senders' tickets of messages, by dedup digest."""
        digests = [dedup for dedup in dedups if dedup is not None]
        if not digests:
            return {}
        return dict((await self._run_many(sql.TICKETS, len(digests), key, *digests)).rows)

    async def _inboxes(self, keys: Sequence[str]) -> dict[str, list[Message]]:
        """Return the first unconsumed messages of each run, in order."""
        # Without an ORDER BY the database reads no more rows than this. There are rarely more.
        result = await self._run_many(sql.INBOXES, len(keys), *keys, INBOX_PAGE + 1)
        if len(result.rows) > INBOX_PAGE:
            return {key: await self._page(key, 0, INBOX_PAGE) for key in keys}
        inboxes: dict[str, list[Message]] = defaultdict(list)
        for key, *columns in sorted(result.rows, key=lambda row: row[1]):
            inboxes[key].append(_read_message(*columns))
        return inboxes

    async def _page(self, key: str, after: int, limit: int) -> list[Message]:
        page = await self._run(sql.INBOX, key, after, limit)
        return [_read_message(*columns) for _, *columns in page.rows]


def _columns(message: NewMessage) -> tuple[str, str, str]:
    return message.name, digest(message.name), message.payload.decode()


def _read_message(seq: int, name: str, payload: str, sent_at: int) -> Message:
    return Message(str(seq), name, payload.encode(), from_microseconds(sent_at))


def _outcome(
    dedup: str | None, tickets: Mapping[str, str | None], ticket: str, default: Delivery
) -> Delivery:
    if dedup is None or dedup not in tickets:
        return default
    return Delivery.DELIVERED if tickets[dedup] == ticket else Delivery.DUPLICATE


def _with_repeated(
    outcomes: Mapping[int, Delivery], dedups: Sequence[str | None], first: Mapping[Any, int]
) -> Iterator[Delivery]:
    """Yield the outcome of each message; a message repeated within the call was not sent twice."""
    for n, dedup in enumerate(dedups):
        is_repeated = n not in outcomes and outcomes[first[dedup]] is Delivery.DELIVERED
        yield Delivery.DUPLICATE if is_repeated else outcomes[n if n in outcomes else first[dedup]]


def _receipts(deliveries: Sequence[Delivery], unconsumed_count: int) -> Iterator[Receipt]:
    """Yield receipts; each count excludes the later messages of the same call."""
    following = sum(delivery is Delivery.DELIVERED for delivery in deliveries)
    for delivery in deliveries:
        following -= delivery is Delivery.DELIVERED
        is_received = delivery in (Delivery.DELIVERED, Delivery.DUPLICATE)
        yield Receipt(delivery, max(unconsumed_count - following, 0) if is_received else 0)
