"""Checks of the inbox: messages that are kept until a run consumes them."""

from datetime import timedelta

from perdure.snapshot import RunStatus
from perdure.store import Delivery, Entry, Rest, Store, Verdict
from perdure.testing.conformance.harness import (
    LONG,
    Harness,
    MessagingStore,
    acquire_run,
    append_entries,
    need_inbox,
    send_one,
    step,
    store_time,
    write_rest,
)
from perdure.testing.conformance.samples import as_json, snapshot
from perdure.testing.conformance.schedule import claimed_ids, due_ids, new_run


async def names(store: MessagingStore, id: str = "run") -> list[str]:
    """Return the names of the messages in a run's inbox, in order."""
    return [message.name for message in await store.inbox(id)]


class SendChecks(Harness):
    """`send` and `inbox`."""

    async def test_send_puts_a_message_in_the_inbox(self, store: Store) -> None:
        """Put a message in the run's inbox."""
        inboxes = need_inbox(store)
        await acquire_run(inboxes)
        payload = as_json({"by": "ana", "n": [1, None]})
        assert await send_one(inboxes, "run", "paid", payload) is Delivery.DELIVERED
        (message,) = await inboxes.inbox("run")
        assert (message.name, message.payload) == ("paid", payload)
        assert message.id
        assert message.sent_at.utcoffset() == timedelta(0)

    async def test_messages_are_returned_in_the_order_they_were_sent(self, store: Store) -> None:
        """Return the run's unconsumed messages in the order they were sent."""
        inboxes = need_inbox(store)
        await inboxes.save("run", snapshot())
        events = [f"event {number}" for number in range(12, 0, -1)]
        for name in events:
            await send_one(inboxes, "run", name, b"null")
        assert await names(inboxes) == events

    async def test_an_event_may_be_sent_repeatedly(self, store: Store) -> None:
        """Without a `dedup_id`, each message is separate."""
        inboxes = need_inbox(store)
        await acquire_run(inboxes)
        for _ in range(3):
            assert await send_one(inboxes, "run", "paid", b"1") is Delivery.DELIVERED
        messages = await inboxes.inbox("run")
        assert len({message.id for message in messages}) == 3

    async def test_a_message_for_a_missing_run_is_unknown(self, store: Store) -> None:
        """No such run: nothing is kept for a later one."""
        inboxes = need_inbox(store)
        assert await send_one(inboxes, "run", "paid", b"1") is Delivery.UNKNOWN
        await acquire_run(inboxes)
        assert await names(inboxes) == []
        assert list(await inboxes.inbox("missing")) == []

    async def test_a_message_for_a_run_that_is_over_is_refused(self, store: Store) -> None:
        """The run is over."""
        inboxes = need_inbox(store)
        for status in ("completed", "failed", "cancelled"):
            await write_rest(inboxes, await acquire_run(inboxes), Rest(status))
            assert await send_one(inboxes, "run", "paid", b"1") is Delivery.OVER
            assert await names(inboxes) == []

    async def test_a_dedup_id_that_was_used_is_a_duplicate(self, store: Store) -> None:
        """A `dedup_id` that was used before for this run is a duplicate, whatever the message."""
        inboxes = need_inbox(store)
        await acquire_run(inboxes)
        await acquire_run(inboxes, "other")
        assert await send_one(inboxes, "run", "paid", b"1", dedup_id="x") is Delivery.DELIVERED
        assert await send_one(inboxes, "run", "paid", b"1", dedup_id="x") is Delivery.DUPLICATE
        assert await send_one(inboxes, "run", "other", b"2", dedup_id="x") is Delivery.DUPLICATE
        assert await send_one(inboxes, "run", "paid", b"1", dedup_id="X") is Delivery.DELIVERED
        assert await send_one(inboxes, "other", "paid", b"1", dedup_id="x") is Delivery.DELIVERED
        assert await names(inboxes) == ["paid", "paid"]

    async def test_a_dedup_id_is_a_duplicate_after_its_message_was_consumed(
        self, store: Store
    ) -> None:
        """Even after the first message was consumed, and after a rest."""
        inboxes = need_inbox(store)
        grant = await acquire_run(inboxes)
        await send_one(inboxes, "run", "paid", b"1", dedup_id="x")
        (message,) = await inboxes.inbox("run")
        await append_entries(inboxes, step(grant, 1, "a", consumes=(message.id,)))
        assert await send_one(inboxes, "run", "paid", b"1", dedup_id="x") is Delivery.DUPLICATE
        await write_rest(inboxes, grant, Rest("waiting", None, ("paid",)))
        assert await send_one(inboxes, "run", "paid", b"1", dedup_id="x") is Delivery.DUPLICATE
        assert await names(inboxes) == []
        assert await claimed_ids(inboxes) == []

    async def test_delete_removes_the_inbox(self, store: Store) -> None:
        """Delete the run with its inbox: a new run with the id has none of its messages."""
        inboxes = need_inbox(store)
        await acquire_run(inboxes)
        await send_one(inboxes, "run", "paid", b"1", dedup_id="x")
        await inboxes.delete("run")
        assert await names(inboxes) == []
        grant = await acquire_run(inboxes)
        assert grant.inbox == ()
        assert await send_one(inboxes, "run", "paid", b"1", dedup_id="x") is Delivery.DELIVERED


