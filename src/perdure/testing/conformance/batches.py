"""Checks of batches of messages: receipts, counts, pages and logs."""

import asyncio
from contextlib import suppress

import pytest

from perdure.errors import InvalidArgument
from perdure.store import (
    INBOX_PAGE,
    Delivery,
    Entry,
    Message,
    NewMessage,
    Receipt,
    Rest,
    Store,
    Verdict,
)
from perdure.testing.conformance.harness import (
    LONG,
    Harness,
    MessagingStore,
    acquire_run,
    append_entries,
    need_atomic_lease,
    need_inbox,
    need_queues,
    step,
    write_rest,
)
from perdure.testing.conformance.queues import queued
from perdure.testing.conformance.samples import as_json, snapshot
from perdure.testing.conformance.schedule import claimed_ids

SENDERS = 50

NOT_MESSAGES = ("no message", "-1", " 1", "1_0", "\u0663", "9" * 20, "9" * 500)
"""Strings that are not the id of a message, although Python reads most of them as a number."""


def message(name: str, to: str = "run", dedup_id: str | None = None) -> NewMessage:
    """Return a message whose payload is its name."""
    return NewMessage(to, name, as_json(name), dedup_id)


async def pages(store: MessagingStore, id: str, limit: int) -> list[Message]:
    """Return a run's messages, read in pages of this size."""
    messages: list[Message] = []
    while True:
        last = messages[-1].id if messages else None
        page = await store.inbox(id, after=last, limit=limit)
        assert len(page) <= limit
        assert not {each.id for each in page} & {each.id for each in messages}
        messages += page
        if len(page) < limit:
            return messages


async def unconsumed(store: MessagingStore) -> int:
    """Send another message to the run, and return the count in its receipt."""
    (receipt,) = await store.send([message("another")])
    return receipt.unconsumed


