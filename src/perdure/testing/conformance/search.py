"""Checks of searches: they find the same runs as a scan, take no lease and write nothing."""

from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from random import Random

import pytest

from perdure.errors import InvalidArgument
from perdure.snapshot import RunStatus
from perdure.store import Count, Query, Rest, RunSummary, Store
from perdure.testing.conformance.harness import (
    LONG,
    TICK,
    Harness,
    SearchableStore,
    acquire_run,
    append_entries,
    need_search,
    send_one,
    step,
    write_rest,
)
from perdure.testing.conformance.hostile import NAMES
from perdure.testing.conformance.queues import queued

RUNS = 60
WORKFLOWS = ("order", "Order", "mail", "~system")
STATUSES: tuple[RunStatus, ...] = ("queued", "suspended", "completed", "failed", "paused")
QUEUES = ("", "emails", "emails/1")
TAGS = ("a=1", "a=2", "b=1")

QUERIES = (
    Query(),
    Query(oldest_first=True),
    Query(statuses=("completed",)),
    Query(statuses=("completed", "queued"), oldest_first=True),
    Query(workflows=("order",)),
    Query(workflows=("mail", "Order"), oldest_first=True),
    Query(workflows=("missing",)),
    Query(workflows=("order", "mail"), statuses=("failed", "paused")),
    Query(queue="emails"),
    Query(queue="", statuses=("queued",)),
    Query(tags=("a=1",)),
    Query(tags=("a=1", "b=1"), oldest_first=True),
    Query(tags=("a=1",), statuses=("completed",), workflows=("order",)),
    Query(tags=("a=",)),
    Query(prefix="1"),
    Query(prefix="~"),
    Query(prefix="~1", workflows=("order",)),
    Query(prefix="2", tags=("b=1",)),
)


async def find_ids(store: SearchableStore, query: Query, limit: int = 1_000) -> list[str]:
    """Return the ids of all runs that a query finds, read page by page."""
    ids: list[str] = []
    cursor: str | None = None
    while True:
        page = await store.search(query, limit, after=cursor)
        assert len(page.runs) <= limit
        ids += (run.id for run in page.runs)
        if (cursor := page.cursor) is None:
            return ids


def time_of(query: Query) -> Callable[[RunSummary], tuple[datetime | None, str]]:
    """Return the sort key of the runs that a query finds."""
    return lambda run: (run.created_at if query.tags else run.updated_at, run.id)


def scan(runs: Iterable[RunSummary], query: Query) -> list[str]:
    """Return the ids that a query should find among these runs, in order."""
    matching = [
        run
        for run in runs
        if run.id.startswith(query.prefix)
        and run.id.startswith("~") <= query.prefix.startswith("~")
        and (not query.statuses or run.status in query.statuses)
        and (not query.workflows or run.workflow in query.workflows)
        and query.queue in (None, run.queue)
        and set(query.tags) <= set(run.tags)
        and (query.since is None or run.updated_at >= query.since)
        and (query.until is None or run.updated_at < query.until)
    ]
    matching.sort(key=time_of(query), reverse=not query.oldest_first)
    return [run.id for run in matching]


