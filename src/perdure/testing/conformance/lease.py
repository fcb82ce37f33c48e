"""Checks of leases: who owns a run, until when, and what a previous owner can still do."""

from datetime import timedelta

from perdure.store import (
    Grant,
    Lease,
    LeaseRequest,
    LeaseStore,
    Refusal,
    Rest,
    Store,
    Verdict,
)
from perdure.testing.conformance.harness import (
    LONG,
    Harness,
    acquire_run,
    append_entries,
    need_inbox,
    need_journal,
    need_lease,
    refused,
    request_run,
    send_one,
    step,
    steps_of,
    summary_of,
    write_rest,
)
from perdure.testing.conformance.samples import as_json, snapshot


class AcquireChecks(Harness):
    """`acquire`."""

    async def test_a_free_run_is_granted(self, store: Store) -> None:
        """Return a lease and the run read under it for each request."""
        leases = need_lease(store)
        await leases.save("run", snapshot("a"))
        grant = await request_run(leases, owner="ana")
        assert grant is not None
        assert (grant.lease.id, grant.lease.owner) == ("run", "ana")
        assert grant.snapshot == snapshot("a")
        assert not grant.created

    async def test_another_owners_unexpired_lease_is_never_stolen(self, store: Store) -> None:
        """Refused if another owner's lease has not expired: it is never stolen."""
        leases = need_lease(store)
        grant = await acquire_run(leases, owner="ana")
        assert await request_run(leases, owner="bob") is None
        assert list(await leases.renew([grant.lease], LONG)) != [None]

    async def test_an_expired_lease_can_be_taken_over(self, store: Store) -> None:
        """An expired lease can be taken over."""
        leases = need_lease(store)
        await acquire_run(leases, owner="ana", ttl=self.short)
        await self.expire()
        assert await request_run(leases, owner="bob") is not None

    async def test_an_owner_can_acquire_its_own_run_again(self, store: Store) -> None:
        """A lease that the same owner already holds is granted again, with a new epoch."""
        leases = need_lease(store)
        first = await acquire_run(leases, owner="ana")
        second = await acquire_run(leases, owner="ana")
        assert second.lease.epoch > first.lease.epoch
        assert second.takeovers == 0
        assert list(await leases.renew([first.lease], LONG)) == [None]

    async def test_a_missing_run_is_not_granted(self, store: Store) -> None:
        """Refused if the run is missing and the request has no `create`."""
        leases = need_lease(store)
        assert await request_run(leases) is None
        only_new = LeaseRequest("run", "ana", LONG, existing=False)
        assert (await refused(leases, only_new)).reason == "missing"
        assert await leases.load("run") is None

    async def test_create_adds_a_missing_run(self, store: Store) -> None:
        """A missing run is created with it; `workflow` names a new run's workflow."""
        leases = need_lease(store)
        first = snapshot("b", "10", "9", metadata={"input": 1})
        grant = await acquire_run(leases, create=first, workflow="order")
        assert grant.created
        assert grant.snapshot == await leases.load("run") == first
        assert (await summary_of(leases)).workflow == "order"

    async def test_create_leaves_an_existing_run_unchanged(self, store: Store) -> None:
        """Only a missing run is created with `create`."""
        leases = need_lease(store)
        await leases.save("run", snapshot("a", workflow="order"))
        grant = await acquire_run(leases, create=snapshot("b"), workflow="other")
        assert not grant.created
        assert list(grant.snapshot["steps"]) == await steps_of(leases) == ["a"]
        assert (await summary_of(leases)).workflow == "order"

    async def test_existing_false_leaves_an_existing_run_unchanged(self, store: Store) -> None:
        """With `existing=False` only a new run is granted; an existing one stays unchanged."""
        leases = need_lease(store)
        create = as_json(snapshot("b"))
        await leases.save("run", snapshot("a", status="completed"))
        request = LeaseRequest("run", "ana", LONG, create=create, existing=False)
        assert (await refused(leases, request)).reason == "exists"
        assert (await summary_of(leases)).status == "completed"
        assert await steps_of(leases) == ["a"]

    async def test_existing_false_does_not_fence_the_owner(self, store: Store) -> None:
        """An existing run stays unchanged, even if its owner made the request."""
        leases = need_lease(store)
        grant = await acquire_run(leases, owner="ana")
        create = as_json(snapshot())
        request = LeaseRequest("run", "ana", LONG, create=create, existing=False)
        assert (await refused(leases, request)).reason == "exists"
        assert list(await leases.renew([grant.lease], LONG)) != [None]

    async def test_existing_false_grants_a_new_run(self, store: Store) -> None:
        """With `existing=False` a new run is granted."""
        leases = need_lease(store)
        request = LeaseRequest("run", "ana", LONG, create=as_json(snapshot("a")), existing=False)
        (grant,) = await leases.acquire([request])
        assert isinstance(grant, Grant)
        assert grant.created

    async def test_requests_are_answered_in_order(self, store: Store) -> None:
        """Return a lease or a refusal for each request."""
        leases = need_lease(store)
        await acquire_run(leases, "taken", "bob")
        create = as_json(snapshot())
        requests = [
            LeaseRequest("new", "ana", LONG, create=create),
            LeaseRequest("taken", "ana", LONG, create=create),
            LeaseRequest("missing", "ana", LONG),
            LeaseRequest("other", "ana", LONG, create=create),
            LeaseRequest("new", "bob", LONG, create=create),
        ]
        answers = [
            answer.lease.id if isinstance(answer, Grant) else answer.reason
            for answer in await leases.acquire(requests)
        ]
        assert answers == ["new", "owned", "missing", "other", "owned"]
        assert list(await leases.acquire([])) == []

    async def test_a_refusal_names_the_owner_and_the_expiry(self, store: Store) -> None:
        """A refusal names the owner of an unexpired lease and its expiry."""
        leases = need_journal(store)
        grant = await acquire_run(leases, owner="ana")
        refusal = await refused(leases, LeaseRequest("run", "bob", LONG))
        assert refusal == Refusal("run", "owned", "ana", grant.lease.expires_at)
        assert await refused(leases, LeaseRequest("missing", "bob", LONG)) == Refusal(
            "missing", "missing"
        )

    async def test_a_lease_is_taken_over_instead_of_its_owner(self, store: Store) -> None:
        """An unexpired lease is not stolen, unless the request names exactly its owner."""
        leases = need_journal(store)
        first = await acquire_run(leases, owner="ana")
        for other in ("cem", "an", "ana "):
            request = LeaseRequest("run", "bob", LONG, instead_of=other)
            assert (await refused(leases, request)).owner == "ana"
        second = await self.take_over(leases, "ana", by="bob")
        assert second.lease.epoch > first.lease.epoch
        assert list(await leases.renew([first.lease], LONG)) == [None]
        assert (await refused(leases, LeaseRequest("run", "ana", LONG))).owner == "bob"

    async def test_taking_over_fences_the_previous_owner(self, store: Store) -> None:
        """Once the lease is granted, every entry of an older epoch is refused."""
        journal = need_journal(store)
        first = await acquire_run(journal, owner="ana")
        assert await append_entries(journal, step(first, 1, "a")) == [Verdict.ACCEPTED]
        second = await self.take_over(journal, "ana", by="bob")
        assert await append_entries(journal, step(first, 2, "b")) == [Verdict.FENCED]
        assert list(second.snapshot["steps"]) == ["a"]

    async def test_an_owner_that_was_replaced_counts_as_a_takeover(self, store: Store) -> None:
        """`takeovers` counts consecutive owners that lost the run before they wrote an entry."""
        journal = need_journal(store)
        await acquire_run(journal, owner="ana")
        second = await self.take_over(journal, "ana", by="bob")
        third = await self.take_over(journal, "bob", by="cem")
        await append_entries(journal, step(third, 1, "a"))
        fourth = await self.take_over(journal, "cem", by="eva")
        assert [grant.takeovers for grant in (second, third, fourth)] == [1, 2, 0]

    async def take_over(self, store: LeaseStore, owner: str, *, by: str) -> Grant:
        """Take over the run from an owner."""
        (grant,) = await store.acquire([LeaseRequest("run", by, LONG, instead_of=owner)])
        assert isinstance(grant, Grant)
        return grant

    async def test_a_list_names_the_owner_of_each_run(self, store: Store) -> None:
        """`owner` has the run's lease."""
        leases = need_journal(store)
        grant = await acquire_run(leases, owner="ana")
        assert (await summary_of(leases)).owner == "ana"
        await leases.release([grant.lease])
        assert (await summary_of(leases)).owner is None

    async def test_each_acquisition_increases_the_epoch(self, store: Store) -> None:
        """The epoch increases each time and is never used twice, even after `delete`.

        It is a plain `int`, not a driver's subclass, which JSON encoders may refuse.
        """
        leases = need_lease(store)
        epochs = []
        for turn in range(12):
            grant = await acquire_run(leases)
            epochs.append(grant.lease.epoch)
            if turn % 3 == 0:
                await leases.release([grant.lease])
            if turn % 3 == 1:
                await leases.delete("run")
        assert epochs == sorted(set(epochs))
        assert {type(epoch) for epoch in epochs} == {int}
        assert epochs[0] > 0
        assert epochs[-1] < 2**53

    async def test_a_granted_run_is_running_until_its_next_rest(self, store: Store) -> None:
        """A granted run has the status running until its next rest."""
        journal = need_journal(store)
        await journal.save("run", snapshot("a", status="completed"))
        grant = await acquire_run(journal)
        assert (await summary_of(journal)).status == "running"
        await append_entries(journal, step(grant, 1, "b"))
        assert (await summary_of(journal)).status == "running"
        await write_rest(journal, grant, Rest("waiting"))
        assert (await summary_of(journal)).status == "waiting"

    async def test_a_grant_includes_the_journal(self, store: Store) -> None:
        """The run read under the lease includes the journal."""
        journal = need_journal(store)
        first = await acquire_run(journal, create=snapshot("b"))
        await append_entries(journal, step(first, 1, "10"), step(first, 2, "a"))
        await journal.release([first.lease])
        second = await acquire_run(journal, owner="bob")
        assert list(second.snapshot["steps"]) == ["b", "10", "a"]

    async def test_times_are_aware_utc(self, store: Store) -> None:
        """Times are aware UTC datetimes of the store's own clock; a lease lasts for `ttl`."""
        leases = need_lease(store)
        grant = await acquire_run(leases, ttl=LONG)
        assert grant.now.utcoffset() == grant.lease.expires_at.utcoffset() == timedelta(0)
        assert abs(grant.lease.expires_at - grant.now - LONG) < timedelta(seconds=1)

    async def test_takeovers_are_counted_until_a_rest(self, store: Store) -> None:
        """`takeovers` counts consecutive owners whose lease expired; a rest resets it to zero."""
        journal = need_journal(store)
        counts = []
        for owner in ("ana", "bob", "ana"):
            grant = await acquire_run(journal, owner=owner, ttl=self.short)
            counts.append(grant.takeovers)
            await self.expire()
        grant = await acquire_run(journal, owner="cem")
        counts.append(grant.takeovers)
        await write_rest(journal, grant, Rest("suspended"))
        counts.append((await acquire_run(journal, owner="dan")).takeovers)
        assert counts == [0, 1, 2, 3, 0]

    async def test_an_entry_resets_the_takeovers(self, store: Store) -> None:
        """An accepted entry resets `takeovers` to zero: its owner made progress."""
        journal = need_journal(store)
        counts = []
        for owner in ("ana", "bob", "cem", "dan"):
            grant = await acquire_run(journal, owner=owner, ttl=self.short)
            counts.append(grant.takeovers)
            if owner == "bob":
                await append_entries(journal, step(grant, 1, "a"))
            await self.expire()
        assert counts == [0, 1, 0, 1]

    async def test_a_fenced_entry_does_not_reset_the_takeovers(self, store: Store) -> None:
        """Only an *accepted* entry resets `takeovers` to zero."""
        journal = need_journal(store)
        paused = await acquire_run(journal, owner="ana", ttl=self.short)
        await self.expire()
        await acquire_run(journal, owner="bob", ttl=self.short)
        assert await append_entries(journal, step(paused, 1, "late")) == [Verdict.FENCED]
        await self.expire()
        assert (await acquire_run(journal, owner="cem")).takeovers == 2

    async def test_a_release_neither_counts_nor_resets_takeovers(self, store: Store) -> None:
        """A release without an entry leaves `takeovers` unchanged; one after an entry resets it."""
        journal = need_journal(store)
        await acquire_run(journal, owner="ana", ttl=self.short)
        await self.expire()
        counts = []
        for owner, entries in (("bob", 0), ("cem", 1), ("dan", 0)):
            grant = await acquire_run(journal, owner=owner)
            counts.append(grant.takeovers)
            await append_entries(journal, *(step(grant, n, "a") for n in range(entries)))
            await journal.release([grant.lease])
        assert counts == [1, 1, 0]

    async def test_a_paused_owner_is_fenced_out(self, store: Store) -> None:
        """Once the lease is granted, every entry of an older epoch is refused or ignored."""
        journal = need_journal(store)
        paused = await acquire_run(journal, owner="ana", ttl=self.short)
        await append_entries(journal, step(paused, 1, "a"))
        await self.expire()
        current = await acquire_run(journal, owner="bob")
        late = await append_entries(journal, step(paused, 2, "late"), step(current, 1, "b"))
        assert late == [Verdict.FENCED, Verdict.ACCEPTED]
        assert await write_rest(journal, paused, Rest("completed"), "late") is Verdict.FENCED
        assert list(await journal.renew([paused.lease], LONG)) == [None]
        assert await steps_of(journal) == ["a", "b"]


