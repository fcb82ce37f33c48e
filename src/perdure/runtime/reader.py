"""Read the runs of a store, without leases or writes."""

from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from typing import Any, get_args

from msgspec.structs import replace

from perdure import codec
from perdure.clock import Clock, Duration, check_clock, parse_duration
from perdure.errors import CodecError, InvalidArgument, RunNotFound
from perdure.runtime.definition import Definition
from perdure.runtime.registry import Registry
from perdure.runtime.run import Run, Types, outcome_of_run, run_of
from perdure.runtime.versions import Versions, count_versions
from perdure.runtime.watching import Sighting, read_reports, watch_run
from perdure.snapshot import RunStatus, Snapshot, check_tags, is_over, rest_status
from perdure.store import Query, RunSummary, Store, can_search, require_search
from perdure.validation import check_id, check_limit, check_prefix

_PAGE = 1000


class Reader:
    """Reads the runs of one store; `workflows` are the definitions whose types are known."""

    def __init__(
        self, store: Store, workflows: Iterable[Definition[Any, Any]], clock: Clock
    ) -> None:
        self.store = store
        self.registry = Registry(workflows)
        self.clock = check_clock(clock)
        self._known_types: dict[Definition[Any, Any], Types] = {}

    async def get_run(self, run_id: str) -> Run | None:
        """Return the run with its history, or `None` if there is no such run."""
        is_owned = await self._is_owned(check_id(run_id, "run_id"))
        snapshot = await self.store.load(run_id)
        return None if snapshot is None else await self._current(run_id, snapshot, is_owned)

    async def list_runs(
        self,
        *,
        workflow: str | None = None,
        status: RunStatus | None = None,
        tags: Mapping[str, str] | None = None,
        prefix: str = "",
        limit: int = 100,
        after: str | None = None,
    ) -> Sequence[RunSummary]:
        """Return runs, newest first; `after` is the cursor of the previous page's last run.

        Runs must have all of the `tags`; by tag, they are ordered by their creation.
        """
        check_prefix(prefix)
        check_limit(limit)
        if workflow is not None:
            check_id(workflow, "workflow")
        if status is not None and status not in get_args(RunStatus):
            raise InvalidArgument("status", status, f"one of {', '.join(get_args(RunStatus))}")
        if after is not None and not isinstance(after, str):
            raise InvalidArgument("after", after, "the cursor of a run that list_runs() returned")
        if not tags:
            return await self.store.list(
                prefix=prefix, limit=limit, status=status, workflow=workflow, after=after
            )
        query = Query(
            prefix=prefix,
            statuses=() if status is None else (status,),
            workflows=() if workflow is None else (workflow,),
            tags=_search_tags(tags),
        )
        return await self._search(query, limit, after)

    async def _open_runs(
        self, workflow: str | None, tags: Mapping[str, str] | None
    ) -> Sequence[str]:
        """Return the ids of all open runs of a workflow, or with the tags."""
        store = require_search(self.store, "broadcast")
        query = Query(
            statuses=tuple(status for status in get_args(RunStatus) if not is_over(status)),
            workflows=() if workflow is None else (check_id(workflow, "workflow"),),
            tags=_search_tags(tags),
            # An updated run then moves behind the runs still to be read, not before them.
            oldest_first=True,
        )
        run_ids: dict[str, None] = {}
        page = await store.search(query, _PAGE)
        while page.cursor is not None:
            run_ids.update((run.id, None) for run in page.runs)
            page = await store.search(query, _PAGE, after=page.cursor)
        run_ids.update((run.id, None) for run in page.runs)
        return list(run_ids)

    async def versions(self, workflow: Definition[Any, Any] | str) -> Versions:
        """Return how many open runs of a workflow have each version, by status.

        At most 10,000 runs are examined; `capped` means that there are more.
        """
        name = workflow.name if isinstance(workflow, Definition) else check_id(workflow, "workflow")
        return await count_versions(require_search(self.store, "versions()"), name)

    async def _search(self, query: Query, limit: int, after: str | None) -> list[RunSummary]:
        store = require_search(self.store, "list_runs(tags=…)")
        runs: list[RunSummary] = []
        while len(runs) < limit:
            # A search examines a limited number of runs, so a page may be short or empty.
            page = await store.search(query, limit - len(runs), after=after)
            runs += page.runs
            if page.cursor is None:
                break
            after = page.cursor
        return runs

    async def _outcome(self, run_id: str, timeout: Duration | None) -> Any:
        """Wait until a run is over, and return its output or raise its error."""
        limit = None if timeout is None else parse_duration(timeout, "timeout")
        async with watch_run(self.store, self.clock, run_id, timeout=limit) as watch:
            while True:
                sighting = await watch.next()
                if sighting is None:
                    raise RunNotFound(run_id)
                snapshot = await watch.load() if is_over(sighting.status) else None
                # The run may have been started again in the meantime.
                if snapshot is not None and is_over(rest_status(snapshot)):
                    return outcome_of_run(run_id, snapshot, self._types(snapshot))

    async def _changes(self, run_id: str) -> AsyncGenerator[Run, None]:
        """Yield the run now and after each change, until it is over."""
        last: object = None
        async with watch_run(self.store, self.clock, run_id, reports=True) as watch:
            while True:
                sighting = await watch.next()
                snapshot = None if sighting is None else await watch.load()
                if sighting is None or snapshot is None:
                    raise RunNotFound(run_id)
                run = self._run_in_sighting(run_id, snapshot, sighting)
                if (visible := _visible(run)) != last:
                    last = visible
                    yield run
                if run.over:
                    return

    def _run_in_sighting(self, run_id: str, snapshot: Snapshot, sighting: Sighting) -> Run:
        run = self._run(run_id, snapshot, read_report(sighting.report))
        return _as_owned(run) if sighting.status == "running" else run

    async def _is_owned(self, run_id: str) -> bool:
        if not can_search(self.store):
            return False
        (run,) = await self.store.summaries([run_id])
        return run is not None and run.owner is not None

    async def _current(self, run_id: str, snapshot: Snapshot, is_owned: bool) -> Run:
        if not is_owned:
            return self._run(run_id, snapshot)
        # Only a running step reports progress in a document.
        report = (await read_reports(self.store, [run_id])).get(run_id)
        return _as_owned(self._run(run_id, snapshot, read_report(report)))

    async def _load(self, run_id: str) -> Snapshot:
        snapshot = await self.store.load(check_id(run_id, "run_id"))
        if snapshot is None:
            raise RunNotFound(run_id)
        return snapshot

    async def _require(self, run_id: str) -> Run:
        run = await self.get_run(run_id)
        if run is None:
            raise RunNotFound(run_id)
        return run

    def _run(self, run_id: str, snapshot: Snapshot, report: Mapping[str, Any] | None = None) -> Run:
        return run_of(run_id, snapshot, self._types(snapshot), report)

    def _types(self, snapshot: Snapshot) -> Types:
        """Return the types of a run whose workflow is known."""
        if (name := snapshot.get("workflowName")) not in self.registry.names:
            return Types()
        definition = self.registry.newest(name or "")
        types = self._known_types.get(definition)
        if types is None:
            # Cached: resolving annotations takes about as long as reading a small run.
            types = self._known_types[definition] = Types(
                codec.return_type(definition.fn),
                codec.error_type(definition.fn),
                definition.types,
                definition.scope,
            )
        return types


def _search_tags(tags: Mapping[str, str] | None) -> tuple[str, ...]:
    return tuple(f"{name}={value}" for name, value in check_tags(tags or {}).items())


def _as_owned(run: Run) -> Run:
    # The snapshot of a run that was just claimed has the previous status.
    return run if run.over else replace(run, status="running")


def _visible(run: Run) -> object:
    """Return the part of a run that callers of `watch` see, in a comparable form."""
    steps = [(step.key, step.at, step.attempts) for step in run.history]
    return run.status, steps, run.pending, run.progress, run.note, run.tags, run.reason


def read_report(report: str | None) -> Mapping[str, Any] | None:
    try:
        fields = None if report is None else codec.loads(report)
    except CodecError:
        return None
    return fields if isinstance(fields, Mapping) else None
