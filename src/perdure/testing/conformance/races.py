"""Checks of concurrent calls."""

import asyncio
import json
import sys
from asyncio.subprocess import PIPE, Process, create_subprocess_exec
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Iterable
from contextlib import asynccontextmanager
from itertools import cycle
from typing import TypeVar

import pytest

from perdure.store import Delivery, Grant, LeaseRequest, Rest, Store, Verdict, capabilities
from perdure.testing.conformance.harness import (
    LONG,
    Harness,
    ScheduledStore,
    acquire_run,
    append_entries,
    need_atomic_lease,
    need_inbox,
    need_journal,
    need_lease,
    need_schedule,
    request_run,
    send_one,
    step,
    steps_of,
    summary_of,
    within,
    write_rest,
)
from perdure.testing.conformance.samples import as_json, snapshot
from perdure.testing.conformance.schedule import claimed_ids, new_run

MANY = 50
ROUNDS = 20

T = TypeVar("T")


async def run_all(works: Iterable[Awaitable[T]]) -> list[T]:
    """Return the results of all awaitables, started at the same time."""
    return list(await asyncio.gather(*works))


class LeaseRaceChecks(Harness):
    """One owner at a time, however many requests are made at once."""

    async def test_one_of_many_requests_is_granted(self, store: Store) -> None:
        """An unexpired lease is never stolen: of fifty concurrent requests one is granted."""
        need_atomic_lease(store)
        leases = need_lease(store)
        await leases.save("run", snapshot())
        grants = await run_all(request_run(leases, owner=f"owner {n}") for n in range(MANY))
        assert len([grant for grant in grants if grant is not None]) == 1

    async def test_one_of_many_requests_takes_over_an_expired_lease(self, store: Store) -> None:
        """An expired lease can be taken over, by one owner."""
        need_atomic_lease(store)
        leases = need_lease(store)
        await acquire_run(leases, owner="ana", ttl=self.short)
        await self.expire()
        grants = await run_all(request_run(leases, owner=f"owner {n}") for n in range(MANY))
        assert [grant.takeovers for grant in grants if grant is not None] == [1]

    async def test_one_of_many_requests_creates_the_run(self, store: Store) -> None:
        """With `existing=False`, only a new run is granted: only one request creates it."""
        need_atomic_lease(store)
        leases = need_lease(store)
        create = as_json(snapshot())
        answers = await run_all(
            leases.acquire([LeaseRequest("run", f"owner {n}", LONG, create=create, existing=False)])
            for n in range(MANY)
        )
        created = [grant.created for (grant,) in answers if isinstance(grant, Grant)]
        assert created == [True]

    async def test_concurrent_acquisitions_have_different_epochs(self, store: Store) -> None:
        """The epoch is never used twice for one id, and the highest one fences out the others."""
        need_atomic_lease(store)
        journal = need_journal(store)
        grants = await run_all(acquire_run(journal, owner="ana") for _ in range(MANY))
        epochs = [grant.lease.epoch for grant in grants]
        assert len(set(epochs)) == MANY
        verdicts = await append_entries(journal, *(step(grant, 1, "a") for grant in grants))
        accepted = [v is Verdict.ACCEPTED for v in verdicts]
        assert accepted == [epoch == max(epochs) for epoch in epochs]

    async def test_an_expired_lease_is_either_renewed_or_taken_over(self, store: Store) -> None:
        """An expired lease is renewed until another owner takes over the run; then never."""
        need_atomic_lease(store)
        leases = need_lease(store)
        previous = [await acquire_run(leases, f"{n}", "ana", self.short) for n in range(ROUNDS)]
        await self.expire()
        for old in previous:
            (renewed_lease,), new_grant = await asyncio.gather(
                leases.renew([old.lease], LONG), request_run(leases, old.lease.id, "bob")
            )
            assert (renewed_lease is None) != (new_grant is None), (
                "both own the run, or neither does"
            )

    async def test_an_accepted_entry_is_visible_to_the_next_owner(self, store: Store) -> None:
        """Once a lease is granted, entries of an older epoch are refused or ignored.

        An accepted entry is in the grant; any other is never visible.
        """
        need_atomic_lease(store)
        journal = need_journal(store)
        previous = [await acquire_run(journal, f"{n}", ttl=self.short) for n in range(ROUNDS)]
        await self.expire()
        for number, old in enumerate(previous):
            (verdict,), new = await asyncio.gather(
                append_entries(journal, step(old, 1, "late")),
                request_run(journal, f"{number}", "bob"),
            )
            assert new is not None
            expected = ["late"] if verdict is Verdict.ACCEPTED else []
            assert list(new.snapshot["steps"]) == await steps_of(journal, f"{number}") == expected

    async def test_a_rest_is_either_in_the_next_grant_or_fenced(self, store: Store) -> None:
        """An accepted rest was written before the grant; a fenced one never was."""
        need_atomic_lease(store)
        journal = need_journal(store)
        previous = [await acquire_run(journal, f"{n}", ttl=self.short) for n in range(ROUNDS)]
        await self.expire()
        for number, old in enumerate(previous):
            verdict, new = await asyncio.gather(
                write_rest(journal, old, Rest("completed"), "end"),
                request_run(journal, f"{number}", "bob"),
            )
            assert new is not None
            expected = ["end"] if verdict is Verdict.ACCEPTED else []
            assert list(new.snapshot["steps"]) == await steps_of(journal, f"{number}") == expected
            assert (await summary_of(journal, f"{number}")).status == "running"

    async def test_concurrent_appends_of_many_runs_are_all_written(self, store: Store) -> None:
        """Concurrent appends of many runs are all written, each run's in order."""
        journal = need_journal(store)
        grants = [await acquire_run(journal, f"run {n}") for n in range(MANY)]
        keys = [f"{n}" for n in range(9, -1, -1)]
        for n, key in enumerate(keys):
            await run_all(append_entries(journal, step(grant, n, key)) for grant in grants)
        for grant in grants:
            assert await steps_of(journal, grant.lease.id) == keys


