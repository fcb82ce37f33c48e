"""Operators' actions on many runs, and on workflows, queues and workers."""

from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterable
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

from msgspec.structs import replace

from perdure.clock import Duration, parse_duration
from perdure.durable.owners import new_owner
from perdure.errors import InvalidArgument, Refused, RunNotFound
from perdure.insights.insights import Insights
from perdure.insights.model import BulkProgress, Tally
from perdure.insights.redaction import NOTHING_REDACTED
from perdure.limits import LimitOf, check_name, limit_name
from perdure.operations.bulk import (
    Bulk,
    BulkDocument,
    BulkVerb,
    can_resume,
    check_verb,
    count_matches,
    read_document,
    request_of,
    stop,
)
from perdure.operations.copying import Copy, CopyProgress
from perdure.operations.outcome import KEEP, Keep, Outcome
from perdure.operations.repairs import restore_acts
from perdure.operations.runs import check_by, check_json, check_why
from perdure.operations.views import ViewOperations
from perdure.presence import (
    LimitSwitch,
    QueueSwitch,
    Switch,
    WorkerSwitch,
    WorkflowSwitch,
    read_worker,
    set_switch,
)
from perdure.retention import FLOOR, OVER
from perdure.runtime.acts import new_act
from perdure.runtime.maintenance import MAINTENANCE, read_input, spans_of
from perdure.runtime.pruning import GRACE, Kind, kinds_of, remove_old_logs
from perdure.snapshot import RunStatus
from perdure.store import MaintenanceStore, Store, require_maintenance, require_search
from perdure.validation import check_id, check_int, check_user_id

_PRUNE_BATCH = 1000
_PRUNE_COUNT = 100_000
_UNLIMITED = 10**9
_MAX_NAME = 200


