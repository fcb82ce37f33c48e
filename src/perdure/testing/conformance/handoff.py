"""Checks of runs that are leased with the message that makes them due."""

import asyncio
from collections.abc import Sequence
from datetime import timedelta

import pytest

from perdure.errors import PerdureError
from perdure.snapshot import RunStatus
from perdure.store import (
    Delivery,
    Grant,
    Handoff,
    NewMessage,
    NewRun,
    Receipt,
    Rest,
    Store,
    SupportedVersions,
    Verdict,
)
from perdure.testing.conformance.harness import (
    LONG,
    HandingOffStore,
    Harness,
    acquire_run,
    append_entries,
    need_handoff,
    need_queues,
    send_one,
    step,
    steps_of,
    store_time,
    summary_of,
    supports,
    write_rest,
)
from perdure.testing.conformance.samples import as_json, snapshot
from perdure.testing.conformance.schedule import claimed_ids, new_run

ORDERS = supports("order")
MANY = 20


def paid(to: str = "run", dedup_id: str | None = None, name: str = "paid") -> NewMessage:
    """Return a small message."""
    return NewMessage(to, name, b"1", dedup_id)


async def wait_for_paid(
    store: HandingOffStore, *ids: str, version: int = 1, queue: str = "", workflow: str = "order"
) -> None:
    """Create runs that wait for the event "paid"."""
    rest = Rest("waiting", awaits=("other", "paid"))
    data = as_json(snapshot("a", status="waiting", event="paid", workflow=workflow))
    await store.enqueue(
        [NewRun(id, workflow, data, queue=queue, version=version, rest=rest) for id in ids]
    )


async def hand_off(
    store: HandingOffStore,
    *messages: NewMessage,
    owner: str = "ana",
    ttl: timedelta = LONG,
    limit: int = 100,
    supported: Sequence[SupportedVersions] = ORDERS,
) -> Handoff:
    """Send messages with a claim, and return the receipts and grants."""
    return await store.send_and_claim(messages, owner, ttl, limit, supports=supported)


def ids_of(grants: Sequence[Grant]) -> list[str]:
    """Return the ids of the granted runs, sorted."""
    return sorted(grant.lease.id for grant in grants)


