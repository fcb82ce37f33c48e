"""Checks of queues, versions and the order in which runs become due."""

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from perdure.store import Entry, NewRun, Rest, Store, SupportedVersions, Verdict
from perdure.testing.conformance.harness import (
    LONG,
    TICK,
    Harness,
    QueueingStore,
    acquire_run,
    append_entries,
    need_queues,
    need_schedule,
    send_one,
    step,
    store_time,
    summary_of,
    supports,
    write_rest,
)
from perdure.testing.conformance.hostile import NAMES
from perdure.testing.conformance.samples import as_json, snapshot

SECOND = timedelta(seconds=1)
DAY = timedelta(days=1)


def queued(id: str, queue: str = "", workflow: str = "order", **fields: Any) -> NewRun:
    """Return a run to be created in a queue."""
    return NewRun(id, workflow, as_json(snapshot()), queue=queue, **fields)


async def claim_from(
    store: QueueingStore,
    queues: Mapping[str, int] | None,
    limit: int = 100,
    supported: Sequence[SupportedVersions] | None = None,
) -> list[str]:
    """Return the ids of the runs that a claim from these queues returns, in order."""
    grants = await store.claim("ana", LONG, limit, supports=supported, queues=queues)
    return [grant.lease.id for grant in grants]


class QueueChecks(Harness):
    """Claims from queues."""

    async def test_a_claim_without_queues_takes_only_runs_in_no_queue(self, store: Store) -> None:
        """Without `queues`, only runs in no queue are claimed."""
        queues = need_queues(store)
        await queues.enqueue([queued("a", "emails"), queued("b"), queued("c", "Emails")])
        assert await claim_from(queues, None) == ["b"]
        assert await claim_from(queues, {"emails": 5, "Emails": 5}) == ["a", "c"]

    async def test_a_claim_respects_the_limit_of_each_queue(self, store: Store) -> None:
        """`queues` maps each queue to the maximum number of runs to claim from it."""
        queues = need_queues(store)
        runs = [queued(f"{queue}{n}", queue) for n in range(4) for queue in ("", "a", "b")]
        await queues.enqueue(runs)
        claimed = await claim_from(queues, {"": 1, "a": 3, "b": 0, "c": 2})
        assert sorted(claimed) == ["0", "a0", "a1", "a2"]
        assert sorted(await claim_from(queues, {"b": 2})) == ["b0", "b1"]

    async def test_a_claim_from_several_queues_takes_the_earliest(self, store: Store) -> None:
        """Up to `limit` runs, earliest first, over all queues together."""
        queues = need_queues(store)
        now = await store_time(queues)
        for id, queue, age in (("a", "x", 5), ("b", "y", 9), ("c", "x", 7), ("d", "y", 6)):
            await queues.enqueue([queued(id, queue, wake_at=now - age * SECOND)])
        assert await claim_from(queues, {"x": 10, "y": 10}, limit=3) == ["b", "c", "d"]
        assert await claim_from(queues, {"x": 10, "y": 10}, limit=0) == []

    async def test_every_lease_of_a_claim_from_several_queues_is_valid(self, store: Store) -> None:
        """Each run goes to its claimant: entries of each granted epoch are accepted."""
        queues = need_queues(store)
        new = [queued(f"{queue}{n}", queue, f"w{n}") for n in range(3) for queue in ("", "a", "b")]
        await queues.enqueue(new)
        everything = {"": 9, "a": 9, "b": 9}
        grants = await queues.claim(
            "ana", LONG, 9, supports=supports("w0", "w1"), queues=everything
        )
        entries = [step(grant, 1, "a") for grant in grants]
        assert await append_entries(queues, *entries) == [Verdict.ACCEPTED] * 6
        renewed = await queues.renew([grant.lease for grant in grants], LONG)
        assert None not in renewed

    async def test_due_is_restricted_to_queues(self, store: Store) -> None:
        """`supports` and `queues` restrict the result of `due` as in `claim`."""
        queues = need_queues(store)
        await queues.enqueue([queued("a", "x"), queued("b"), queued("c", "x"), queued("d", "y")])
        now = await store_time(queues) + SECOND
        assert [run.id for run in await queues.due(now, 10)] == ["b"]
        assert [run.id for run in await queues.due(now, 10, queues={"x": 1, "y": 9})] == ["a", "d"]
        due_runs = await queues.due(now, 10, queues={"x": 9}, supports=supports("other"))
        assert list(due_runs) == []

    async def test_a_grant_names_the_queue_and_the_version(self, store: Store) -> None:
        """A grant has everything that its owner needs to continue."""
        queues = need_queues(store)
        await queues.enqueue([queued("run", "emails/ana", version=3)])
        (grant,) = await queues.claim("ana", LONG, 1, queues={"emails/ana": 1})
        assert (grant.queue, grant.version) == ("emails/ana", 3)
        assert (await acquire_run(queues)).queue == "emails/ana"

    async def test_a_run_stays_in_its_queue(self, store: Store) -> None:
        """The queue is written at creation: a rest, a release and an expiry do not change it."""
        queues = need_queues(store)
        now = await store_time(queues)
        await queues.enqueue([queued("run", "emails")])
        (grant,) = await queues.claim("ana", LONG, 1, queues={"emails": 1})
        await write_rest(queues, grant, Rest("suspended", now - SECOND))
        assert await claim_from(queues, None) == []
        (grant,) = await queues.claim("ana", LONG, 1, queues={"emails": 1})
        await queues.release([grant.lease])
        assert await claim_from(queues, None) == []
        assert len(await queues.claim("ana", self.short, 1, queues={"emails": 1})) == 1
        await self.expire()
        assert await claim_from(queues, None) == []
        assert await claim_from(queues, {"emails": 1}) == ["run"]

    async def test_an_unreadable_run_leaves_its_place_in_the_queue_to_another(
        self, store: Store
    ) -> None:
        """Another run takes its place, and no queue exceeds its limit."""
        queues = need_queues(store)
        await queues.enqueue([queued("bad", "x")])
        (grant,) = await queues.claim("ana", self.short, 1, queues={"x": 1})
        await append_entries(queues, Entry("bad", grant.lease.epoch, 1, b"[]"))
        await self.expire()
        await queues.enqueue([queued(f"{n}", "x") for n in range(3)])
        assert await claim_from(queues, {"x": 2}) == ["0", "1"]

    async def test_queues_may_have_any_name(self, store: Store) -> None:
        """A queue is a string like any other: no two names are the same queue."""
        queues = need_queues(store)
        await queues.enqueue([queued(f"{n}", name) for n, name in enumerate(NAMES)])
        now = await store_time(queues) + SECOND
        assert list(await queues.queues(now, 1_000)) == sorted(NAMES)
        for number, name in enumerate(NAMES):
            assert await claim_from(queues, {name: 10}) == [f"{number}"], ascii(name)