class Operations(ViewOperations):
    """Changes runs, schedules, workflows, queues and workers of a store on behalf of operators.

    `via` names the operator's tool: "cli", "dashboard" or "python". Payloads for the definitions in
    `workflows` are checked before anything is written; other payloads are checked by the first
    worker. A store opened from a URL is closed by `close` or `async with`.

    Each method takes `by`, the name of the operator, and `why`. It raises `RunNotFound`, or
    `Refused` if it does not apply to the run in its current state.
    """

    async def prune(
        self,
        older_than: Duration | None = None,
        *,
        statuses: Iterable[RunStatus] = (),
        workflow: str | None = None,
        dry_run: bool = False,
        by: str,
        why: str = "",
        on_progress: Callable[[int, int | None], None] | None = None,
    ) -> int:
        """Delete runs that have been over for longer than `older_than`; return how many.

        Without `older_than`, those that the policies of their workflows no longer keep, as workers
        do by themselves. With `dry_run` they are counted and nothing is deleted. `on_progress` is
        called at first and after each batch with the number of deleted runs, and how many there
        are, or `None` if there are too many to count.
        """
        store = require_maintenance(self.store, "Operations.prune")
        act = self.act("prune", by, why, workflow or "")
        now, over_statuses = self.clock.now(), check_over(statuses)
        kinds = await self._kinds(store, older_than, over_statuses, workflow)
        limit = _UNLIMITED if dry_run else _PRUNE_COUNT
        counts = [await prune(limit=limit, dry_run=True) for prune, _ in kinds]
        if dry_run:
            return sum(counts)
        total = sum(counts) if max(counts, default=0) < limit else None
        count = f"{limit} or more" if total is None else total
        age = "than their policies say" if older_than is None else f"than {older_than}"
        # Written before the first batch, so that deletions are on record even if this process dies.
        await self.note({**act, "was": f"{count} runs older {age}"})
        for _, kind in kinds:
            await remove_old_logs(store, kind.statuses, kind.workflow, now - kind.span)
        prunes = [prune for prune, _ in kinds]
        if on_progress is not None:
            on_progress(0, total)
        return await _in_batches(prunes, lambda done: on_progress and on_progress(done, total))

    async def _kinds(
        self,
        store: MaintenanceStore,
        older_than: Duration | None,
        statuses: tuple[RunStatus, ...],
        workflow: str | None,
    ) -> list[tuple[Callable[..., Awaitable[int]], "_PruneKind"]]:
        """Return what to delete: by age, or by the policies of the workflows."""
        if older_than is None:
            policies = spans_of(read_input(await store.load(MAINTENANCE)).policies)
            parts = _by_policy(kinds_of(policies), statuses or OVER, workflow)
        else:
            span = parse_duration(older_than, "older_than")
            parts = [_PruneKind(span, workflow, each) for each in statuses or (None,)]
        return [(each.of(store), each) for each in parts]

    async def copy_from(
        self, source: Store, query: str = "", *, by: str, why: str = ""
    ) -> AsyncGenerator[CopyProgress]:
        """Copy the runs that match from another store to this one, and yield the progress.

        Runs that a process works on are skipped, and runs that already exist are left alone. Copies
        of runs that are not over are paused: the originals may still be executed.
        """
        if source is self.store:
            raise InvalidArgument("source", source, "another store than that of these operations")
        insights = Insights(source, redact=NOTHING_REDACTED, clock=self.clock)
        query = await insights.expand(query)
        insights.parse(query)
        await self.note(self.act("copy", by, why, query[:_MAX_NAME]))
        async for progress in Copy(insights, self._starter, self.act("import", by, why)).run(query):
            yield progress

    async def restore_acts(
        self,
        *,
        limit: int | None = None,
        dry_run: bool = False,
        on_progress: Callable[[int, int | None], None] | None = None,
    ) -> int:
        """Write copies of acts that are missing after a crash; return how many there were.

        At most the `limit` runs that changed last are examined, by default all. `on_progress` is
        called with the number of runs that were examined.
        """
        store = require_search(self.store, "Operations.restore_acts")
        missing = 0
        async for examined_count, missing_count in restore_acts(
            store, self.clock.now(), limit, dry_run=dry_run
        ):
            missing = missing_count
            if on_progress is not None:
                on_progress(examined_count, None)
        return missing

    async def note_reveal(self, run_id: str, *, by: str, why: str = "") -> None:
        """Record that an operator saw redacted values of a run; the run is not changed."""
        store = require_search(self.store, "Operations.note_reveal")
        act = self.act("reveal", by, why)
        (run,) = await store.summaries([check_id(run_id, "run_id")])
        if run is None:
            raise RunNotFound(run_id)
        await self.note({**act, "run": run_id})

    async def count_bulk(self, query: str, limit: int | None = 1000) -> Tally:
        """Return how many runs a bulk operation would change, counting at most `limit`."""
        insights = self._insights()
        parsed_query = insights.parse(await insights.expand(query))
        return await count_matches(insights, parsed_query, limit)

    async def bulk(
        self,
        query: str,
        verb: BulkVerb,
        *,
        rate: float | None = None,
        limit: int | None = 1000,
        by: str,
        why: str = "",
        **arguments: Any,
    ) -> AsyncGenerator[BulkProgress]:
        """Apply a verb to every run that matches a query, and yield the progress.

        `rate` is the maximum number of runs changed per second. `Refused` is raised if more than
        `limit` runs match; `None` means no limit. `arguments` are the arguments of the verb. If the
        generator is closed early, `resume_bulk` can continue the operation.
        """
        request = request_of(check_verb(verb), arguments)
        by, why = check_by(by), check_why(why)
        check_json(request.value)
        query = await self._insights().expand(query)
        match_count = await self.count_bulk(query, limit)
        if match_count.capped:
            reason = f"more than {limit:,} runs match; pass a higher limit"
            raise Refused(query, "bulk", reason)
        document = BulkDocument(
            id=self.new_id(),
            query=query,
            verb=verb,
            by=by,
            why=why,
            began_at=self.clock.now(),
            matched=match_count.count,
            rate=_check_rate(rate),
            limit=limit,
            arguments=arguments,
            process=new_owner(self._random),
        )
        await self.note(self.act("bulk", by, why, f"{verb} {query}"[:_MAX_NAME]))
        async for progress in self._work(document, None):
            yield progress

    async def resume_bulk(
        self, id: str, *, rate: float | Keep | None = KEEP, by: str, why: str = ""
    ) -> AsyncGenerator[BulkProgress]:
        """Continue a bulk operation that was stopped, or whose process died.

        `rate` replaces its rate; `None` means as fast as possible.
        """
        documents = require_search(self.store, "Operations.resume_bulk").documents
        document, text = await read_document(documents, id)
        if not can_resume(document, self.clock.now()):
            raise Refused(id, "resume_bulk", f"it is {document.state}")
        await self.note(self.act("resume_bulk", by, why, id))
        mine = replace(document, state="running", process=new_owner(self._random))
        if rate is not KEEP:
            mine = replace(mine, rate=_check_rate(rate))
        async for progress in self._work(mine, text):
            yield progress

    async def stop_bulk(self, id: str, *, by: str, why: str = "") -> BulkProgress:
        """Stop a bulk operation; the process that works on it notices within a second."""
        documents = require_search(self.store, "Operations.stop_bulk").documents
        await self.note(self.act("stop_bulk", by, why, id))
        return await stop(documents, id)

    def _work(self, document: BulkDocument, text: str | None) -> AsyncGenerator[BulkProgress]:
        store = require_search(self.store, "Operations.bulk")
        request = request_of(check_verb(document.verb), document.arguments)
        request = replace(request, by=document.by, via=self.via, why=document.why)

        async def change(run_id: str, request_id: str) -> None:
            numbered_request = replace(request, id=request_id)
            if document.verb == "delete":
                await self.changes.delete(run_id, new_act(numbered_request, self.clock.now()))
            else:
                await self.changes.apply(run_id, numbered_request)

        return Bulk(store, self._insights(), self.clock, document, change).run(text)

    def _insights(self) -> Insights:
        return Insights(self.store, redact=NOTHING_REDACTED, clock=self.clock)

    async def pause_workflow(self, workflow: str, *, by: str, why: str = "") -> Outcome:
        """Stop workers from claiming runs of a workflow; runs they already own continue."""
        return await self._switch_workflow(workflow, True, self.act("pause_workflow", by, why))

    async def unpause_workflow(self, workflow: str, *, by: str, why: str = "") -> Outcome:
        """Let workers claim runs of a workflow again."""
        return await self._switch_workflow(workflow, False, self.act("unpause_workflow", by, why))

    async def _switch_workflow(self, workflow: str, paused: bool, act: dict[str, Any]) -> Outcome:
        now = self.clock.now()
        name = check_user_id(workflow, "workflow")
        await set_switch(
            self.store, WorkflowSwitch(name, paused, act["by"], act.get("why", ""), now)
        )
        await self.note({**act, "step": name})
        done = "is paused" if paused else "is resumed"
        sentence = f"Workflow {name} {done}. Takes effect within 10 seconds."
        return Outcome("", act["verb"], "done", None, sentence)

    async def pause_queue(self, queue: str, *, by: str, why: str = "") -> Outcome:
        """Stop workers from claiming runs of a queue; runs they already own continue."""
        return await self._switch_queue(queue, True, self.act("pause_queue", by, why))

    async def unpause_queue(self, queue: str, *, by: str, why: str = "") -> Outcome:
        """Let workers claim runs of a queue again."""
        return await self._switch_queue(queue, False, self.act("unpause_queue", by, why))

    async def _switch_queue(self, queue: str, paused: bool, act: dict[str, Any]) -> Outcome:
        name = check_name(queue, "queue")
        switch = QueueSwitch(name, paused, act["by"], act.get("why", ""), self.clock.now())
        done = "is paused" if paused else "is resumed"
        return await self._switch(switch, {**act, "step": name}, f"Queue {name} {done}")

    async def set_limit(
        self,
        name: str,
        n: int | None = None,
        *,
        of: LimitOf = "concurrency",
        by: str,
        why: str = "",
    ) -> Outcome:
        """Override the declared number of a limit; `None` restores it.

        `name` is the name of a queue or, with `of="steps"`, of a `Limit`. When a limit is lowered,
        runs in progress continue. The period of a rate stays as declared.
        """
        limit = limit_name(check_name(name), of)
        number = None if n is None else check_int(n, "n")
        act = self.act("set_limit", by, why, limit)
        switch = LimitSwitch(limit, number, act["by"], act.get("why", ""), self.clock.now())
        value = "as declared" if number is None else f"{number:,}"
        return await self._switch(switch, act, f"The limit {of} of {name} is {value}")

    async def _switch(self, switch: Switch, act: dict[str, Any], done: str) -> Outcome:
        await set_switch(self.store, switch)
        await self.note(act)
        return Outcome("", act["verb"], "done", None, f"{done}. Takes effect within 10 seconds.")

    async def drain_worker(self, worker: str, *, by: str, why: str = "") -> Outcome:
        """Drain a worker: it claims no more runs, finishes those it has, and stops."""
        act = self.act("drain_worker", by, why, check_id(worker, "worker"))
        if await read_worker(self.store, worker) is None:
            raise Refused(worker, "drain_worker", "there is no live worker with this id")
        switch = WorkerSwitch(worker, True, act["by"], act.get("why", ""), self.clock.now())
        await set_switch(self.store, switch)
        await self.note(act)
        sentence = f"Worker {worker} will drain. Takes effect within 10 seconds."
        return Outcome("", "drain_worker", "done", None, sentence)


