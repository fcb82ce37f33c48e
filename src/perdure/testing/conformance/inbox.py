"""Checks of the inbox: events that wait for a run until it takes them."""

from datetime import timedelta

from perdure.store import Delivery, Entry, Rest, Store, Verdict
from perdure.testing.conformance.harness import (
    LONG,
    Harness,
    Mailed,
    appended,
    granted,
    need_inbox,
    rested,
    step,
    store_time,
)
from perdure.testing.conformance.samples import as_json, snapshot
from perdure.testing.conformance.schedule import claimed_ids, due_ids, new_run


async def names(store: Mailed, id: str = "run") -> list[str]:
    """Give the names of the messages in a run's inbox, in order."""
    return [message.name for message in await store.inbox(id)]


class SendChecks(Harness):
    """`send` and `inbox`."""

    async def test_send_puts_a_message_in_the_inbox(self, store: Store) -> None:
        """Put an event in the run's inbox."""
        mailed = need_inbox(store)
        await granted(mailed)
        payload = as_json({"by": "ana", "n": [1, None]})
        assert await mailed.send("run", "paid", payload) is Delivery.DELIVERED
        (message,) = await mailed.inbox("run")
        assert (message.name, message.payload) == ("paid", payload)
        assert message.id
        assert message.sent_at.utcoffset() == timedelta(0)

    async def test_messages_are_returned_in_the_order_they_were_sent(self, store: Store) -> None:
        """Give the run's messages that were not taken, in the order they were sent."""
        mailed = need_inbox(store)
        await mailed.save("run", snapshot())
        sent = [f"event {number}" for number in range(12, 0, -1)]
        for name in sent:
            await mailed.send("run", name, b"null")
        assert await names(mailed) == sent

    async def test_an_event_may_be_sent_repeatedly(self, store: Store) -> None:
        """Without a `dedup_id` each event is its own."""
        mailed = need_inbox(store)
        await granted(mailed)
        for _ in range(3):
            assert await mailed.send("run", "paid", b"1") is Delivery.DELIVERED
        messages = await mailed.inbox("run")
        assert len({message.id for message in messages}) == 3

    async def test_a_message_for_a_missing_run_is_unknown(self, store: Store) -> None:
        """No such run: nothing is kept for one that comes later."""
        mailed = need_inbox(store)
        assert await mailed.send("run", "paid", b"1") is Delivery.UNKNOWN
        await granted(mailed)
        assert await names(mailed) == []
        assert list(await mailed.inbox("missing")) == []

    async def test_a_message_for_a_run_that_is_over_is_refused(self, store: Store) -> None:
        """The run is over."""
        mailed = need_inbox(store)
        for status in ("completed", "failed", "cancelled"):
            await rested(mailed, await granted(mailed), Rest(status))
            assert await mailed.send("run", "paid", b"1") is Delivery.OVER
            assert await names(mailed) == []

    async def test_a_dedup_id_that_was_used_is_a_duplicate(self, store: Store) -> None:
        """A `dedup_id` that was used before for this run is a duplicate, whatever it carries."""
        mailed = need_inbox(store)
        await granted(mailed)
        await granted(mailed, "other")
        assert await mailed.send("run", "paid", b"1", dedup_id="x") is Delivery.DELIVERED
        assert await mailed.send("run", "paid", b"1", dedup_id="x") is Delivery.DUPLICATE
        assert await mailed.send("run", "other", b"2", dedup_id="x") is Delivery.DUPLICATE
        assert await mailed.send("run", "paid", b"1", dedup_id="X") is Delivery.DELIVERED
        assert await mailed.send("other", "paid", b"1", dedup_id="x") is Delivery.DELIVERED
        assert await names(mailed) == ["paid", "paid"]

    async def test_a_dedup_id_is_a_duplicate_after_its_message_was_consumed(
        self, store: Store
    ) -> None:
        """Also after the first one was taken, and after the run has rested."""
        mailed = need_inbox(store)
        grant = await granted(mailed)
        await mailed.send("run", "paid", b"1", dedup_id="x")
        (message,) = await mailed.inbox("run")
        await appended(mailed, step(grant, 1, "a", consumes=(message.id,)))
        assert await mailed.send("run", "paid", b"1", dedup_id="x") is Delivery.DUPLICATE
        await rested(mailed, grant, Rest("waiting", None, ("paid",)))
        assert await mailed.send("run", "paid", b"1", dedup_id="x") is Delivery.DUPLICATE
        assert await names(mailed) == []
        assert await claimed_ids(mailed) == []

    async def test_delete_removes_the_inbox(self, store: Store) -> None:
        """Remove the run with its inbox: a new run of the id knows none of its events."""
        mailed = need_inbox(store)
        await granted(mailed)
        await mailed.send("run", "paid", b"1", dedup_id="x")
        await mailed.delete("run")
        assert await names(mailed) == []
        grant = await granted(mailed)
        assert grant.inbox == ()
        assert await mailed.send("run", "paid", b"1", dedup_id="x") is Delivery.DELIVERED


