"""Checks of pruning and of statistics."""

from datetime import timedelta
from typing import get_args

from perdure.snapshot import RunStatus, is_over
from perdure.store import Rest, Store
from perdure.testing.conformance.harness import (
    LONG,
    TICK,
    Harness,
    acquire_run,
    need_everything,
    need_journal,
    need_lease,
    need_maintenance,
    need_schedule,
    store_time,
    summary_of,
    write_rest,
)
from perdure.testing.conformance.queues import queued
from perdure.testing.conformance.samples import snapshot
from perdure.testing.conformance.schedule import SECOND, new_run

NOW = timedelta(0)
STATUSES: tuple[RunStatus, ...] = get_args(RunStatus)


class PruneChecks(Harness):
    """`prune`."""

    async def test_prune_deletes_runs_that_are_over(self, store: Store) -> None:
        """Delete runs that are over and return how many. A run that is not over is never pruned."""
        maintenance = need_maintenance(store)
        for status in STATUSES:
            await maintenance.save(status, snapshot(status=status))
        await self.pass_time(TICK)
        assert await maintenance.prune(NOW) == 3
        assert {run.id for run in await maintenance.list()} == {
            "queued",
            "running",
            "suspended",
            "waiting",
            "paused",
        }

    async def test_prune_keeps_runs_that_are_newer(self, store: Store) -> None:
        """Only runs that were last updated longer ago than `older_than` are deleted."""
        maintenance = need_maintenance(store)
        await maintenance.save("old", snapshot(status="completed"))
        assert await maintenance.prune(LONG) == 0
        await self.pass_time(2 * self.short)
        await maintenance.save("new", snapshot(status="completed"))
        assert await maintenance.prune(1.5 * self.short) == 1
        assert [run.id for run in await maintenance.list()] == ["new"]

    async def test_prune_measures_the_age_from_the_rest(self, store: Store) -> None:
        """Last updated: a run that has just ended is new, however long ago it started."""
        maintenance, journal = need_maintenance(store), need_journal(store)
        grant = await acquire_run(journal)
        await self.pass_time(6 * self.short)
        await write_rest(journal, grant, Rest("completed"))
        # Nearly as old as the start: on a busy machine, the rest may be some time ago too.
        assert await maintenance.prune(5.5 * self.short) == 0

    async def test_prune_may_be_restricted_to_one_status(self, store: Store) -> None:
        """`status` restricts the deletion to runs with this status."""
        maintenance = need_maintenance(store)
        for status in STATUSES:
            await maintenance.save(status, snapshot(status=status))
        await self.pass_time(TICK)
        assert await maintenance.prune(NOW, status="failed") == 1
        assert {run.id for run in await maintenance.list()} == set(STATUSES) - {"failed"}

    async def test_prune_never_deletes_a_run_that_is_not_over(self, store: Store) -> None:
        """A run that is not over is never pruned, whatever `status` is."""
        maintenance = need_maintenance(store)
        await maintenance.save("run", snapshot(status="waiting", event="paid"))
        await self.pass_time(TICK)
        for status in STATUSES:
            assert is_over(status) or await maintenance.prune(NOW, status=status) == 0
        assert (await summary_of(maintenance)).status == "waiting"

    async def test_prune_never_deletes_a_run_that_was_granted_again(self, store: Store) -> None:
        """A run that was over and is granted again is not over."""
        maintenance, leases = need_maintenance(store), need_lease(store)
        await maintenance.save("run", snapshot(status="failed"))
        await acquire_run(leases)
        await self.pass_time(TICK)
        assert await maintenance.prune(NOW) == 0

    async def test_prune_deletes_up_to_limit_runs(self, store: Store) -> None:
        """Delete up to `limit` runs; 0 deletes nothing."""
        maintenance = need_maintenance(store)
        for number in range(5):
            await maintenance.save(f"{number}", snapshot(status="completed"))
        await self.pass_time(TICK)
        assert [await maintenance.prune(NOW, limit=limit) for limit in (0, 2, 2, 2)] == [0, 2, 2, 1]

    async def test_prune_may_be_restricted_to_a_workflow_and_tags(self, store: Store) -> None:
        """`workflow` and `tags` (all of them must match) restrict the deletion."""
        maintenance = need_everything(store)
        over = Rest("completed")
        for id, workflow, tags in (
            ("a", "x", ("p=1", "q=1")),
            ("b", "x", ("p=1",)),
            ("c", "y", ("p=1", "q=1")),
            ("d", "x", ()),
        ):
            await maintenance.enqueue([queued(id, workflow=workflow, tags=tags, rest=over)])
        await maintenance.enqueue([queued("e", workflow="x", tags=("p=1", "q=1"))])
        await self.pass_time(TICK)
        assert await maintenance.prune(NOW, workflow="z") == 0
        assert await maintenance.prune(NOW, workflow="x", tags=("p=1", "q=1")) == 1
        assert {run.id for run in await maintenance.list()} == {"b", "c", "d", "e"}
        assert await maintenance.prune(NOW, tags=("p=1",)) == 2
        assert await maintenance.prune(NOW, workflow="x", status="failed") == 0
        assert await maintenance.prune(NOW, workflow="x") == 1
        assert {run.id for run in await maintenance.list()} == {"e"}

    async def test_a_dry_run_of_prune_deletes_nothing(self, store: Store) -> None:
        """With `dry_run`, runs are counted and nothing is deleted."""
        maintenance = need_everything(store)
        await maintenance.enqueue([queued(f"{n}", rest=Rest("completed")) for n in range(3)])
        await self.pass_time(TICK)
        assert await maintenance.prune(NOW, dry_run=True) == 3
        assert await maintenance.prune(NOW, dry_run=True, limit=2) == 2
        assert await maintenance.prune(NOW, dry_run=True, workflow="other") == 0
        assert len(await maintenance.list()) == 3

    async def test_prune_leaves_system_runs_alone(self, store: Store) -> None:
        """A run whose id begins with `~` is never pruned."""
        maintenance = need_everything(store)
        runs = [queued(id, tags=("a=1",), rest=Rest("completed")) for id in ("~log", "run")]
        await maintenance.enqueue(runs)
        await self.pass_time(TICK)
        assert await maintenance.prune(NOW, tags=("a=1",)) == 1
        assert await maintenance.prune(NOW) == 0
        assert [run.id for run in await maintenance.list(prefix="~")] == ["~log"]

    async def test_prune_deletes_everything_that_belongs_to_a_run(self, store: Store) -> None:
        """Delete: the id can be used again, and its previous epochs stay stale."""
        maintenance, journal = need_maintenance(store), need_journal(store)
        old = await acquire_run(journal)
        await write_rest(journal, old, Rest("completed"), "a")
        await self.pass_time(TICK)
        assert await maintenance.prune(NOW) == 1
        new = await acquire_run(journal)
        assert new.created
        assert new.lease.epoch > old.lease.epoch


