"""Checks of due runs (enqueued, suspended, released or orphaned) and of claims."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from itertools import pairwise

import pytest

from perdure.store import Entry, Grant, LeaseRequest, NewRun, Refusal, Rest, ScheduleStore, Store
from perdure.testing.conformance.harness import (
    LONG,
    Harness,
    NotifyingStore,
    ScheduledStore,
    acquire_run,
    append_entries,
    need_inbox,
    need_notify,
    need_schedule,
    request_run,
    send_one,
    step,
    steps_of,
    store_time,
    summary_of,
    supports,
    write_rest,
)
from perdure.testing.conformance.samples import as_json, snapshot

SECOND = timedelta(seconds=1)
ATTEMPTS = 3
QUIET = 0.2


def new_run(id: str, workflow: str = "order", wake_at: datetime | None = None) -> NewRun:
    """Return a run to be created without an owner."""
    return NewRun(id, workflow, as_json(snapshot()), wake_at)


async def due_ids(
    store: ScheduleStore, now: datetime, limit: int = 100, workflows: Sequence[str] | None = None
) -> list[str]:
    """Return the ids of the due runs, in order."""
    return [
        due.id
        for due in await store.due(
            now, limit, supports=None if workflows is None else supports(*workflows)
        )
    ]


async def claimed_ids(
    store: ScheduleStore, owner: str = "ana", limit: int = 100, ttl: timedelta = LONG
) -> list[str]:
    """Return the ids of the runs that a claim returns, in order."""
    return [grant.lease.id for grant in await store.claim(owner, ttl, limit)]


class EnqueueChecks(Harness):
    """`enqueue` and `due`."""

    async def test_enqueue_creates_runs_that_wait_for_a_claim(self, store: Store) -> None:
        """Create runs that wait for a claim, all in one write; without `wake_at` due at once."""
        schedule = need_schedule(store)
        run_snapshot = snapshot("b", "10", "a", metadata={"input": [1]})
        runs = [NewRun("a", "order", as_json(run_snapshot)), new_run("b", "other")]
        assert list(await schedule.enqueue(runs)) == [True, True]
        assert await schedule.load("a") == run_snapshot
        assert (await summary_of(schedule, "b")).workflow == "other"
        assert sorted(await claimed_ids(schedule)) == ["a", "b"]

    async def test_enqueue_leaves_an_existing_run_unchanged(self, store: Store) -> None:
        """Return `False` for each id that already existed; that run stays unchanged."""
        schedule = need_schedule(store)
        await schedule.save("old", snapshot("a", status="completed"))
        answers = await schedule.enqueue([new_run("new"), new_run("old"), new_run("new")])
        assert list(answers) == [True, False, False]
        assert await steps_of(schedule, "old") == ["a"]
        assert await claimed_ids(schedule) == ["new"]
        assert list(await schedule.enqueue([new_run("new")])) == [False]
        assert await request_run(schedule, "new", "bob") is None
        assert list(await schedule.enqueue([])) == []

    async def test_due_returns_the_earliest_first(self, store: Store) -> None:
        """Return runs whose wake time is at or before `now`, earliest first."""
        schedule = need_schedule(store)
        now = await store_time(schedule)
        times = {"c": now, "a": now - 2 * SECOND, "later": now + SECOND, "b": now - SECOND}
        await schedule.enqueue([new_run(id, wake_at=wake_at) for id, wake_at in times.items()])
        due = await schedule.due(now, 100)
        assert [(run.id, run.wake_at) for run in due] == [(id, times[id]) for id in "abc"]
        assert await due_ids(schedule, now + SECOND) == ["a", "b", "c", "later"]

    async def test_due_returns_at_most_limit_runs(self, store: Store) -> None:
        """Return up to `limit` runs, and these are the earliest; 0 returns nothing."""
        schedule = need_schedule(store)
        now = await store_time(schedule)
        late = [new_run(f"{age}", wake_at=now - age * SECOND) for age in (1, 5, 3, 2, 4)]
        await schedule.enqueue(late)
        assert await due_ids(schedule, now, 2) == ["5", "4"]
        assert await due_ids(schedule, now, 0) == []
        assert await due_ids(schedule, now, 2) == ["5", "4"]

    async def test_due_is_restricted_to_workflows(self, store: Store) -> None:
        """`workflows` restricts the result to runs of these workflows."""
        schedule = need_schedule(store)
        now = await store_time(schedule)
        names = ["a", "b", "A", "a"]
        runs = [new_run(f"{n}", name, now - SECOND) for n, name in enumerate(names)]
        await schedule.enqueue(runs)
        assert sorted(await due_ids(schedule, now, workflows=["a"])) == ["0", "3"]
        assert sorted(await due_ids(schedule, now, workflows=["b", "A"])) == ["1", "2"]
        assert await due_ids(schedule, now, workflows=[]) == []

    async def test_due_omits_runs_with_an_unexpired_lease(self, store: Store) -> None:
        """A run with an unexpired lease is not due; an orphaned one is."""
        schedule = need_schedule(store)
        await acquire_run(schedule, "alive")
        assert await due_ids(schedule, await store_time(schedule)) == []
        await acquire_run(schedule, "orphan", ttl=self.short)
        await self.expire()
        assert await due_ids(schedule, await store_time(schedule)) == ["orphan"]

    async def test_due_returns_runs_at_their_wake_time(self, store: Store) -> None:
        """`wake_at` is when the run should be claimed (`None`: never by time)."""
        schedule = need_schedule(store)
        now = await store_time(schedule)
        rests = {
            "sleeper": Rest("suspended", now + SECOND),
            "waiter": Rest("waiting", now + 2 * SECOND, ("paid",)),
            "patient": Rest("waiting", None, ("paid",)),
            "over": Rest("completed"),
            "runnable": Rest("running", now),
        }
        for id, rest in rests.items():
            await write_rest(schedule, await acquire_run(schedule, id), rest)
        assert await due_ids(schedule, now) == ["runnable"]
        assert await due_ids(schedule, now + SECOND) == ["runnable", "sleeper"]
        assert await due_ids(schedule, now + LONG) == ["runnable", "sleeper", "waiter"]

    async def test_a_saved_run_is_due_when_its_snapshot_says(self, store: Store) -> None:
        """Replace the whole run with `snapshot`: it wakes when its snapshot says."""
        schedule = need_schedule(store)
        now = await store_time(schedule)
        await schedule.enqueue([new_run("over"), new_run("patient")])
        await schedule.save("over", snapshot(status="completed"))
        await schedule.save("patient", snapshot(status="waiting", event="paid"))
        await schedule.save("sleeper", snapshot(status="suspended", wake_at=now + SECOND))
        assert await due_ids(schedule, now) == []
        assert await due_ids(schedule, now + LONG) == ["sleeper"]

    async def test_a_paused_run_is_never_due(self, store: Store) -> None:
        """A paused run has no `wake_at`, whatever its snapshot waits for."""
        schedule = need_schedule(store)
        now = await store_time(schedule)
        await write_rest(schedule, await acquire_run(schedule, "rested"), Rest("paused"))
        await schedule.save("saved", snapshot(status="paused", wake_at=now - SECOND))
        assert await due_ids(schedule, now + LONG) == []
        assert await claimed_ids(schedule) == []

    async def test_a_paused_run_can_be_acquired(self, store: Store) -> None:
        """A paused run is woken by an owner that acquires it."""
        schedule = need_schedule(store)
        await write_rest(schedule, await acquire_run(schedule), Rest("paused"), "a")
        assert (await summary_of(schedule)).status == "paused"
        grant = await request_run(schedule, owner="bob")
        assert grant is not None
        assert list(grant.snapshot["steps"]) == ["a"]
        assert (await summary_of(schedule)).status == "running"

    async def test_a_deleted_run_is_not_due(self, store: Store) -> None:
        """Delete the run: it is no longer due."""
        schedule = need_schedule(store)
        await schedule.enqueue([new_run("run")])
        await schedule.delete("run")
        assert await due_ids(schedule, await store_time(schedule) + LONG) == []
        assert await claimed_ids(schedule) == []


class ClaimChecks(Harness):
    """`claim`."""

    async def test_claim_leases_and_loads_due_runs(self, store: Store) -> None:
        """Lease and load due runs: the grant is the same as an acquired one."""
        schedule = need_schedule(store)
        await schedule.enqueue([NewRun("run", "order", as_json(snapshot("b", "10", "a")))])
        (grant,) = await schedule.claim("ana", LONG, 10)
        assert (grant.lease.id, grant.lease.owner, grant.takeovers) == ("run", "ana", 0)
        assert list(grant.snapshot["steps"]) == ["b", "10", "a"]
        await append_entries(schedule, step(grant, 1, "c"))
        assert await steps_of(schedule) == ["b", "10", "a", "c"]
        assert await request_run(schedule, owner="bob") is None
        assert (await summary_of(schedule)).status == "running"

    async def test_claim_returns_the_earliest_first_up_to_limit(self, store: Store) -> None:
        """Up to `limit` runs, earliest first; 0 returns nothing."""
        schedule = need_schedule(store)
        now = await store_time(schedule)
        late = [new_run(f"{age}", wake_at=now - age * SECOND) for age in (1, 5, 3, 2, 4)]
        await schedule.enqueue(late)
        assert await claimed_ids(schedule, limit=0) == []
        assert await claimed_ids(schedule, limit=2) == ["5", "4"]
        assert await claimed_ids(schedule, limit=2) == ["3", "2"]
        assert await claimed_ids(schedule, limit=2) == ["1"]

    async def test_each_run_is_claimed_once(self, store: Store) -> None:
        """Each run goes to one claimant only; even its owner does not get it again."""
        schedule = need_schedule(store)
        await schedule.enqueue([new_run("run")])
        assert await claimed_ids(schedule, "ana") == ["run"]
        assert await claimed_ids(schedule, "bob") == []
        assert await claimed_ids(schedule, "ana") == []

    async def test_claim_omits_runs_that_are_not_due(self, store: Store) -> None:
        """Only due runs are claimed: none that is suspended, waiting, owned or over."""
        schedule = need_schedule(store)
        now = await store_time(schedule)
        await schedule.enqueue([new_run("later", wake_at=now + LONG)])
        await acquire_run(schedule, "owned")
        for id, rest in (
            ("sleeper", Rest("suspended", now + LONG)),
            ("waiter", Rest("waiting", None, ("paid",))),
            ("over", Rest("failed")),
        ):
            await write_rest(schedule, await acquire_run(schedule, id), rest)
        assert await claimed_ids(schedule, "bob") == []

    async def test_an_orphaned_run_is_claimed(self, store: Store) -> None:
        """A run is orphaned when its owner's lease has expired: it is claimed with its journal."""
        schedule = need_schedule(store)
        grant = await acquire_run(schedule, ttl=self.short)
        await append_entries(schedule, step(grant, 1, "a"))
        takeovers = []
        for owner in ("bob", "cem"):
            await self.expire()
            grants = await schedule.claim(owner, self.short, 10)
            assert [grant.lease.id for grant in grants] == ["run"]
            claimed = grants[0]
            assert list(claimed.snapshot["steps"]) == ["a"]
            assert claimed.lease.epoch > grant.lease.epoch
            takeovers.append(claimed.takeovers)
        assert takeovers == [0, 1]

    async def test_a_renewed_run_is_not_orphaned(self, store: Store) -> None:
        """A run is orphaned when its owner's lease has expired; a renewed lease has not."""
        schedule = need_schedule(store)
        grant = await acquire_run(schedule, ttl=self.short)
        await schedule.renew([grant.lease], LONG)
        await self.expire()
        assert await claimed_ids(schedule, "bob") == []

    async def test_a_released_run_is_claimed_at_once(self, store: Store) -> None:
        """Without `wake_at` they can be claimed at once."""
        schedule = need_schedule(store)
        grant = await acquire_run(schedule)
        await schedule.release([grant.lease])
        assert await claimed_ids(schedule, "bob") == ["run"]

    async def test_a_released_run_is_claimed_at_wake_at(self, store: Store) -> None:
        """So that the runs can be claimed at `wake_at`."""
        schedule = need_schedule(store)
        now = await store_time(schedule)
        for id, delay in (("soon", self.short), ("later", LONG)):
            grant = await acquire_run(schedule, id)
            await schedule.release([grant.lease], wake_at=now + delay)
        await self.expire()
        assert await claimed_ids(schedule, "bob") == ["soon"]

    async def test_a_suspended_run_is_claimed_at_its_wake_time(self, store: Store) -> None:
        """`wake_at` is when the run should be claimed."""
        schedule = need_schedule(store)
        now = await store_time(schedule)
        for id, delay in (("soon", self.short), ("later", LONG)):
            rest = Rest("suspended", now + delay)
            await write_rest(schedule, await acquire_run(schedule, id), rest)
        await self.expire()
        (grant,) = await schedule.claim("bob", LONG, 10)
        assert (grant.lease.id, grant.takeovers) == ("soon", 0)

    async def test_claim_is_restricted_to_workflows(self, store: Store) -> None:
        """`supports` restricts the claim to runs of these workflows."""
        schedule = need_schedule(store)
        await schedule.enqueue([new_run("1", "a"), new_run("2", "b"), new_run("3", "A")])
        await acquire_run(schedule, "4", ttl=self.short, workflow="b")
        await self.expire()
        assert list(await schedule.claim("ana", LONG, 10, supports=[])) == []
        grants = await schedule.claim("ana", LONG, 10, supports=supports("b", "c"))
        assert sorted(grant.lease.id for grant in grants) == ["2", "4"]
        assert sorted(await claimed_ids(schedule)) == ["1", "3"]

    async def test_an_unreadable_run_is_left_out_of_a_claim(self, store: Store) -> None:
        """Another run takes its place, and it is not claimed again until a delay has passed."""
        schedule = need_schedule(store)
        await self._make_unreadable(schedule, "bad")
        await self.expire()
        await schedule.enqueue([new_run("good 1"), new_run("good 2")])
        grants = await schedule.claim("ana", LONG, 2)
        assert sorted(grant.lease.id for grant in grants) == ["good 1", "good 2"]
        assert await claimed_ids(schedule) == []
        assert list(await schedule.due(grants[0].now, 10)) == []
        assert await schedule.delete("bad") in {True, None}

    async def test_an_unreadable_run_is_refused_and_affects_no_other(self, store: Store) -> None:
        """A run that cannot be read is refused and not leased, and affects no other request."""
        journal = need_schedule(store)
        await self._make_unreadable(journal, "bad")
        await acquire_run(journal, "good", ttl=self.short)
        await self.expire()
        for owner in ("ana", "bob"):
            requests = [LeaseRequest(id, owner, self.short) for id in ("bad", "good")]
            refusal, grant = await journal.acquire(requests)
            assert isinstance(refusal, Refusal)
            assert (refusal.id, refusal.reason) == ("bad", "unreadable")
            assert "'bad'" in refusal.error
            assert isinstance(grant, Grant)
            await journal.release([grant.lease])

    async def _make_unreadable(self, store: ScheduledStore, id: str) -> None:
        """Write an entry that is not a delta, under a lease that expires soon."""
        grant = await acquire_run(store, id, ttl=self.short)
        await append_entries(store, Entry(id, grant.lease.epoch, 1, b"[]"))

    async def test_each_claim_increases_the_epoch(self, store: Store) -> None:
        """The epoch increases with each acquisition, including a claim; it is a plain `int`."""
        schedule = need_schedule(store)
        await schedule.enqueue([new_run("run")])
        epochs = []
        for _ in range(4):
            (grant,) = await schedule.claim("ana", LONG, 1)
            epochs.append(grant.lease.epoch)
            await schedule.release([grant.lease])
        assert all(earlier < later for earlier, later in pairwise(epochs))
        assert {type(epoch) for epoch in epochs} == {int}


