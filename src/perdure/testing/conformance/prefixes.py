"""Checks of stores that share their runs under different prefixes."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from perdure.errors import InvalidArgument
from perdure.store import Count, Delivery, Entry, Lease, Query, Rest, Store, Verdict
from perdure.testing.conformance.harness import (
    LONG,
    TICK,
    Harness,
    acquire_run,
    append_entries,
    need_inbox,
    need_journal,
    need_lease,
    need_maintenance,
    need_schedule,
    need_search,
    request_run,
    send_one,
    step,
    steps_of,
    store_time,
    write_rest,
)
from perdure.testing.conformance.hostile import INVALID_IDS
from perdure.testing.conformance.queues import SECOND, queued
from perdure.testing.conformance.samples import delta, snapshot
from perdure.testing.conformance.schedule import claimed_ids, due_ids, new_run


class PrefixChecks(Harness):
    """A store's prefix is part of each id in the database, but of no id that the caller sees."""

    async def test_runs_of_another_prefix_are_invisible(self, store: Store) -> None:
        """Stored id = prefix + id: the same id under two prefixes is two runs."""
        async with self._two(store) as (one, two):
            await one.save("run", snapshot("one"))
            assert await two.load("run") is None
            await two.save("run", snapshot("two"))
            await two.delete("run")
            assert await steps_of(one) == ["one"]

    async def test_list_is_restricted_to_the_prefix(self, store: Store) -> None:
        """Listed ids have the prefix removed, and runs of other prefixes are not listed."""
        async with self._two(store) as (one, two):
            for id in ("a", "b", "p_:a", "P_:a"):
                await one.save(id, snapshot())
                await two.save(id, snapshot())
            assert sorted(run.id for run in await one.list()) == ["P_:a", "a", "b", "p_:a"]
            assert [run.id for run in await one.list(prefix="a")] == ["a"]
            (first, *_) = await one.list(limit=1)
            assert len(await one.list(after=first.cursor)) == 3

    async def test_queues_and_tags_belong_to_the_prefix(self, store: Store) -> None:
        """Searches, counts, queues and claims find only runs of this prefix."""
        need_search(store)
        async with self._two(store) as (one, two):
            first, second = need_search(one), need_search(two)
            await first.enqueue([queued("1", "emails", tags=("a=1",))])
            now = await store_time(first) + SECOND
            assert (await second.search(Query(tags=("a=1",)), 5)).runs == ()
            assert (await second.search(Query(workflows=("order",)), 5)).runs == ()
            assert list(await second.counts(Query(), 5)) == []
            assert list(await second.summaries(["1"])) == [None]
            assert list(await second.queues(now, 5)) == []
            assert list(await second.claim("ana", LONG, 5, queues={"emails": 5})) == []
            (summary,) = (await first.search(Query(tags=("a=1",)), 5)).runs
            assert summary.id == "1"
            assert list(await first.counts(Query(), 5)) == [Count("order", "queued", 1)]
            assert list(await first.queues(now, 5)) == ["emails"]
            assert len(await first.claim("ana", LONG, 5, queues={"emails": 5})) == 1

    async def test_system_runs_are_those_below_the_prefix(self, store: Store) -> None:
        """`~` refers to the id that the caller sees, not to the stored one."""
        need_search(store)
        async with self._two(store, "~p:") as (one, _):
            search = need_search(one)
            await search.enqueue([queued("run"), queued("~log")])
            assert [run.id for run in await search.list()] == ["run"]
            assert [run.id for run in await search.list(prefix="~")] == ["~log"]
            assert list(await search.counts(Query(), 5)) == [Count("order", "queued", 1)]

    async def test_a_store_without_a_prefix_sees_full_ids(self, store: Store) -> None:
        """Stored id = prefix + id."""
        unprefixed = await self.open_another(store)
        async with self._two(store) as (one, _):
            await one.save("run", snapshot("one"))
            assert await steps_of(unprefixed, "p_:run") == ["one"]
        await unprefixed.close()

    async def test_each_prefix_has_its_own_leases(self, store: Store) -> None:
        """Prefixes apply to leases: one tenant never blocks another."""
        async with self._two(store) as (first, second):
            one, two = need_lease(first), need_lease(second)
            mine, theirs = await acquire_run(one, owner="ana"), await acquire_run(two, owner="bob")
            assert mine.lease.id == theirs.lease.id == "run"
            forged = Lease("run", "bob", theirs.lease.epoch, theirs.lease.expires_at)
            await one.release([forged])
            assert list(await one.renew([forged], LONG)) == [None]
            assert await request_run(two, owner="cem") is None

    async def test_each_prefix_has_its_own_journals(self, store: Store) -> None:
        """Prefixes apply to the journal."""
        async with self._two(store) as (first, second):
            one, two = need_journal(first), need_journal(second)
            mine, theirs = await acquire_run(one), await acquire_run(two)
            await append_entries(one, step(mine, 1, "one"))
            await append_entries(two, step(theirs, 1, "two"))
            await write_rest(one, mine, Rest("completed"), "one", "more")
            assert await steps_of(two) == ["two"]
            await one.delete("run")
            assert await append_entries(two, step(theirs, 2, "three")) == [Verdict.ACCEPTED]
            assert await append_entries(one, Entry("run", theirs.lease.epoch, 3, delta("x"))) == [
                Verdict.UNKNOWN
            ]

    async def test_claims_are_restricted_to_the_prefix(self, store: Store) -> None:
        """Prefixes apply to due runs."""
        async with self._two(store) as (first, second):
            one, two = need_schedule(first), need_schedule(second)
            now = await store_time(one)
            await two.enqueue([new_run(f"other {number}") for number in range(5)])
            await one.enqueue([new_run("run", wake_at=now)])
            assert await due_ids(one, now, limit=1) == ["run"]
            assert await claimed_ids(one, limit=3) == ["run"]
            assert len(await claimed_ids(two)) == 5

    async def test_each_prefix_has_its_own_inboxes(self, store: Store) -> None:
        """Prefixes apply to the inbox."""
        async with self._two(store) as (first, second):
            one, two = need_inbox(first), need_inbox(second)
            await acquire_run(one)
            assert await send_one(two, "run", "paid", b"1") is Delivery.UNKNOWN
            await acquire_run(two)
            assert await send_one(one, "run", "paid", b"1", dedup_id="x") is Delivery.DELIVERED
            assert await send_one(two, "run", "paid", b"2", dedup_id="x") is Delivery.DELIVERED
            assert [message.payload for message in await two.inbox("run")] == [b"2"]

    async def test_maintenance_is_restricted_to_the_prefix(self, store: Store) -> None:
        """Prefixes apply to pruning and counting."""
        async with self._two(store) as (first, second):
            one, two = need_maintenance(first), need_maintenance(second)
            await one.save("run", snapshot(status="completed"))
            await two.save("run", snapshot(status="completed"))
            await two.save("other", snapshot(status="failed"))
            await self.pass_time(TICK)
            stats = await one.stats()
            assert {name: n for name, n in stats.by_status.items() if n} == {"completed": 1}
            assert await one.prune(TICK * 0) == 1
            assert len(await two.list()) == 2

    async def test_an_invalid_prefix_is_refused(self, store: Store) -> None:
        """A prefix is a string of up to 512 characters without NUL; it may be empty."""
        await (await self.open_another(store)).close()
        for prefix in INVALID_IDS[1:]:
            try:
                another = await self.reopen(store, prefix=prefix)
            except InvalidArgument:
                continue
            assert another is None, f"{prefix!r} was accepted as a prefix"

    @asynccontextmanager
    async def _two(
        self, store: Store, prefix: str = "p_:"
    ) -> AsyncGenerator[tuple[Store, Store], None]:
        """Return two stores whose prefixes differ only in case, and are equal as patterns."""
        one = await self.open_another(store, prefix)
        two = await self.open_another(store, prefix.upper())
        try:
            yield one, two
        finally:
            await one.close()
            await two.close()