class ConsumeChecks(Harness):
    """Messages that an entry consumes."""

    async def test_a_message_is_consumed_by_the_entry_that_names_it(self, store: Store) -> None:
        """A message is consumed by the entry that names it in `consumes`, in the same write."""
        inboxes = need_inbox(store)
        grant = await acquire_run(inboxes)
        for name in ("a", "b", "c"):
            await send_one(inboxes, "run", name, b"1")
        first, _, last = await inboxes.inbox("run")
        entry = step(grant, 1, "wait", consumes=(first.id, last.id))
        assert await append_entries(inboxes, entry) == [Verdict.ACCEPTED]
        assert await names(inboxes) == ["b"]

    async def test_a_rest_consumes_messages(self, store: Store) -> None:
        """`consumes` are the ids of messages that this write consumes, with `rest` as without."""
        inboxes = need_inbox(store)
        grant = await acquire_run(inboxes)
        await send_one(inboxes, "run", "paid", b"1")
        (message,) = await inboxes.inbox("run")
        rest = Rest("waiting", None, ("paid",))
        data = as_json(snapshot("a", status="waiting", event="paid"))
        entry = Entry("run", grant.lease.epoch, 1, data, consumes=(message.id,), rest=rest)
        assert await append_entries(inboxes, entry) == [Verdict.ACCEPTED]
        assert await names(inboxes) == []
        assert await claimed_ids(inboxes) == []

    async def test_a_fenced_entry_consumes_nothing(self, store: Store) -> None:
        """In the same write: an entry that is refused consumes nothing."""
        inboxes = need_inbox(store)
        old = await acquire_run(inboxes)
        await send_one(inboxes, "run", "paid", b"1")
        (message,) = await inboxes.inbox("run")
        await inboxes.release([old.lease])
        await acquire_run(inboxes, owner="bob")
        late = step(old, 1, "wait", consumes=(message.id,))
        assert await append_entries(inboxes, late) == [Verdict.FENCED]
        assert await names(inboxes) == ["paid"]

    async def test_an_entry_after_a_rest_consumes_nothing(self, store: Store) -> None:
        """In the same write: an entry of a closed epoch is refused and consumes nothing."""
        inboxes = need_inbox(store)
        grant = await acquire_run(inboxes)
        await send_one(inboxes, "run", "paid", b"1")
        (message,) = await inboxes.inbox("run")
        await write_rest(inboxes, grant, Rest("waiting", None, ("other",)), n=1)
        late = step(grant, 2, "wait", consumes=(message.id,))
        assert await append_entries(inboxes, late) == [Verdict.FENCED]
        assert await names(inboxes) == ["paid"]

    async def test_a_consumed_message_may_be_named_again(self, store: Store) -> None:
        """An entry sent again changes nothing, and a missing message is not an error."""
        inboxes = need_inbox(store)
        grant = await acquire_run(inboxes)
        await send_one(inboxes, "run", "paid", b"1")
        (message,) = await inboxes.inbox("run")
        entry = step(grant, 1, "wait", consumes=(message.id,))
        other = step(grant, 2, "more", consumes=(message.id, "no such message"))
        assert await append_entries(inboxes, entry) == [Verdict.ACCEPTED]
        assert await append_entries(inboxes, entry, other) == [Verdict.ACCEPTED] * 2

    async def test_a_grant_includes_the_inbox(self, store: Store) -> None:
        """A grant has everything that its owner needs: the messages, in order."""
        inboxes = need_inbox(store)
        await inboxes.save("run", snapshot(status="waiting", event="b"))
        for name in ("b", "a"):
            await send_one(inboxes, "run", name, as_json(name))
        (grant,) = await inboxes.claim("ana", LONG, 1)
        assert [(message.name, message.payload) for message in grant.inbox] == [
            ("b", b'"b"'),
            ("a", b'"a"'),
        ]
        assert list(grant.inbox) == list(await inboxes.inbox("run"))


