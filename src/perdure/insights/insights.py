"""`Insights`: everything an operator can ask about the runs of a store."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Collection, Iterator, Sequence
from contextlib import nullcontext

from msgspec.structs import replace

from perdure.clock import Clock, Duration, SystemClock, check_clock, parse_duration
from perdure.errors import InvalidArgument, InvalidDuration, RunNotFound, StoreError
from perdure.insights import (
    agenda,
    approvals,
    bulk,
    checks,
    compare,
    completion,
    export,
    fleet,
    grouping,
    history,
    overview,
    queues,
    retention,
    schedules,
    views,
)
from perdure.insights.acts import ActSearch
from perdure.insights.changes import Changes, Reading
from perdure.insights.completion import Candidate
from perdure.insights.dependencies import read_dependencies
from perdure.insights.family import read_children, read_parent
from perdure.insights.model import (
    ActsPage,
    Agenda,
    ApprovalsPage,
    BulkProgress,
    Bundle,
    Comparison,
    ErrorGroups,
    Finding,
    LimitRow,
    Overview,
    QueueRow,
    Retention,
    RunFacts,
    RunsPage,
    SavedView,
    ScheduleRow,
    StepDetail,
    StepsPage,
    StoreFacts,
    Why,
    WorkerHistory,
    WorkerRow,
    WorkflowRow,
)
from perdure.insights.query import ParsedQuery, parse_query
from perdure.insights.redaction import DEFAULT_REDACTION, Redact
from perdure.insights.rows import row_of
from perdure.insights.run import run_facts
from perdure.insights.search import Search
from perdure.insights.state import RunState, Snapshots, read_state
from perdure.insights.steps import Part, step_detail, steps_page, value_of
from perdure.insights.terms import Term
from perdure.insights.why import why
from perdure.presence import read_switches, read_workers
from perdure.runtime.watching import watch_run
from perdure.snapshot import Snapshot, is_over
from perdure.store import Message, Query, Store, can_inbox, check_store, require_search
from perdure.validation import check_id, check_int


class Insights:
    """Answers questions about the runs of a store, from the store alone.

    It needs no code of the application, takes no lease and writes nothing. Values are redacted
    according to `redact`; pass `NOTHING_REDACTED` to see everything. `url` is the address of the
    store as `store()` shows it, without its password.

        insights = Insights(store)
        page = await insights.runs("status:failed since:24h")
        print((await insights.why(page.runs[0].id)).sentence)
    """

    def __init__(
        self,
        store: Store,
        *,
        redact: Redact = DEFAULT_REDACTION,
        clock: Clock = SystemClock(),
        url: str = "",
    ) -> None:
        if not isinstance(redact, Redact):
            raise InvalidArgument("redact", redact, "a Redact, such as Redact(names=('iban',))")
        self._store = require_search(check_store(store), "Insights")
        self._redact = redact
        self._clock = check_clock(clock)
        self._url = url
        self._snapshots = Snapshots(self._store)

    def parse(self, query: str) -> ParsedQuery:
        """Parse a query as of now, or raise `InvalidQuery`."""
        return parse_query(query, self._clock.now())

    async def complete(self, query: str, cursor: int | None = None) -> tuple[Candidate, ...]:
        """Return the completions of the word at the cursor of a query."""
        counts = await self._store.counts(Query(), 1)
        workflows = sorted({each.workflow for each in counts if each.workflow})
        return completion.complete(query, cursor, {"workflow": workflows})

    async def overview(self) -> Overview:
        """Return the store at a glance: counts, latest failures, what needs attention."""
        now = self._clock.now()
        rows, workers, switches = await asyncio.gather(
            self.workers(), read_workers(self._store), read_switches(self._store)
        )
        return await overview.overview(self._store, self._redact, now, rows, workers, switches)

    async def runs(
        self, query: str | ParsedQuery = "", limit: int = 50, after: str | None = None
    ) -> RunsPage:
        """Return a page of runs, the most recently updated first.

        `after` is the cursor of the previous page. A search with terms that no index covers is
        bounded; the page says how far it looked.
        """
        check_int(limit, "limit")
        if not isinstance(query, ParsedQuery):
            query = self.parse(await self.expand(query))
        has_owner = any(term.field == "owner" for term in query.terms)
        owners = await self._owners() if has_owner else {}
        search = Search(self._store, query, self._redact, self._clock, owners)
        page = await search.page(limit, after)
        if page.runs or page.cursor or after is not None:
            return page
        return replace(page, without=await search.without(limit))

    async def views(self) -> tuple[SavedView, ...]:
        """Return the saved views, by name."""
        return await views.read_views(self._store)

    async def expand(self, query: str) -> str:
        """Return a query with each `view:<name>` replaced by the saved query."""
        return await views.expand(self._store, query)

    async def revisions(self, run_ids: Sequence[str]) -> dict[str, str]:
        """Return the revision of each existing run, which changes whenever the run does."""
        summaries = await self._store.summaries([check_id(each, "run_ids") for each in run_ids])
        return {run.id: run.revision for run in summaries if run is not None}

    async def run(self, run_id: str, *, whole: bool = True) -> RunFacts:
        """Return everything about a run except its steps, or raise `RunNotFound`.

        Unless it is `whole`, large values may lack their last members.
        """
        state, children = await asyncio.gather(
            self._state(run_id), read_children(self._store, run_id, self._redact)
        )
        parent = await read_parent(self._store, state.snapshot.get("metadata") or {})
        return run_facts(state, parent, children, whole=whole)

    async def why(self, run_id: str) -> Why:
        """Return why a run is where it is, in one or two sentences."""
        return why(await self._state(run_id))

    async def steps(self, run_id: str, after: str | None = None, limit: int = 200) -> StepsPage:
        """Return records of a run in order, after the record `after`."""
        check_int(limit, "limit")
        return steps_page(await self._snapshot(run_id), self._redact, after, limit)

    async def step(self, run_id: str, key: str, *, whole: bool = True) -> StepDetail:
        """Return one record of a run; unless it is `whole`, a large value may lack its end."""
        return step_detail(await self._snapshot(run_id), key, self._redact, whole=whole)

    async def watch(self, run_id: str) -> AsyncGenerator[RunFacts, None]:
        """Yield a run now and after each change, until it is over."""
        check_id(run_id, "run_id")
        async with watch_run(self._store, self._clock, run_id, reports=True) as watch:
            last_change = None
            while True:
                if await watch.next() is None:
                    raise RunNotFound(run_id)
                facts = await self.run(run_id)
                # Read after the watch saw the run, these may already be those of the next change.
                change = (facts.run.revision, facts.progress, facts.note)
                if change != last_change:
                    yield facts
                last_change = change
                if is_over(facts.run.status):
                    return

    def changes(
        self, topics: Callable[[], Collection[str]], reading: Reading = nullcontext
    ) -> AsyncGenerator[frozenset[str], None]:
        """Yield a few times per second which topics have changed, until there are no topics.

        A topic is "counts", "fleet", "acts", "run:<id>", "query:<query>" or "bulk:<id>". `reading`
        returns a context manager in which the store is read.
        """
        return Changes(self, self._store, self._clock, reading).rounds(topics)

    @property
    def store_name(self) -> str:
        """A short name of the store: its host and database, its file, or its kind."""
        return checks.name_of(self._store, self._url)

    async def export(self, run_id: str) -> Bundle:
        """Return a run with its snapshot and inbox, redacted, with a checksum."""
        state, inbox = await asyncio.gather(self._state(run_id), self._inbox(run_id))
        # Redacting a large run takes seconds, in which this process must do other work.
        return await asyncio.to_thread(export.bundle_of, state, inbox)

    async def download(
        self, run_id: str, part: Part = "run", key: str = ""
    ) -> AsyncGenerator[bytes, None]:
        """Return JSON in chunks: a run as `export` returns it, or one of its values.

        With the part `"step"`, that is the value of the step with this key. Each chunk is made when
        it is asked for, so that a large run needs little memory.
        """
        if part == "run":
            state, inbox = await asyncio.gather(self._state(run_id), self._inbox(run_id))
            return _in_thread(export.bundle_chunks(state, inbox))
        value = value_of(await self._snapshot(run_id), part, key)
        return _in_thread(export.value_chunks(value, self._redact))

    async def compare(self, left: str, right: str) -> Comparison:
        """Return how the payloads and the records of two runs differ."""
        states = await asyncio.gather(self._state(left), self._state(right))
        return await asyncio.to_thread(compare.compare, *states)

    async def errors(self, window: Duration = "24h") -> ErrorGroups:
        """Return the failed runs of a time window in groups, based on at most the newest 2,000."""
        duration = parse_duration(window, "window")
        if not duration:
            raise InvalidDuration("window", window, "a positive duration")
        return await grouping.error_groups(self._store, self._redact, self._clock.now(), duration)

    async def agenda(self, hours: int = 24) -> Agenda:
        """Return what happens in the next hours: runs that wake, and events that runs wait for."""
        check_int(hours, "hours")
        return await agenda.agenda(self._store, self._redact, self._clock.now(), hours)

    async def approvals(
        self, to: str | None = None, limit: int = 50, after: str | None = None
    ) -> ApprovalsPage:
        """Return a page of open approvals, all of them or those addressed to `to`.

        A page covers up to `limit` runs, newest first; `after` is the cursor of the previous page.
        """
        check_int(limit, "limit")
        return await approvals.approvals(self._store, self._redact, self._clock, to, limit, after)

    async def acts(self, query: str = "", limit: int = 50, after: str | None = None) -> ActsPage:
        """Return a page of the acts of operators, newest first.

        A query has the fields `by`, `verb`, `via`, `since` and `older`; a bare word is the
        beginning of a run's id. `after` is the cursor of the previous page.
        """
        check_int(limit, "limit")
        search = ActSearch(self._store, query, self._redact, self._clock.now())
        return await search.page(limit, after)

    async def bulk(self, id: str) -> BulkProgress | None:
        """Return a bulk operation, or `None` if there is none with this id."""
        return await bulk.read_bulk(self._store, check_id(id), self._clock.now())

    async def bulks(self, limit: int = 50) -> tuple[BulkProgress, ...]:
        """Return bulk operations, newest first."""
        check_int(limit, "limit")
        return await bulk.read_bulks(self._store, limit, self._clock.now())

    async def workers(self) -> tuple[WorkerRow, ...]:
        """Return the live workers, then those that disappeared within the last day."""
        return await fleet.workers(self._store, self._clock.now())

    async def worker(self, id: str) -> WorkerRow | None:
        """Return a worker, or `None` if it is unknown or has stopped."""
        row = await fleet.worker(self._store, check_id(id), self._clock.now())
        if row is None or row.state != "lost":
            return row
        owned_runs = await self.runs(f"status:running {Term('owner', (id,))}")
        return replace(row, owned=owned_runs.runs)

    async def workflows(self) -> tuple[WorkflowRow, ...]:
        """Return the workflows that have runs, that a worker knows or that are paused."""
        return await fleet.workflows(self._store, self._redact, self._clock.now())

    async def workflow(self, name: str) -> WorkflowRow | None:
        """Return one workflow, or `None` if it is unknown."""
        check_id(name, "name")
        return await fleet.workflow(self._store, name, self._redact, self._clock.now())

    async def queues(self) -> tuple[QueueRow, ...]:
        """Return the queues, and the runs in no queue.

        These are the queues that have due or owned runs, that workers serve, or that are paused.
        """
        return await queues.queues(self._store, self._redact, self._clock.now())

    async def queue(self, name: str) -> QueueRow | None:
        """Return one queue, or `None` if it is unknown."""
        check_id(name, "name")
        return next((row for row in await self.queues() if row.name == name), None)

    async def limits(self) -> tuple[LimitRow, ...]:
        """Return the limits of queues and steps that live workers declare."""
        return await queues.limits(self._store, self._clock.now())

    async def schedules(self) -> tuple[ScheduleRow, ...]:
        """Return the schedules, by name; at most 500."""
        return await schedules.schedules(self._store, self._redact)

    async def schedule(self, name: str) -> ScheduleRow | None:
        """Return one schedule, or `None` if there is none with this name."""
        return await schedules.schedule(self._store, check_id(name, "name"), self._redact)

    async def history(self, window: Duration = "24h") -> WorkerHistory:
        """Return the workers' activity in the last 1, 6, 24 or 48 hours, for a chart."""
        return await history.history(self._store, window, self._clock.now())

    async def store(self) -> StoreFacts:
        """Describe the store: what it can do, and how far its clock is known to be off."""
        return await checks.store_facts(self._store, self._url, self._clock.now())

    async def retention(self, workflow: str | None = None) -> Retention:
        """Return the retention policies, and how many runs each would remove now.

        These are the policies of one workflow, or of all.
        """
        name = None if workflow is None else check_id(workflow, "workflow")
        return await retention.retention(self._store, self._clock, name)

    async def check(self) -> tuple[Finding, ...]:
        """Return the problems of the store and its workers; empty if all is well."""
        try:
            rows, workers, switches = await asyncio.gather(
                self.workers(), read_workers(self._store), read_switches(self._store)
            )
            return await checks.find(self._store, self._clock.now(), rows, workers, switches)
        except StoreError as error:
            return (checks.unreachable(error),)

    async def _state(self, run_id: str) -> RunState:
        check_id(run_id, "run_id")
        state = await read_state(self._store, self._snapshots, run_id, self._redact, self._clock)
        dependencies = await read_dependencies(self._store, self._snapshots, state, self._clock)
        return replace(state, dependencies=dependencies)

    async def _snapshot(self, run_id: str) -> Snapshot:
        (run,) = await self._store.summaries([check_id(run_id, "run_id")])
        if run is None:
            raise RunNotFound(run_id)
        return await self._snapshots.load(run, row_of(run, self._redact).size)

    async def _inbox(self, run_id: str) -> list[Message]:
        return list(await self._store.inbox(run_id)) if can_inbox(self._store) else []

    async def _owners(self) -> dict[str, frozenset[str]]:
        """Return the owner ids of the live and the lost workers."""
        return await fleet.owners(self._store, self._clock.now())


async def _in_thread(chunks: Iterator[bytes]) -> AsyncGenerator[bytes, None]:
    """Yield chunks that take long to make, so that this process can do other work."""
    while chunk := await asyncio.to_thread(next, chunks, b""):
        yield chunk