class GrantChecks(Harness):
    """The grants of `send_and_claim`."""

    async def test_a_waiting_run_is_granted_with_its_message(self, store: Store) -> None:
        """The run of a single small message is granted, with everything that its owner needs."""
        handing = need_handoff(store)
        await wait_for_paid(handing, "run", version=3)
        handoff = await hand_off(handing, paid(), supported=[SupportedVersions("order", 2, 3)])
        assert handoff.receipts == (Receipt(Delivery.DELIVERED, 1),)
        assert ids_of(handoff.grants) == ["run"]
        grant = handoff.grants[0]
        assert (grant.lease.owner, grant.lease.has_messages) == ("ana", True)
        assert grant.lease.expires_at - grant.now == LONG
        assert (grant.version, grant.queue, grant.takeovers) == (3, "", 0)
        assert list(grant.snapshot["steps"]) == ["a"]
        assert list(grant.inbox) == list(await handing.inbox("run"))
        assert [(message.name, message.payload) for message in grant.inbox] == [("paid", b"1")]

    async def test_a_granted_run_has_an_owner(self, store: Store) -> None:
        """All in one write: the run is running, and no other process can claim it."""
        handing = need_handoff(store)
        await wait_for_paid(handing, "run")
        (grant,) = (await hand_off(handing, paid())).grants
        assert (await summary_of(handing)).status == "running"
        assert await claimed_ids(handing, "bob") == []
        assert await append_entries(handing, step(grant, 1, "b")) == [Verdict.ACCEPTED]
        assert await steps_of(handing) == ["a", "b"]
        (renewed,) = await handing.renew([grant.lease], LONG)
        assert renewed is not None

    async def test_the_owner_consumes_the_message_it_was_granted_with(self, store: Store) -> None:
        """The entry that names the message consumes it, and the run can be handed off again."""
        handing = need_handoff(store)
        await wait_for_paid(handing, "run")
        (first,) = (await hand_off(handing, paid())).grants
        consumed = step(first, 1, "b", consumes=(first.inbox[0].id,))
        assert await append_entries(handing, consumed) == [Verdict.ACCEPTED]
        assert list(await handing.inbox("run")) == []
        await write_rest(handing, first, Rest("waiting", awaits=("paid",)), "a", "b", n=2)
        assert await claimed_ids(handing) == []
        handoff = await hand_off(handing, paid(), owner="bob")
        assert handoff.receipts == (Receipt(Delivery.DELIVERED, 1),)
        (second,) = handoff.grants
        assert second.lease.epoch > first.lease.epoch
        assert list(second.snapshot["steps"]) == ["a", "b"]
        assert len(second.inbox) == 1
        assert await append_entries(handing, step(first, 3, "c")) == [Verdict.FENCED]
        assert await append_entries(handing, step(second, 1, "d")) == [Verdict.ACCEPTED]

    async def test_a_grant_contains_all_messages_in_order(self, store: Store) -> None:
        """One grant for a run contains all messages of the call, after those sent before."""
        handing = need_handoff(store)
        await wait_for_paid(handing, "run")
        for name in ("first", "second"):
            await send_one(handing, "run", name, b"0")
        messages = [paid(name="third"), paid(), paid(name="other"), paid()]
        handoff = await hand_off(handing, *messages)
        assert [receipt.unconsumed for receipt in handoff.receipts] == [3, 4, 5, 6]
        grants = handoff.grants or await handing.claim("ana", LONG, 1)
        assert len(grants) == 1
        names = [message.name for message in grants[0].inbox]
        assert names == ["first", "second", "third", "paid", "other", "paid"]
        assert list(grants[0].inbox) == list(await handing.inbox("run"))

    async def test_an_expired_handoff_is_claimed(self, store: Store) -> None:
        """A lease that came with a message expires like any other: the message is not lost."""
        handing = need_handoff(store)
        await wait_for_paid(handing, "run")
        assert len((await hand_off(handing, paid(), ttl=self.short)).grants) == 1
        await self.expire()
        (grant,) = await handing.claim("bob", LONG, 1)
        assert [message.name for message in grant.inbox] == ["paid"]
        assert grant.takeovers == 1

    async def test_a_released_handoff_is_claimed(self, store: Store) -> None:
        """A worker that cannot execute the run after all releases it, and it is due."""
        handing = need_handoff(store)
        await wait_for_paid(handing, "run")
        (grant,) = (await hand_off(handing, paid())).grants
        await handing.release([grant.lease])
        (next_grant,) = await handing.claim("bob", LONG, 1)
        assert [message.name for message in next_grant.inbox] == ["paid"]

    async def test_a_paused_run_is_granted_with_an_awaited_message(self, store: Store) -> None:
        """A paused run that awaits the message is made due by it, and no other is."""
        handing = need_handoff(store)
        data = as_json(snapshot(status="paused", workflow="order"))
        rest = Rest("paused", awaits=("resume",))
        await handing.enqueue([NewRun("run", "order", data, version=1, rest=rest)])
        assert not (await hand_off(handing, paid())).grants
        (grant,) = (await hand_off(handing, paid(name="resume"))).grants
        assert [message.name for message in grant.inbox] == ["paid", "resume"]