class BatchChecks(Harness):
    """`send` of several messages."""

    async def test_each_message_of_a_batch_has_its_own_receipt(self, store: Store) -> None:
        """Return a receipt for each."""
        inboxes = need_inbox(store)
        await acquire_run(inboxes)
        await acquire_run(inboxes, "b")
        await write_rest(inboxes, await acquire_run(inboxes, "over"), Rest("completed"))
        receipts = await inboxes.send(
            [
                message("1", dedup_id="x"),
                message("2", "missing"),
                message("3", "b"),
                message("4", dedup_id="x"),
                message("5", "over"),
                message("6"),
            ]
        )
        assert list(receipts) == [
            Receipt(Delivery.DELIVERED, 1),
            Receipt(Delivery.UNKNOWN),
            Receipt(Delivery.DELIVERED, 1),
            Receipt(Delivery.DUPLICATE, 1),
            Receipt(Delivery.OVER),
            Receipt(Delivery.DELIVERED, 2),
        ]
        assert [each.name for each in await inboxes.inbox("run")] == ["1", "6"]
        assert list(await inboxes.send([])) == []

    async def test_messages_of_one_call_are_in_its_order(self, store: Store) -> None:
        """Messages of one call keep the order of the call."""
        inboxes = need_inbox(store)
        for id in ("run", "b"):
            await acquire_run(inboxes, id)
        names = [f"{number}" for number in range(30, 0, -1)]
        await inboxes.send([message(name, id) for name in names for id in ("b", "run")])
        await inboxes.send([message("last")])
        assert [each.name for each in await inboxes.inbox("run")] == [*names, "last"]
        assert [each.name for each in await inboxes.inbox("b")] == names

    async def test_a_batch_wakes_every_run_that_awaits_one_of_its_messages(
        self, store: Store
    ) -> None:
        """An unowned run that awaits a message's name becomes due at once."""
        inboxes = need_inbox(store)
        for id, event in (("a", "paid"), ("b", "paid"), ("c", "sent")):
            grant = await acquire_run(inboxes, id)
            await write_rest(inboxes, grant, Rest("waiting", None, (event,)))
        batch = [message("other", "a"), message("paid", "a"), message("other", "b")]
        await inboxes.send([*batch, message("sent", "c"), message("paid", "c")])
        assert sorted(await claimed_ids(inboxes)) == ["a", "c"]

    async def test_a_receipt_counts_the_unconsumed_messages(self, store: Store) -> None:
        """How many unconsumed messages the inbox had afterwards."""
        inboxes = need_inbox(store)
        grant = await acquire_run(inboxes)
        receipts = await inboxes.send([message(f"{n}", dedup_id=f"{n}") for n in range(4)])
        assert [receipt.unconsumed for receipt in receipts] == [1, 2, 3, 4]
        first, second, *_ = await inboxes.inbox("run")
        await append_entries(inboxes, step(grant, 1, "a", consumes=(first.id, second.id)))
        repeated_receipt, new = await inboxes.send([message("0", dedup_id="0"), message("new")])
        assert repeated_receipt == Receipt(Delivery.DUPLICATE, 2)
        assert new == Receipt(Delivery.DELIVERED, 3)
        (third, *_) = await inboxes.inbox("run")
        data = as_json(snapshot("a", status="waiting", event="x"))
        rest = Rest("waiting", None, ("x",))
        entry = Entry("run", grant.lease.epoch, 2, data, consumes=(third.id,), rest=rest)
        await append_entries(inboxes, entry)
        (receipt,) = await inboxes.send([message("newer")])
        assert receipt == Receipt(Delivery.DELIVERED, 3)

    async def test_a_receipt_counts_a_message_as_consumed_only_once(self, store: Store) -> None:
        """Ids of consumed messages and ids that no message has are ignored."""
        inboxes = need_inbox(store)
        grant = await acquire_run(inboxes)
        await inboxes.send([message(f"{n}", dedup_id=f"{n}" if n % 2 else None) for n in range(4)])
        ids = [each.id for each in await inboxes.inbox("run")]
        unknown_ids = (*NOT_MESSAGES, f"{ids[0]}000", f"{ids[1]}000")
        await append_entries(inboxes, step(grant, 1, "a", consumes=unknown_ids))
        assert await unconsumed(inboxes) == 5
        consumed = (ids[0], ids[0], ids[1], ids[1], *unknown_ids)
        await append_entries(inboxes, step(grant, 2, "b", consumes=consumed))
        assert await unconsumed(inboxes) == 4
        await append_entries(inboxes, step(grant, 3, "c", consumes=(*consumed, ids[2])))
        assert await unconsumed(inboxes) == 4
        assert len(await inboxes.inbox("run")) == 4

    async def test_a_receipt_does_not_count_what_was_consumed_before(self, store: Store) -> None:
        """The same is true of a rest, and of the next owner."""
        inboxes = need_inbox(store)
        grant = await acquire_run(inboxes)
        await inboxes.send([message(f"{n}", dedup_id=f"{n}" if n % 2 else None) for n in range(4)])
        first, second, third, _ = [each.id for each in await inboxes.inbox("run")]
        await append_entries(inboxes, step(grant, 1, "a", consumes=(first, "unknown")))
        data, rest = as_json(snapshot("a", status="waiting")), Rest("waiting", None, ("x",))
        consumed = (first, second, second, "unknown")
        await append_entries(inboxes, Entry("run", grant.lease.epoch, 2, data, consumed, rest))
        assert await unconsumed(inboxes) == 3
        grant = await acquire_run(inboxes, owner="bob")
        await append_entries(inboxes, step(grant, 1, "b", consumes=(*consumed, third)))
        assert await unconsumed(inboxes) == 3
        await append_entries(inboxes, Entry("run", grant.lease.epoch, 2, data, consumed, rest))
        assert await unconsumed(inboxes) == 4
        assert len(await inboxes.inbox("run")) == 4

    async def test_receipts_count_all_messages_of_concurrent_senders(self, store: Store) -> None:
        """If an inbox contains n messages, a `send` of one of them returned at least n."""
        inboxes = need_inbox(store)
        need_atomic_lease(store)
        other = need_inbox(await self.reopen(store) or store)
        await acquire_run(inboxes)

        async def send(number: int) -> int:
            # Each sender repeats its message, as if the first reply was lost.
            new_message = message(f"{number}", dedup_id=f"{number}")
            first = await (inboxes, other)[number % 2].send([new_message])
            receipts = await (other, inboxes)[number % 2].send([new_message])
            assert first[0].delivery is Delivery.DELIVERED
            assert receipts[0].delivery is Delivery.DUPLICATE
            return max(first[0].unconsumed, receipts[0].unconsumed)

        counts = await asyncio.gather(*map(send, range(SENDERS)))
        if other is not inboxes:
            await other.close()
        assert len(await inboxes.inbox("run")) == SENDERS
        assert max(counts) == SENDERS

    async def test_a_sender_that_crashed_counts_when_it_repeats_its_message(
        self, store: Store
    ) -> None:
        """The same is true if senders crash between their writes and repeat them."""
        inboxes = need_inbox(store)
        await acquire_run(inboxes)
        message_count = 0
        for writes in range(SENDERS):
            crashing = await self.crashing(store, writes % 7)
            if crashing is None:
                pytest.skip(f"{type(self).__name__} has no crashing(): each write is atomic")
            new_message = message(f"{writes}", dedup_id=f"{writes}")
            # The store's author chooses the error of a crash.
            with suppress(Exception):
                await need_inbox(crashing).send([new_message])
            (receipt,) = await inboxes.send([new_message])
            message_count = max(message_count, receipt.unconsumed)
            assert len(await inboxes.inbox("run")) == writes + 1
            assert message_count >= writes + 1