class ScheduleRaceChecks(Harness):
    """Each run goes to one claimant only."""

    async def test_concurrent_claims_share_the_due_runs(self, store: Store) -> None:
        """Each run goes to one claimant only, and none is left."""
        need_atomic_lease(store)
        await self._share([need_schedule(store)])

    async def test_concurrent_claims_of_two_instances_share_the_due_runs(
        self, store: Store
    ) -> None:
        """Each run goes to one claimant only, whichever instance it uses."""
        need_atomic_lease(store)
        another = await self.open_another(store)
        await self._share([need_schedule(store), need_schedule(another)])
        await another.close()

    async def _share(self, stores: list[ScheduledStore]) -> None:
        runs = [new_run(f"{n}") for n in range(2 * MANY)]
        await stores[0].enqueue(runs)
        claims = await run_all(
            claimed_ids(store, f"owner {n}", limit=3)
            for n, store in zip(range(MANY), cycle(stores), strict=False)
        )
        # A claim may skip runs that a concurrent claim has locked.
        claims.append(await claimed_ids(stores[0], "the last", limit=2 * MANY))
        counted = Counter(id for claim in claims for id in claim)
        assert counted == Counter(run.id for run in runs)

    async def test_one_of_many_enqueues_creates_the_run(self, store: Store) -> None:
        """Return `False` for each id that already existed: one of many calls creates it."""
        need_atomic_lease(store)
        schedule = need_schedule(store)
        answers = await run_all(schedule.enqueue([new_run("run")]) for _ in range(MANY))
        assert Counter(created for (created,) in answers) == {True: 1, False: MANY - 1}

    async def test_one_of_many_duplicates_is_delivered(self, store: Store) -> None:
        """Of many concurrent messages with one `dedup_id`, exactly one is delivered."""
        need_atomic_lease(store)
        inboxes = need_inbox(store)
        await acquire_run(inboxes)
        answers = await run_all(
            send_one(inboxes, "run", "paid", b"%d" % number, dedup_id="x") for number in range(MANY)
        )
        assert Counter(answers) == {Delivery.DELIVERED: 1, Delivery.DUPLICATE: MANY - 1}
        (message,) = await inboxes.inbox("run")
        assert answers[int(message.payload)] is Delivery.DELIVERED

    async def test_a_message_sent_during_a_rest_wakes_the_run(self, store: Store) -> None:
        """A message is neither lost nor late, even if it is sent during the rest."""
        need_atomic_lease(store)
        inboxes = need_inbox(store)
        for number in range(ROUNDS):
            grant = await acquire_run(inboxes, f"{number}")
            rest = Rest("waiting", None, ("paid",))
            await asyncio.gather(
                send_one(inboxes, f"{number}", "paid", b"1"), write_rest(inboxes, grant, rest)
            )
            assert await claimed_ids(inboxes, "bob") == [f"{number}"]

    async def test_each_run_is_claimed_by_one_of_two_processes(self, store: Store) -> None:
        """Each run goes to one claimant only, even if the claimants are separate processes."""
        schedule = need_schedule(store)
        if capabilities(store).shared == "process":
            pytest.skip(f"{type(store).__name__} is not shared by processes")
        if self.url is None:
            pytest.skip(f"{type(self).__name__} has no url: a second process is not checked")
        need_atomic_lease(store)
        await schedule.enqueue([new_run(f"{n}") for n in range(2 * MANY)])
        async with claimants(self.url, 2) as processes:
            outputs = await within(60, asyncio.ensure_future(run_all(map(claimed_by, processes))))
        counted = Counter(id for ids in outputs for id in ids)
        assert counted == Counter(f"{n}" for n in range(2 * MANY))
        assert {run.status for run in await schedule.list(limit=1_000)} == {"completed"}


@asynccontextmanager
async def claimants(url: str, count: int) -> AsyncGenerator[list[Process], None]:
    """Start processes that open the store and wait for the signal to claim."""
    command = [sys.executable, "-m", "perdure.testing.conformance.claimant", url]
    processes = [
        await create_subprocess_exec(*command, f"owner {n}", stdin=PIPE, stdout=PIPE)
        for n in range(count)
    ]
    try:
        for process in processes:
            assert process.stdout is not None
            assert (await process.stdout.readline()).strip() == b"ready"
        yield processes
    finally:
        for process in processes:
            if process.returncode is None:
                process.kill()
            await process.wait()


async def claimed_by(process: Process) -> list[str]:
    """Send the process its signal and return the ids of the runs it claimed."""
    output, _ = await process.communicate(b"go\n")
    assert process.returncode == 0, "a claiming process failed; its error is above"
    ids: list[str] = json.loads(output)
    return ids


class RaceChecks(LeaseRaceChecks, ScheduleRaceChecks):
    """All checks of concurrent calls."""