class RefusalChecks(Harness):
    """Runs that `send_and_claim` leaves alone."""

    async def test_a_run_that_awaits_another_message_is_not_granted(self, store: Store) -> None:
        """Only runs that await a message of this call: the message is kept for the others."""
        handing = need_handoff(store)
        await wait_for_paid(handing, "waiting")
        await handing.enqueue([new_run("queued")])
        now = await store_time(handing)
        await write_rest(
            handing, await acquire_run(handing, "suspended"), Rest("suspended", now + LONG)
        )
        ids = ("waiting", "queued", "suspended")
        for id in ids:
            handoff = await hand_off(handing, paid(id, name="Paid"))
            assert handoff == Handoff((Receipt(Delivery.DELIVERED, 1),))
        assert await claimed_ids(handing) == ["queued"]

    async def test_an_owned_run_is_not_granted(self, store: Store) -> None:
        """Never a run that has an owner, not even to that owner: the message waits."""
        handing = need_handoff(store)
        await wait_for_paid(handing, "run")
        grant = await acquire_run(handing)
        for owner in ("ana", "bob"):
            handoff = await hand_off(handing, paid(), owner=owner)
            assert not handoff.grants
            assert handoff.receipts[0].delivery is Delivery.DELIVERED
        assert await append_entries(handing, step(grant, 1, "b")) == [Verdict.ACCEPTED]

    async def test_a_run_that_is_not_supported_becomes_due(self, store: Store) -> None:
        """Only runs whose workflow and version `supports` includes; others become due."""
        handing = need_handoff(store)
        await wait_for_paid(handing, "old", version=1)
        await wait_for_paid(handing, "new", version=4)
        await wait_for_paid(handing, "other", version=2, workflow="Order")
        for id in ("old", "new", "other"):
            supported = [SupportedVersions("order", 2, 3)]
            handoff = await hand_off(handing, paid(id), supported=supported)
            assert not handoff.grants
            assert await claimed_ids(handing) == [id]

    async def test_a_run_without_a_version_is_granted(self, store: Store) -> None:
        """Whose version `supports` includes: as in a claim, version 0 is always included."""
        handing = need_handoff(store)
        await wait_for_paid(handing, "run", version=0)
        supported = [*supports("Order"), SupportedVersions("order", 2, 3)]
        handoff = await hand_off(handing, paid(), supported=supported)
        assert [grant.version for grant in handoff.grants] == [0]

    async def test_a_run_in_a_queue_becomes_due(self, store: Store) -> None:
        """Only runs in no queue, because others wait for their turn."""
        handing, queues = need_handoff(store), need_queues(store)
        await wait_for_paid(handing, "run", queue="emails")
        assert not (await hand_off(handing, paid())).grants
        assert len(await queues.claim("ana", LONG, 1, queues={"emails": 1})) == 1

    async def test_runs_beyond_the_limit_become_due(self, store: Store) -> None:
        """Up to `limit` runs; the others are due, so that none is lost."""
        handing = need_handoff(store)
        ids = [f"run-{number}" for number in range(5)]
        await wait_for_paid(handing, *ids)
        for limit, messages in ((0, [paid(ids[0])]), (2, [paid(id) for id in ids[1:]])):
            handoff = await hand_off(handing, *messages, limit=limit)
            assert len(handoff.grants) <= limit
            due = await handing.claim("bob", LONG, 9)
            expected = {message.to for message in messages} - set(ids_of(handoff.grants))
            assert ids_of(due) == sorted(expected)

    async def test_nothing_is_granted_without_supported_workflows(self, store: Store) -> None:
        """Without messages or workflows there is nothing to grant; messages are sent."""
        handing = need_handoff(store)
        await wait_for_paid(handing, "run")
        assert not (await hand_off(handing)).receipts
        handoff = await hand_off(handing, paid(), supported=())
        assert handoff == Handoff((Receipt(Delivery.DELIVERED, 1),))
        assert await claimed_ids(handing) == ["run"]

    async def test_receipts_are_those_of_send(self, store: Store) -> None:
        """Send messages like `send`: unknown, over and duplicate are told apart."""
        handing = need_handoff(store)
        await wait_for_paid(handing, "run")
        statuses: tuple[RunStatus, ...] = ("completed", "failed", "cancelled")
        for status in statuses:
            await write_rest(handing, await acquire_run(handing, status), Rest(status))
            assert await hand_off(handing, paid(status)) == Handoff((Receipt(Delivery.OVER),))
        assert await hand_off(handing, paid("missing")) == Handoff((Receipt(Delivery.UNKNOWN),))
        messages = [paid(dedup_id="x"), paid(dedup_id="x"), paid(name="more")]
        handoff = await hand_off(handing, *messages)
        deliveries = [receipt.delivery for receipt in handoff.receipts]
        assert deliveries == [Delivery.DELIVERED, Delivery.DUPLICATE, Delivery.DELIVERED]
        assert [receipt.unconsumed for receipt in handoff.receipts] == [1, 1, 2]
        repeated = await hand_off(handing, paid(dedup_id="x"))
        assert repeated == Handoff((Receipt(Delivery.DUPLICATE, 2),))

    async def test_bad_messages_are_refused_before_anything_is_sent(self, store: Store) -> None:
        """Arguments are refused, as in `send`, before any message is written."""
        handing = need_handoff(store)
        await wait_for_paid(handing, "run")
        with pytest.raises(PerdureError, match="to"):
            await hand_off(handing, paid(), paid(""))
        with pytest.raises(PerdureError, match="owner"):
            await hand_off(handing, paid(), owner="")
        assert list(await handing.inbox("run")) == []