class PageChecks(Harness):
    """`inbox` in pages."""

    async def test_pages_neither_skip_nor_repeat_a_message(self, store: Store) -> None:
        """`after` is the id of the last message of the previous page."""
        inboxes = need_inbox(store)
        await acquire_run(inboxes)
        names = [f"{number}" for number in range(25)]
        await inboxes.send([message(name) for name in names[:20]])
        for name in names[20:]:
            await inboxes.send([message(name)])
        for limit in (1, 7, 25, 100):
            assert [each.name for each in await pages(inboxes, "run", limit)] == names
        assert list(await inboxes.inbox("run", limit=0)) == []
        assert list(await inboxes.inbox("missing", limit=5)) == []

    async def test_a_page_after_no_message_is_refused(self, store: Store) -> None:
        """Anything but the id of a message is an `InvalidArgument`."""
        inboxes = need_inbox(store)
        await acquire_run(inboxes)
        await inboxes.send([message("paid")])
        for after in NOT_MESSAGES:
            with pytest.raises(InvalidArgument, match=r"^after: expected"):
                await inboxes.inbox("run", after=after)

    async def test_an_entry_may_name_messages_that_do_not_exist(self, store: Store) -> None:
        """Ids in `consumes` that no message has are ignored."""
        inboxes = need_inbox(store)
        grant = await acquire_run(inboxes)
        await inboxes.send([message("paid")])
        entry = step(grant, 1, "a", consumes=NOT_MESSAGES)
        assert await append_entries(inboxes, entry) == [Verdict.ACCEPTED]
        assert [each.name for each in await inboxes.inbox("run")] == ["paid"]

    async def test_a_page_may_begin_after_a_consumed_message(self, store: Store) -> None:
        """Cursors stay valid."""
        inboxes = need_inbox(store)
        grant = await acquire_run(inboxes)
        await inboxes.send([message(f"{number}") for number in range(5)])
        page = await inboxes.inbox("run", limit=2)
        consumed = tuple(each.id for each in page)
        await append_entries(inboxes, step(grant, 1, "a", consumes=consumed))
        rest = await inboxes.inbox("run", after=page[-1].id)
        assert [each.name for each in rest] == ["2", "3", "4"]

    async def test_a_grant_has_the_first_page_of_the_inbox(self, store: Store) -> None:
        """`inbox` has at most the first `INBOX_PAGE` messages."""
        inboxes = need_inbox(store)
        await inboxes.enqueue([queued("run")])
        await inboxes.send([message(f"{number}") for number in range(INBOX_PAGE + 2)])
        (grant,) = await inboxes.claim("ana", LONG, 1)
        assert [each.name for each in grant.inbox] == [f"{n}" for n in range(INBOX_PAGE)]
        assert grant.lease.has_messages
        others = await inboxes.inbox("run", after=grant.inbox[-1].id)
        assert [each.name for each in others] == [f"{INBOX_PAGE}", f"{INBOX_PAGE + 1}"]
        next_grant = await acquire_run(inboxes, owner="ana")
        assert next_grant.inbox == grant.inbox

    async def test_a_log_is_a_run_that_is_never_leased(self, store: Store) -> None:
        """Every reader sees the messages in the same order, and nothing consumes them."""
        logs = need_queues(store)
        await logs.enqueue([queued("~log:a", rest=Rest("waiting"))])
        for number in range(12):
            new_message = message(f"{number}", "~log:a", dedup_id=f"{number}")
            assert list(await logs.send([new_message])) == [Receipt(Delivery.DELIVERED, number + 1)]
        assert await claimed_ids(logs) == []
        names = [f"{number}" for number in range(12)]
        assert [each.name for each in await pages(logs, "~log:a", 5)] == names
        assert [each.name for each in await pages(logs, "~log:a", 5)] == names


class BatchesChecks(BatchChecks, PageChecks):
    """The abilities of an inbox beyond single messages."""