class QueueListChecks(Harness):
    """`queues`."""

    async def test_queues_are_listed_by_name(self, store: Store) -> None:
        """Return up to `limit` queues that have runs due, by name, after the name `after`."""
        queues = need_queues(store)
        names = ["b", "a", "a/2", "a/10", "B", "é"]
        await queues.enqueue([queued(f"{name}{n}", name) for name in names for n in range(3)])
        await queues.enqueue([queued("plain")])
        now = await store_time(queues) + SECOND
        assert list(await queues.queues(now, 10)) == ["B", "a", "a/10", "a/2", "b", "é"]
        assert list(await queues.queues(now, 2)) == ["B", "a"]
        assert list(await queues.queues(now, 2, after="a")) == ["a/10", "a/2"]
        assert list(await queues.queues(now, 10, prefix="a/")) == ["a/10", "a/2"]
        assert list(await queues.queues(now, 10, prefix="a/", after="a/10")) == ["a/2"]
        assert list(await queues.queues(now, 10, prefix="c")) == []
        assert list(await queues.queues(now, 0)) == []

    async def test_only_queues_with_due_runs_are_listed(self, store: Store) -> None:
        """Only runs due at `now` count: orphaned runs, but not later or owned ones."""
        queues = need_queues(store)
        now = await store_time(queues)
        await queues.enqueue([queued("later", "later", wake_at=now + LONG)])
        await queues.enqueue([queued("owned", "owned"), queued("orphaned", "orphaned")])
        assert await claim_from(queues, {"owned": 1}) == ["owned"]
        await queues.claim("bob", self.short, 1, queues={"orphaned": 1})
        assert list(await queues.queues(now + SECOND / 1000, 10)) == []
        await self.expire()
        now = await store_time(queues)
        assert list(await queues.queues(now, 10)) == ["orphaned"]
        assert {"later", "orphaned"} <= {*await queues.queues(now + 2 * LONG, 10)}

    async def test_system_queues_are_listed_by_their_prefix_alone(self, store: Store) -> None:
        """Queues that begin with `~` are left out, unless `prefix` begins with it."""
        queues = need_queues(store)
        names = ["a", "~permit:a", "~permit:b", "~", "é", "z~"]
        await queues.enqueue([queued(f"~{n}", name) for n, name in enumerate(names)])
        now = await store_time(queues) + SECOND
        assert list(await queues.queues(now, 10)) == ["a", "z~", "é"]
        assert list(await queues.queues(now, 10, after="b")) == ["z~", "é"]
        assert list(await queues.queues(now, 10, after="~permit:a")) == ["é"]
        assert list(await queues.queues(now, 10, prefix="~permit:")) == ["~permit:a", "~permit:b"]
        assert list(await queues.queues(now, 1, prefix="~", after="~")) == ["~permit:a"]