class NotifyChecks(Harness):
    """`notifications`. They may be lost, so each check makes several attempts."""

    async def test_enqueueing_a_run_sends_a_notification(self, store: Store) -> None:
        """Yield whenever a run may have become due: here a new run."""
        schedule = need_notify(store)
        async with listening(schedule) as notified:
            for number in range(ATTEMPTS):
                await schedule.enqueue([new_run(f"{number}")])
                if await notified():
                    return
        pytest.fail("enqueued runs sent no notification")

    async def test_releasing_a_run_sends_a_notification(self, store: Store) -> None:
        """Yield whenever a run may have become due: here a released run."""
        schedule = need_notify(store)
        async with listening(schedule) as notified:
            for _ in range(ATTEMPTS):
                await schedule.release([(await acquire_run(schedule)).lease])
                if await notified():
                    return
        pytest.fail("released runs sent no notification")

    async def test_sending_an_awaited_event_sends_a_notification(self, store: Store) -> None:
        """Yield whenever a run may have become due: here one that awaits the event."""
        schedule, inboxes = need_notify(store), need_inbox(store)
        async with listening(schedule) as notified:
            for number in range(ATTEMPTS):
                grant = await acquire_run(inboxes, f"{number}")
                await write_rest(inboxes, grant, Rest("waiting", None, ("paid",)))
                await send_one(inboxes, f"{number}", "paid", b"1")
                if await notified():
                    return
        pytest.fail("awaited events sent no notification")

    async def test_notifications_reach_another_instance(self, store: Store) -> None:
        """Yield whenever a run may have become due, in any process."""
        schedule = need_notify(store)
        another = need_notify(await self.open_another(store))
        async with listening(another) as notified:
            for number in range(ATTEMPTS):
                await schedule.enqueue([new_run(f"{number}")])
                if await notified():
                    break
            else:
                pytest.fail("no notification reached another instance")
        await another.close()


@asynccontextmanager
async def listening(
    store: NotifyingStore,
) -> AsyncGenerator[Callable[[], Awaitable[bool]], None]:
    """Yield a function that waits up to a second and returns whether a notification came.

    A store may send a notification to each new listener, so only later ones count.
    """
    notifications = store.notifications()
    waiting = asyncio.ensure_future(anext(notifications))

    async def notified() -> bool:
        await asyncio.wait([waiting], timeout=1)
        return waiting.done()

    # A server may need some time to register a listener.
    while (await asyncio.wait([waiting], timeout=QUIET))[0]:
        waiting.result()
        waiting = asyncio.ensure_future(anext(notifications))
    try:
        yield notified
    finally:
        waiting.cancel()
        await asyncio.wait([waiting])


class ScheduleChecks(EnqueueChecks, ClaimChecks, NotifyChecks):
    """The abilities of a store with a schedule."""