class SearchChecks(Harness):
    """`search`."""

    async def test_a_search_finds_what_a_scan_finds(self, store: Store) -> None:
        """Return the runs that match, most recently updated first; by creation with a tag."""
        search = need_search(store)
        runs = await self._fill(search)
        times = sorted(run.updated_at for run in runs)
        timed = (
            Query(since=times[20]),
            Query(since=times[10], until=times[40], oldest_first=True),
            Query(until=times[30], statuses=("suspended",)),
            Query(since=times[20], tags=("a=2",)),
        )
        for query in (*QUERIES, *timed):
            for limit in (7, 1_000):
                assert await find_ids(search, query, limit) == scan(runs, query), query

    async def _fill(self, store: SearchableStore) -> Sequence[RunSummary]:
        """Create random runs and return their summaries."""
        random = Random(7)
        ids = [f"{'~' * (number % 7 == 0)}{number}" for number in range(RUNS)]
        for id in ids:
            status = random.choice(STATUSES)
            tags = tuple(sorted(random.sample(TAGS, random.randrange(3))))
            workflow, queue = random.choice(WORKFLOWS), random.choice(QUEUES)
            rest = None if status == "queued" else Rest(status)
            await store.enqueue([queued(id, queue, workflow, tags=tags, rest=rest)])
            await self.pass_time(TICK)
        for id in random.sample(ids, 15):
            rest = Rest(random.choice(STATUSES), tags=("a=1",))
            await write_rest(store, await acquire_run(store, id), rest)
            await self.pass_time(TICK)
        runs = await store.summaries(ids)
        return [run for run in runs if run is not None]

    async def test_a_search_continues_where_the_page_ended(self, store: Store) -> None:
        """`after` is the cursor of the previous page or of its last run."""
        search = need_search(store)
        for number in range(5):
            await search.enqueue([queued(f"{number}")])
            await self.pass_time(TICK)
        page = await search.search(Query(), 2)
        assert [run.id for run in page.runs] == ["4", "3"]
        assert page.cursor == page.runs[-1].cursor
        following = await search.search(Query(), 2, after=page.cursor)
        assert [run.id for run in following.runs] == ["2", "1"]
        second = await search.search(Query(), 9, after=page.runs[0].cursor)
        assert ([run.id for run in second.runs], second.cursor) == (["3", "2", "1", "0"], None)

    async def test_a_page_of_no_runs_leads_to_the_same_place(self, store: Store) -> None:
        """Up to `limit` runs, and `after` stays valid."""
        search = need_search(store)
        await search.enqueue([queued("1"), queued("2")])
        page = await search.search(Query(), 1)
        nothing = await search.search(Query(), 0, after=page.cursor)
        assert (nothing.runs, nothing.cursor) == ((), page.cursor)

    async def test_a_found_run_is_described(self, store: Store) -> None:
        """A run in the result of a search, without its snapshot."""
        search = need_search(store)
        new = queued("run", "emails", version=4, tags=("a=1",), summary=b"s")
        await search.enqueue([new])
        (run,) = (await search.search(Query(), 5)).runs
        assert (run.id, run.workflow, run.queue, run.version) == ("run", "order", "emails", 4)
        assert (run.tags, run.summary, run.owner, run.status) == (("a=1",), b"s", None, "queued")
        assert run.wake_at is not None
        assert run.created_at is not None
        grant = await acquire_run(search, owner="ana")
        (run,) = (await search.search(Query(statuses=("running",)), 5)).runs
        assert (run.owner, run.wake_at, run.takeovers) == ("ana", grant.lease.expires_at, 0)
        await write_rest(search, grant, Rest("waiting", None, ("b", "a")))
        (run,) = (await search.search(Query(), 5)).runs
        assert (run.status, run.owner, run.wake_at) == ("waiting", None, None)
        assert sorted(run.awaits) == ["a", "b"]

    async def test_lists_and_searches_leave_out_system_runs(self, store: Store) -> None:
        """Ids that begin with `~` are found only with a prefix that begins with `~`."""
        search = need_search(store)
        await search.enqueue([queued("run"), queued("~log"), queued("~", tags=("a=1",))])
        assert [run.id for run in await search.list()] == ["run"]
        assert await find_ids(search, Query()) == ["run"]
        assert await find_ids(search, Query(tags=("a=1",))) == []
        assert sorted(run.id for run in await search.list(prefix="~")) == ["~", "~log"]
        assert await find_ids(search, Query(prefix="~l")) == ["~log"]
        assert await search.counts(Query(), 10) == [Count("order", "queued", 1)]

    async def test_a_search_takes_no_lease_and_writes_nothing(self, store: Store) -> None:
        """Searches take no lease, write nothing, and read no snapshot."""
        search = need_search(store)
        await search.enqueue([queued("run", tags=("a=1",))])
        before = await search.summaries(["run"])
        await find_ids(search, Query())
        await find_ids(search, Query(tags=("a=1",), workflows=("order",)))
        await search.counts(Query(), 5)
        assert await search.summaries(["run"]) == before
        assert (await acquire_run(search, owner="bob")).takeovers == 0

    async def test_a_bad_query_is_refused(self, store: Store) -> None:
        """A bad query raises an error instead of returning an empty page."""
        search = need_search(store)
        naive = datetime(2030, 1, 1)  # noqa: DTZ001  # that is the point
        bad = [
            Query(statuses=("done",)),  # type: ignore[arg-type]
            Query(workflows=("",)),
            Query(since=naive),
            Query(prefix="\0"),
        ]
        for query in bad:
            with pytest.raises(InvalidArgument):
                await search.search(query, 1)
        with pytest.raises(InvalidArgument):
            await search.search(Query(), 1, after="nonsense")
        with pytest.raises(InvalidArgument):
            await search.counts(Query(), 0)