class VersionChecks(Harness):
    """Claims by workflow and version."""

    async def test_a_claim_skips_versions_that_are_not_supported(self, store: Store) -> None:
        """Runs of these workflows whose version is 0 or in the range, both ends included."""
        schedule = need_schedule(store)
        await schedule.enqueue([queued(f"{n}", version=n) for n in range(6)])
        grants = await schedule.claim("ana", LONG, 10, supports=[SupportedVersions("order", 2, 4)])
        assert [grant.lease.id for grant in grants] == ["0", "2", "3", "4"]
        both = [
            SupportedVersions("order", 1, 1),
            SupportedVersions("order", 5, 9),
            SupportedVersions("other", 1, 9),
        ]
        grants = await schedule.claim("ana", LONG, 10, supports=both)
        assert [grant.lease.id for grant in grants] == ["1", "5"]

    async def test_a_version_belongs_to_its_workflow(self, store: Store) -> None:
        """A range applies to one workflow, and so does version 0."""
        schedule = need_schedule(store)
        await schedule.enqueue([queued("a", "", "x", version=1), queued("b", "", "y", version=2)])
        await schedule.enqueue([queued("c", "", "x"), queued("d", "", "z")])
        crossed = [SupportedVersions("x", 2, 2), SupportedVersions("y", 1, 1)]
        assert [run.lease.id for run in await schedule.claim("ana", LONG, 9, supports=crossed)] == [
            "c"
        ]

    async def test_skipped_runs_hide_no_other(self, store: Store) -> None:
        """Other versions are skipped: later runs are claimed up to the limit."""
        schedule = need_schedule(store)
        await schedule.enqueue([queued(f"new {n}", version=2) for n in range(30)])
        await schedule.enqueue([queued(f"other {n}", "", "other") for n in range(30)])
        await schedule.enqueue([queued(f"old {n}", version=1) for n in range(3)])
        grants = await schedule.claim("ana", LONG, 2, supports=[SupportedVersions("order", 1, 1)])
        assert [grant.lease.id for grant in grants] == ["old 0", "old 1"]

    async def test_a_rest_determines_the_version(self, store: Store) -> None:
        """`Rest.version` replaces the stored one: the next claim goes by it."""
        schedule = need_schedule(store)
        now = await store_time(schedule)
        await schedule.enqueue([queued("run")])
        (grant,) = await schedule.claim("ana", LONG, 1)
        await write_rest(schedule, grant, Rest("suspended", now - SECOND, version=2))
        assert (
            list(await schedule.claim("bob", LONG, 1, supports=[SupportedVersions("order", 1, 1)]))
            == []
        )
        (grant,) = await schedule.claim("bob", LONG, 1, supports=[SupportedVersions("order", 2, 2)])
        assert grant.version == 2