class TakeChecks(Harness):
    """Messages that an entry takes."""

    async def test_a_message_is_consumed_by_the_entry_that_names_it(self, store: Store) -> None:
        """A message is taken by the entry that names it in `consumes`, in the same write."""
        mailed = need_inbox(store)
        grant = await granted(mailed)
        for name in ("a", "b", "c"):
            await mailed.send("run", name, b"1")
        first, _, last = await mailed.inbox("run")
        entry = step(grant, 1, "wait", consumes=(first.id, last.id))
        assert await appended(mailed, entry) == [Verdict.ACCEPTED]
        assert await names(mailed) == ["b"]

    async def test_a_rest_consumes_messages(self, store: Store) -> None:
        """With `rest` as without: `consumes` are ids of inbox messages that this write consumes."""
        mailed = need_inbox(store)
        grant = await granted(mailed)
        await mailed.send("run", "paid", b"1")
        (message,) = await mailed.inbox("run")
        rest = Rest("waiting", None, ("paid",))
        data = as_json(snapshot("a", status="waiting", event="paid"))
        entry = Entry("run", grant.lease.epoch, 1, data, consumes=(message.id,), rest=rest)
        assert await appended(mailed, entry) == [Verdict.ACCEPTED]
        assert await names(mailed) == []
        assert await claimed_ids(mailed) == []

    async def test_a_fenced_entry_consumes_nothing(self, store: Store) -> None:
        """In the same write: an entry that is refused takes nothing."""
        mailed = need_inbox(store)
        old = await granted(mailed)
        await mailed.send("run", "paid", b"1")
        (message,) = await mailed.inbox("run")
        await mailed.release([old.lease])
        await granted(mailed, owner="bob")
        late = step(old, 1, "wait", consumes=(message.id,))
        assert await appended(mailed, late) == [Verdict.FENCED]
        assert await names(mailed) == ["paid"]

    async def test_an_entry_after_a_rest_consumes_nothing(self, store: Store) -> None:
        """In the same write: an entry that is refused because its epoch is closed takes nothing."""
        mailed = need_inbox(store)
        grant = await granted(mailed)
        await mailed.send("run", "paid", b"1")
        (message,) = await mailed.inbox("run")
        await rested(mailed, grant, Rest("waiting", None, ("other",)), n=1)
        late = step(grant, 2, "wait", consumes=(message.id,))
        assert await appended(mailed, late) == [Verdict.FENCED]
        assert await names(mailed) == ["paid"]

    async def test_a_consumed_message_may_be_named_again(self, store: Store) -> None:
        """An entry sent again changes nothing, and a message that is gone is no error."""
        mailed = need_inbox(store)
        grant = await granted(mailed)
        await mailed.send("run", "paid", b"1")
        (message,) = await mailed.inbox("run")
        entry = step(grant, 1, "wait", consumes=(message.id,))
        other = step(grant, 2, "more", consumes=(message.id, "no such message"))
        assert await appended(mailed, entry) == [Verdict.ACCEPTED]
        assert await appended(mailed, entry, other) == [Verdict.ACCEPTED] * 2

    async def test_a_grant_includes_the_inbox(self, store: Store) -> None:
        """A lease together with all that its owner needs to go on, its messages in order."""
        mailed = need_inbox(store)
        await mailed.save("run", snapshot(status="waiting", event="b"))
        for name in ("b", "a"):
            await mailed.send("run", name, as_json(name))
        (grant,) = await mailed.claim("ana", LONG, 1)
        assert [(message.name, message.payload) for message in grant.inbox] == [
            ("b", b'"b"'),
            ("a", b'"a"'),
        ]
        assert list(grant.inbox) == list(await mailed.inbox("run"))