class WakeChecks(Harness):
    """Messages that make a run due."""

    async def test_an_awaited_event_makes_an_unowned_run_due(self, store: Store) -> None:
        """An unowned run that awaits `name` becomes due at once."""
        inboxes = need_inbox(store)
        future = await store_time(inboxes) + LONG
        for id, wake_at in (("with timeout", future), ("without", None)):
            rest = Rest("waiting", wake_at, ("other", "paid"))
            await write_rest(inboxes, await acquire_run(inboxes, id), rest)
            await send_one(inboxes, id, "paid", b"1")
        assert sorted(await claimed_ids(inboxes)) == ["with timeout", "without"]

    async def test_only_an_awaited_event_wakes_a_paused_run(self, store: Store) -> None:
        """A paused run is woken by an event in its `awaits`; other messages are kept."""
        inboxes = need_inbox(store)
        for id in ("woken", "paused"):
            await write_rest(
                inboxes, await acquire_run(inboxes, id), Rest("paused", None, ("resume",))
            )
        assert await send_one(inboxes, "paused", "paid", b"1") is Delivery.DELIVERED
        await send_one(inboxes, "woken", "resume", b"1")
        assert await claimed_ids(inboxes) == ["woken"]
        assert await names(inboxes, "paused") == ["paid"]

    async def test_an_event_with_another_name_does_not_wake_a_run(self, store: Store) -> None:
        """An unowned run that awaits `name`: exactly this name."""
        inboxes = need_inbox(store)
        await write_rest(inboxes, await acquire_run(inboxes), Rest("waiting", None, ("paid",)))
        for name in ("Paid", "pai", "paid ", "p_id"):
            assert await send_one(inboxes, "run", name, b"1") is Delivery.DELIVERED
        assert await claimed_ids(inboxes) == []
        assert len(await inboxes.inbox("run")) == 4

    async def test_a_message_does_not_wake_a_suspended_run(self, store: Store) -> None:
        """Only a run that awaits the name becomes due; others keep their wake time."""
        inboxes = need_inbox(store)
        now = await store_time(inboxes)
        await write_rest(inboxes, await acquire_run(inboxes), Rest("suspended", now + LONG))
        await send_one(inboxes, "run", "paid", b"1")
        assert await claimed_ids(inboxes) == []
        assert await due_ids(inboxes, now + 2 * LONG) == ["run"]

    async def test_a_message_does_not_affect_the_owner(self, store: Store) -> None:
        """Only an *unowned* run becomes due: messages for an owned one wait."""
        inboxes = need_inbox(store)
        await write_rest(inboxes, await acquire_run(inboxes), Rest("waiting", None, ("paid",)))
        owner = await acquire_run(inboxes)
        await send_one(inboxes, "run", "paid", b"1")
        assert await claimed_ids(inboxes, "bob") == []
        assert await append_entries(inboxes, step(owner, 1, "a")) == [Verdict.ACCEPTED]

    async def test_a_rest_that_awaits_a_message_in_the_inbox_is_due_at_once(
        self, store: Store
    ) -> None:
        """A run that is settled while an awaited message is in its inbox is due at once."""
        inboxes = need_inbox(store)
        grant = await acquire_run(inboxes)
        await send_one(inboxes, "run", "paid", b"1")
        await write_rest(inboxes, grant, Rest("waiting", None, ("other", "paid")))
        assert await claimed_ids(inboxes) == ["run"]

    async def test_a_run_that_is_over_is_due_for_a_message_that_came_while_it_ended(
        self, store: Store
    ) -> None:
        """A run that is over is due if its rest awaits the name of a message in its inbox."""
        inboxes = need_inbox(store)
        statuses: tuple[RunStatus, ...] = ("completed", "failed", "cancelled")
        for status in statuses:
            grant = await acquire_run(inboxes, status)
            await send_one(inboxes, status, "~watch", b"1")
            await write_rest(inboxes, grant, Rest(status, awaits=("~watch",)))
            (next_grant,) = await inboxes.claim("ana", LONG, 10)
            assert next_grant.lease.id == status
            (message,) = next_grant.inbox
            data, rest = as_json(snapshot(status=status)), Rest(status, awaits=("~watch",))
            entry = Entry(status, next_grant.lease.epoch, 1, data, (message.id,), rest)
            assert await append_entries(inboxes, entry) == [Verdict.ACCEPTED]
            assert await claimed_ids(inboxes) == []
            assert await send_one(inboxes, status, "~watch", b"2") is Delivery.OVER

    async def test_a_run_that_is_over_may_be_due(self, store: Store) -> None:
        """A run that is over is claimed at the wake time of its rest, and stays as it is."""
        inboxes = need_inbox(store)
        grant = await acquire_run(inboxes)
        await write_rest(inboxes, grant, Rest("cancelled", await store_time(inboxes)))
        assert await claimed_ids(inboxes) == ["run"]

    async def test_a_rest_that_awaits_another_message_is_not_due(self, store: Store) -> None:
        """Only an awaited name counts, no other."""
        inboxes = need_inbox(store)
        grant = await acquire_run(inboxes)
        await send_one(inboxes, "run", "other", b"1")
        await write_rest(inboxes, grant, Rest("waiting", None, ("paid",)))
        assert await claimed_ids(inboxes) == []

    async def test_a_message_for_an_enqueued_run_is_kept(self, store: Store) -> None:
        """A message that is sent before the run waits for it is not lost."""
        inboxes = need_inbox(store)
        await inboxes.enqueue([new_run("run")])
        await send_one(inboxes, "run", "paid", b"1")
        (grant,) = await inboxes.claim("ana", LONG, 1)
        assert [message.name for message in grant.inbox] == ["paid"]


class InboxChecks(SendChecks, ConsumeChecks, WakeChecks):
    """The abilities of a store with an inbox."""