class HandoffRaceChecks(Harness):
    """Concurrent handoffs."""

    async def test_each_run_has_one_owner_and_all_messages(self, store: Store) -> None:
        """Of many senders, one is granted each run, and no message is lost."""
        handing = need_handoff(store)
        ids = [f"run-{number}" for number in range(4)]
        await wait_for_paid(handing, *ids)
        work = [hand_off(handing, paid(ids[n % 4]), owner=f"owner {n}") for n in range(MANY)]
        handoffs = await asyncio.gather(*work)
        grants = [grant for handoff in handoffs for grant in handoff.grants]
        assert ids_of(grants) == ids
        for handoff in handoffs:
            assert handoff.receipts[0].delivery is Delivery.DELIVERED
        for id in ids:
            assert len(await handing.inbox(id)) == MANY // len(ids)
        entries = [step(grant, 1, "b") for grant in grants]
        assert await append_entries(handing, *entries) == [Verdict.ACCEPTED] * len(ids)

    async def test_claims_and_handoffs_share_the_runs(self, store: Store) -> None:
        """A run goes to one claimant only, by a claim or with its message."""
        handing = need_handoff(store)
        ids = [f"run-{number}" for number in range(MANY)]
        await wait_for_paid(handing, *ids)
        grants: list[Grant] = []

        async def claim() -> None:
            for _ in range(MANY):
                grants.extend(await handing.claim("bob", LONG, 3))

        async def send() -> None:
            for id in ids:
                await send_one(handing, id, "paid", b"0")
                grants.extend((await hand_off(handing, paid(id))).grants)

        await asyncio.gather(claim(), send())
        grants.extend(await handing.claim("bob", LONG, MANY))
        assert ids_of(grants) == sorted(ids)

    async def test_two_stores_share_the_runs(self, store: Store) -> None:
        """A run that another process handed off has an owner everywhere."""
        handing = need_handoff(store)
        another = await self.open_another(store)
        try:
            await wait_for_paid(handing, "run")
            (grant,) = (await hand_off(need_handoff(another), paid(), owner="bob")).grants
            assert not (await hand_off(handing, paid())).grants
            assert await claimed_ids(handing) == []
            assert await append_entries(handing, step(grant, 1, "b")) == [Verdict.ACCEPTED]
            assert len(await handing.inbox("run")) == 2
        finally:
            await another.close()


class HandoffChecks(GrantChecks, RefusalChecks, HandoffRaceChecks):
    """`send_and_claim`."""