class _PruneKind(NamedTuple):
    """A set of runs to prune, by workflow, status and age."""

    span: timedelta
    workflow: str | None
    status: RunStatus | None

    @property
    def statuses(self) -> tuple[RunStatus, ...]:
        return () if self.status is None else (self.status,)

    def of(self, store: MaintenanceStore) -> Callable[..., Awaitable[int]]:
        # A little longer than their logs are kept, because clocks differ.
        span = self.span + GRACE if self.span >= FLOOR else self.span
        return partial(store.prune, span, status=self.status, workflow=self.workflow)


def _by_policy(
    kinds: Iterable[Kind], statuses: Collection[RunStatus], workflow: str | None
) -> list[_PruneKind]:
    return [
        _PruneKind(kind.span, kind.workflow, kind.status)
        for kind in kinds
        if workflow in (None, kind.workflow) and kind.status in statuses
    ]


def check_over(statuses: Iterable[RunStatus]) -> tuple[RunStatus, ...]:
    """Check that runs with these statuses are over."""
    result = tuple(statuses)
    for status in result:
        if status not in OVER:
            expected = f"one of {', '.join(OVER)}: other runs are not over"
            raise InvalidArgument("statuses", status, expected)
    return result


async def _in_batches(
    kinds: Iterable[Callable[..., Awaitable[int]]], show: Callable[[int], object]
) -> int:
    """Delete until nothing is left; return how many runs were deleted."""
    deleted_count = 0
    for prune in kinds:
        while batch := await prune(limit=_PRUNE_BATCH):
            deleted_count += batch
            show(deleted_count)
    return deleted_count


def _check_rate(rate: object) -> float | None:
    if rate is None:
        return None
    if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 < rate <= 10_000:
        raise InvalidArgument("rate", rate, "a positive number of runs per second, or None")
    return float(rate)