class TagChecks(Harness):
    """Tags."""

    async def test_tags_follow_the_last_rest(self, store: Store) -> None:
        """The `tags` of a rest replace the stored ones in searches too."""
        search = need_search(store)
        await search.enqueue([queued("run", tags=("a=1", "b=1"))])
        await write_rest(search, await acquire_run(search), Rest("completed", tags=("a=1", "c=1")))
        assert await find_ids(search, Query(tags=("a=1",))) == ["run"]
        assert await find_ids(search, Query(tags=("c=1",))) == ["run"]
        assert await find_ids(search, Query(tags=("b=1",))) == []

    async def test_a_deleted_run_is_not_found_by_its_tags(self, store: Store) -> None:
        """A reused id never has the tags of the old run: after `delete`, a rest or `save`."""
        search = need_search(store)
        tagged = queued("run", tags=("a=1",))
        await search.enqueue([tagged])
        await search.delete("run")
        assert await find_ids(search, Query(tags=("a=1",))) == []
        await search.enqueue([queued("run")])
        assert await find_ids(search, Query(tags=("a=1",))) == []
        await write_rest(search, await acquire_run(search), Rest("completed", delete=True))
        await search.enqueue([tagged])
        await write_rest(search, await acquire_run(search), Rest("completed", delete=True))
        await search.enqueue([queued("run")])
        assert await find_ids(search, Query(tags=("a=1",))) == []

    async def test_tags_may_have_any_characters(self, store: Store) -> None:
        """A tag is a string like any other: no two are the same."""
        search = need_search(store)
        tags = [f"n={name}" for name in NAMES if len(name) < 250]
        await search.enqueue([queued(f"{number}", tags=(tag,)) for number, tag in enumerate(tags)])
        for number, tag in enumerate(tags):
            assert await find_ids(search, Query(tags=(tag,))) == [f"{number}"], ascii(tag)


class SummaryChecks(Harness):
    """`summaries` and `counts`."""

    async def test_summaries_are_in_the_order_of_the_ids(self, store: Store) -> None:
        """Return the summary of each run; `None` for a missing run."""
        search = need_search(store)
        await search.enqueue([queued("a"), queued("~b"), queued("c")])
        runs = await search.summaries(["c", "missing", "a", "~b", "a"])
        assert [run and run.id for run in runs] == ["c", None, "a", "~b", "a"]
        assert list(await search.summaries([])) == []

    async def test_a_revision_differs_after_every_write(self, store: Store) -> None:
        """A revision changes with every grant, release, entry, rest and message."""
        search = need_search(store)
        revisions: list[str] = []

        async def note() -> None:
            (run,) = await search.summaries(["run"])
            assert run is not None
            (current,) = await search.summaries(["run"])
            assert current == run
            revisions.append(run.revision)

        await search.enqueue([queued("run")])
        await note()
        (grant,) = await search.claim("ana", LONG, 1)
        await note()
        await append_entries(search, step(grant, 1, "a"))
        await note()
        await append_entries(search, step(grant, 2, "b"))
        await note()
        await send_one(search, "run", "paid", b"1")
        await note()
        await search.release([grant.lease])
        await note()
        grant = await acquire_run(search)
        await note()
        await write_rest(search, grant, Rest("waiting", None, ("other",)), n=1)
        await note()
        await send_one(search, "run", "paid", b"1")
        await note()
        await search.delete("run")
        await search.enqueue([queued("run")])
        await note()
        assert len(set(revisions)) == len(revisions), revisions

    async def test_counts_are_by_workflow_and_status(self, store: Store) -> None:
        """Count the matching runs by workflow and status; groups without runs are left out."""
        search = need_search(store)
        await search.enqueue([queued(f"a{n}", workflow="a") for n in range(3)])
        await search.enqueue([queued(f"b{n}", workflow="b", rest=Rest("failed")) for n in range(2)])
        await search.enqueue([queued("b", workflow="b")])
        await acquire_run(search, "none")
        everything = {
            ("a", "queued"): 3,
            ("b", "failed"): 2,
            ("b", "queued"): 1,
            (None, "running"): 1,
        }
        assert await self._counts(search, Query()) == everything
        assert await self._counts(search, Query(statuses=("failed", "running"))) == {
            ("b", "failed"): 2,
            (None, "running"): 1,
        }
        assert await self._counts(search, Query(workflows=("b", "c"))) == {
            ("b", "failed"): 2,
            ("b", "queued"): 1,
        }
        assert await self._counts(search, Query(prefix="b")) == {
            ("b", "failed"): 2,
            ("b", "queued"): 1,
        }

    async def _counts(
        self, store: SearchableStore, query: Query
    ) -> dict[tuple[str | None, str], int]:
        counts = await store.counts(query, 100)
        assert not any(count.capped for count in counts)
        by_group = {(count.workflow, str(count.status)): count.count for count in counts}
        assert len(by_group) == len(counts)
        return by_group

    async def test_counts_stop_at_the_cap(self, store: Store) -> None:
        """Up to `cap` in each group."""
        search = need_search(store)
        await search.enqueue([queued(f"a{n}", workflow="a") for n in range(5)])
        await search.enqueue([queued(f"b{n}", workflow="b") for n in range(3)])
        counts = await search.counts(Query(), 3)
        assert sorted((c.workflow or "", c.count, c.capped) for c in counts) == [
            ("a", 3, True),
            ("b", 3, False),
        ]


class SearchesChecks(SearchChecks, TagChecks, SummaryChecks):
    """The abilities of a store with search."""