class RenewChecks(Harness):
    """`renew` and `release`."""

    async def test_renew_moves_the_expiry(self, store: Store) -> None:
        """Move the expiry of all leases to `ttl` from now."""
        leases = need_lease(store)
        grants = [await acquire_run(leases, id, ttl=self.short) for id in ("a", "b")]
        renewed = await leases.renew([grant.lease for grant in grants], LONG)
        await self.expire()
        for grant, lease in zip(grants, renewed, strict=True):
            assert lease is not None
            assert (lease.id, lease.epoch) == (grant.lease.id, grant.lease.epoch)
            assert lease.expires_at > grant.lease.expires_at
            assert await request_run(leases, lease.id, "bob") is None

    async def test_renew_can_shorten_a_lease(self, store: Store) -> None:
        """Move the expiry of all leases to `ttl` from now, even to an earlier time."""
        leases = need_lease(store)
        grant = await acquire_run(leases, ttl=LONG)
        await leases.renew([grant.lease], self.short)
        await self.expire()
        assert await request_run(leases, owner="bob") is not None

    async def test_renew_returns_none_for_each_lost_lease(self, store: Store) -> None:
        """Return `None` for each that was lost, in order."""
        leases = need_lease(store)
        current, deleted, taken_over, released = [
            await acquire_run(leases, id) for id in ("current", "deleted", "taken", "released")
        ]
        await leases.delete("deleted")
        await leases.release([taken_over.lease, released.lease])
        await acquire_run(leases, "taken", "bob")
        all_four = [deleted.lease, taken_over.lease, current.lease, released.lease]
        answers = [lease and lease.id for lease in await leases.renew(all_four, LONG)]
        assert answers == [None, None, "current", None]
        assert list(await leases.renew([], LONG)) == []

    async def test_an_expired_lease_is_renewed_until_the_run_is_taken_over(
        self, store: Store
    ) -> None:
        """An expired lease is renewed until another owner takes over the run."""
        leases = need_lease(store)
        grant = await acquire_run(leases, owner="ana", ttl=self.short)
        await self.expire()
        assert list(await leases.renew([grant.lease], LONG)) != [None]
        assert await request_run(leases, owner="bob") is None

    async def test_a_lease_that_was_taken_over_is_never_renewed(self, store: Store) -> None:
        """Never, even if the new owner's lease has expired or was released."""
        leases = need_lease(store)
        first = await acquire_run(leases, owner="ana", ttl=self.short)
        await self.expire()
        second = await acquire_run(leases, owner="bob", ttl=self.short)
        assert list(await leases.renew([first.lease], LONG)) == [None]
        await self.expire()
        assert list(await leases.renew([first.lease], LONG)) == [None]
        await leases.release([second.lease])
        assert list(await leases.renew([first.lease], LONG)) == [None]

    async def test_a_lease_shows_if_there_are_messages(self, store: Store) -> None:
        """`has_messages`: there were unconsumed messages when the lease was granted or renewed."""
        inboxes = need_inbox(store)
        first = await acquire_run(inboxes)
        await send_one(inboxes, "run", "paid", b"1")
        (renewed,) = await inboxes.renew([first.lease], LONG)
        second = await acquire_run(inboxes)
        (message,) = second.inbox
        await append_entries(inboxes, step(second, 1, "a", consumes=(message.id,)))
        third = await acquire_run(inboxes)
        assert renewed is not None
        answers = [
            lease.has_messages for lease in (first.lease, renewed, second.lease, third.lease)
        ]
        assert answers == [False, True, True, False]

    async def test_a_released_run_can_be_acquired_at_once(self, store: Store) -> None:
        """Release the leases without a rest, so that the runs can be acquired at once."""
        leases = need_lease(store)
        grants = [await acquire_run(leases, id) for id in ("a", "b")]
        await leases.release([grant.lease for grant in grants])
        for id in ("a", "b"):
            grant = await request_run(leases, id, "bob")
            assert grant is not None
            assert grant.takeovers == 0

    async def test_a_release_keeps_the_journal(self, store: Store) -> None:
        """The journal is kept."""
        journal = need_journal(store)
        grant = await acquire_run(journal)
        await append_entries(journal, step(grant, 1, "a"))
        await journal.release([grant.lease])
        assert await steps_of(journal) == ["a"]
        assert (await summary_of(journal)).status == "running"

    async def test_releasing_a_lease_that_is_not_current_does_nothing(self, store: Store) -> None:
        """Releasing a lease that is not the run's current one does nothing."""
        leases = need_lease(store)
        old = await acquire_run(leases, owner="ana")
        await leases.release([old.lease])
        new = await acquire_run(leases, owner="bob")
        forged = Lease("run", "cem", new.lease.epoch, new.lease.expires_at)
        missing = Lease("missing", "cem", 1, new.lease.expires_at)
        await leases.release([old.lease, forged, missing])
        assert await request_run(leases, owner="cem") is None
        assert list(await leases.renew([new.lease], LONG)) != [None]


class LeaseChecks(AcquireChecks, RenewChecks):
    """The abilities of a store with leases."""