class WakeChecks(Harness):
    """Events that make a run due."""

    async def test_an_awaited_event_makes_an_unowned_run_due(self, store: Store) -> None:
        """A run at rest that awaits `name` becomes due at once."""
        mailed = need_inbox(store)
        soon = await store_time(mailed) + LONG
        for id, wake_at in (("with time-out", soon), ("without", None)):
            rest = Rest("waiting", wake_at, ("other", "paid"))
            await rested(mailed, await granted(mailed, id), rest)
            await mailed.send(id, "paid", b"1")
        assert sorted(await claimed_ids(mailed)) == ["with time-out", "without"]

    async def test_only_an_awaited_event_wakes_a_paused_run(self, store: Store) -> None:
        """A run with the status paused is woken by an event in its `awaits`; others are kept."""
        mailed = need_inbox(store)
        for id in ("woken", "left"):
            await rested(mailed, await granted(mailed, id), Rest("paused", None, ("resume",)))
        assert await mailed.send("left", "paid", b"1") is Delivery.DELIVERED
        await mailed.send("woken", "resume", b"1")
        assert await claimed_ids(mailed) == ["woken"]
        assert await names(mailed, "left") == ["paid"]

    async def test_an_event_with_another_name_does_not_wake_a_run(self, store: Store) -> None:
        """A run at rest that awaits `name`: exactly this name."""
        mailed = need_inbox(store)
        await rested(mailed, await granted(mailed), Rest("waiting", None, ("paid",)))
        for name in ("Paid", "pai", "paid ", "p_id"):
            assert await mailed.send("run", name, b"1") is Delivery.DELIVERED
        assert await claimed_ids(mailed) == []
        assert len(await mailed.inbox("run")) == 4

    async def test_a_message_does_not_wake_a_suspended_run(self, store: Store) -> None:
        """Only a run that awaits the name becomes due; others keep their wake time."""
        mailed = need_inbox(store)
        now = await store_time(mailed)
        await rested(mailed, await granted(mailed), Rest("suspended", now + LONG))
        await mailed.send("run", "paid", b"1")
        assert await claimed_ids(mailed) == []
        assert await due_ids(mailed, now + 2 * LONG) == ["run"]

    async def test_a_message_does_not_affect_the_owner(self, store: Store) -> None:
        """A run that is owned is not at rest: its mail waits, and nobody else may claim it."""
        mailed = need_inbox(store)
        await rested(mailed, await granted(mailed), Rest("waiting", None, ("paid",)))
        owner = await granted(mailed)
        await mailed.send("run", "paid", b"1")
        assert await claimed_ids(mailed, "bob") == []
        assert await appended(mailed, step(owner, 1, "a")) == [Verdict.ACCEPTED]

    async def test_a_rest_that_awaits_a_message_in_the_inbox_is_due_at_once(
        self, store: Store
    ) -> None:
        """A run that goes to rest awaiting a name that lies untaken in its inbox is due at once."""
        mailed = need_inbox(store)
        grant = await granted(mailed)
        await mailed.send("run", "paid", b"1")
        await rested(mailed, grant, Rest("waiting", None, ("other", "paid")))
        assert await claimed_ids(mailed) == ["run"]

    async def test_a_rest_that_awaits_another_message_is_not_due(self, store: Store) -> None:
        """Awaiting a name that lies untaken in its inbox: not any other name."""
        mailed = need_inbox(store)
        grant = await granted(mailed)
        await mailed.send("run", "other", b"1")
        await rested(mailed, grant, Rest("waiting", None, ("paid",)))
        assert await claimed_ids(mailed) == []

    async def test_a_message_for_an_enqueued_run_is_kept(self, store: Store) -> None:
        """A signal sent before the wait is not lost."""
        mailed = need_inbox(store)
        await mailed.enqueue([new_run("run")])
        await mailed.send("run", "paid", b"1")
        (grant,) = await mailed.claim("ana", LONG, 1)
        assert [message.name for message in grant.inbox] == ["paid"]


class InboxChecks(SendChecks, TakeChecks, WakeChecks):
    """What a store with an inbox does."""