class StatsChecks(Harness):
    """`stats`."""

    async def test_stats_count_runs_by_status(self, store: Store) -> None:
        """Count the runs by status."""
        maintenance = need_maintenance(store)
        expected: dict[RunStatus, int] = {status: number for number, status in enumerate(STATUSES)}
        for status, number in expected.items():
            for turn in range(number):
                await maintenance.save(f"{status} {turn}", snapshot(status=status))
        counts = (await maintenance.stats()).by_status
        assert {status: counts.get(status, 0) for status in STATUSES} == expected
        assert set(counts) <= set(STATUSES)

    async def test_stats_of_an_empty_store(self, store: Store) -> None:
        """No runs, no counts, nothing due."""
        stats = await need_maintenance(store).stats()
        assert not any(stats.by_status.values())
        assert stats.oldest_due is None

    async def test_stats_include_the_oldest_wake_time(self, store: Store) -> None:
        """Find the oldest wake time among the due runs."""
        maintenance, schedule = need_maintenance(store), need_schedule(store)
        now = await store_time(schedule)
        await schedule.enqueue([new_run("later", wake_at=now + LONG)])
        await acquire_run(schedule, "owned")
        assert (await maintenance.stats()).oldest_due is None
        for id, age in (("a", 3), ("b", 7), ("c", 5)):
            await schedule.enqueue([new_run(id, wake_at=now - age * SECOND)])
        assert (await maintenance.stats()).oldest_due == now - 7 * SECOND

    async def test_stats_count_the_runs_of_queues(self, store: Store) -> None:
        """The queues that have due or owned runs, by name, all keys of a queue together."""
        maintenance = need_everything(store)
        now = await store_time(maintenance)
        past, future = now - 7 * SECOND, now + LONG
        await maintenance.enqueue(
            [
                queued("1", "a", wake_at=past),
                queued("2", "a/x", wake_at=past + SECOND),
                queued("3", "a/y"),
                queued("4", "later", wake_at=future),
                queued("5"),
                queued("6", "b"),
                queued("7", "~permit:b"),
                queued("~8", "b"),
            ]
        )
        await maintenance.claim("ana", LONG, 1, queues={"b": 1})
        await maintenance.claim("ana", LONG, 1, queues={"a/y": 1})
        stats = await maintenance.stats()
        assert set(stats.by_queue) == {"", "a", "b"}
        a, b, plain = stats.by_queue["a"], stats.by_queue["b"], stats.by_queue[""]
        assert (a.due, a.leased, a.oldest_due) == (2, 1, past)
        assert (b.due, b.leased, b.oldest_due) == (0, 1, None)
        assert (plain.due, plain.leased) == (1, 0)
        assert sum(stats.by_status.values()) == 7


class MaintenanceChecks(PruneChecks, StatsChecks):
    """The abilities of a store with maintenance."""