class OrderChecks(Harness):
    """The order in which enqueued runs become due."""

    async def test_runs_of_one_call_become_due_in_its_order(self, store: Store) -> None:
        """Runs of one call with the same wake time become due in the order of the call."""
        schedule = need_schedule(store)
        now = await store_time(schedule)
        ids = [f"{n:02}" for n in range(40, 0, -1)]
        await schedule.enqueue([queued(id) for id in ids])
        assert [grant.lease.id for grant in await schedule.claim("ana", LONG, 100)] == ids
        past = now - SECOND
        await schedule.enqueue([queued(f"p{id}", wake_at=past) for id in ids])
        grants = await schedule.claim("ana", LONG, 100)
        assert [grant.lease.id for grant in grants] == [f"p{id}" for id in ids]

    async def test_a_head_start_orders_a_run_as_if_it_had_been_enqueued_earlier(
        self, store: Store
    ) -> None:
        """A `head_start` orders it as if it had been enqueued that much earlier."""
        schedule = need_schedule(store)
        await schedule.enqueue([queued("plain 1"), queued("plain 2")])
        await self.pass_time(TICK)
        await schedule.enqueue([queued("late"), queued("urgent", head_start=DAY), queued("last")])
        await schedule.enqueue([queued("most urgent", head_start=2 * DAY)])
        grants = await schedule.claim("ana", LONG, 100)
        assert [grant.lease.id for grant in grants] == [
            "most urgent",
            "urgent",
            "plain 1",
            "plain 2",
            "late",
            "last",
        ]

    async def test_a_run_with_a_wake_time_never_starts_early(self, store: Store) -> None:
        """A head start only changes the order of runs that are due at once."""
        schedule = need_schedule(store)
        wake_at = await store_time(schedule) + LONG
        await schedule.enqueue([queued("run", wake_at=wake_at, head_start=DAY)])
        assert list(await schedule.claim("ana", LONG, 1)) == []

    async def test_an_enqueued_run_is_queued_until_it_is_claimed(self, store: Store) -> None:
        """Create runs that wait for a claim, with the status queued."""
        schedule = need_schedule(store)
        wake_at = await store_time(schedule) + LONG
        await schedule.enqueue([queued("run"), queued("later", wake_at=wake_at)])
        assert (await summary_of(schedule)).status == "queued"
        assert (await summary_of(schedule, "later")).status == "queued"
        (grant,) = await schedule.claim("ana", LONG, 1)
        assert (await summary_of(schedule)).status == "running"
        await schedule.release([grant.lease])
        assert (await summary_of(schedule)).status == "running"

    async def test_a_run_may_be_created_at_rest(self, store: Store) -> None:
        """A run with a `rest` is created in that state."""
        schedule = need_queues(store)
        wake_at = await store_time(schedule) + LONG
        rests = {
            "paused": Rest("paused", None, ("resume",)),
            "waiting": Rest("waiting", None, ("paid",)),
            "suspended": Rest("suspended", wake_at),
        }
        await schedule.enqueue([queued(id, rest=rest) for id, rest in rests.items()])
        for id, rest in rests.items():
            assert (await summary_of(schedule, id)).status == rest.status
        assert await claim_from(schedule, None) == []
        assert [run.id for run in await schedule.due(wake_at + SECOND, 10)] == ["suspended"]
        await send_one(schedule, "paused", "paid", b"1")
        await send_one(schedule, "waiting", "paid", b"1")
        assert await claim_from(schedule, None) == ["waiting"]


class QueuesChecks(QueueChecks, QueueListChecks, VersionChecks, OrderChecks):
    """The abilities of a store with queues."""
