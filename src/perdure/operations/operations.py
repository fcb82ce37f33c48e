"""The operator's verbs. None calls a workflow function; workers continue the runs."""

from collections.abc import AsyncGenerator, Iterable, Mapping
from random import Random, SystemRandom
from typing import Any, Self, cast

from msgspec.structs import replace

from perdure.clock import Clock, Duration, SystemClock, parse_duration
from perdure.codec.tags import is_plain
from perdure.errors import InvalidArgument, Refused, RunNotFound
from perdure.insights.insights import Insights
from perdure.insights.model import BulkProgress, Tally
from perdure.insights.redaction import NOTHING_REDACTED
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
from perdure.operations.changes import Changes
from perdure.operations.forks import Fork, forked
from perdure.operations.outcome import KEEP, Keep, Outcome, Preview, compare, records
from perdure.operations.starts import OperatorStarter
from perdure.presence import WorkerSwitch, WorkflowSwitch, read_worker, set_switch
from perdure.runtime.acts import copy_acts, new_act, write_act
from perdure.runtime.definition import Definition
from perdure.runtime.requests import Request, Verb
from perdure.snapshot import RunStatus, Snapshot
from perdure.store import Store, can_search, require_maintenance, require_search
from perdure.validation import check_event, check_id, check_text, check_user_id, is_encodable

_PRUNE_BATCH = 1000
_MAX_NAME, _MAX_WHY = 200, 2000


class Operations:
    """Changes runs on behalf of operators.

    `via` says where the operator works: "cli", "dashboard", "python". `workflows` are definitions
    whose payloads are checked before anything is written; without them, the first worker checks. A
    store that is opened from a URL is closed by `close` or `async with`.

    Each verb takes `by`, the name of the operator, and `why`. It raises `RunNotFound`, or `Refused`
    if it does not apply to the run as it is.
    """

    def __init__(
        self,
        store: Store | str,
        *,
        via: str = "python",
        workflows: Iterable[Definition[Any, Any]] = (),
        clock: Clock = SystemClock(),
        random: Random | None = None,
    ) -> None:
        self._starter = OperatorStarter(store, workflows=workflows, clock=clock, random=random)
        self.store = self._starter.store
        self.clock = clock
        self.via = via
        self._random = random or SystemRandom()
        self._changes = Changes(self.store, clock, self._random)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the store if it was opened from a URL."""
        await self._starter.close()

    async def start(
        self,
        workflow: str,
        payload: object = None,
        *,
        run_id: str | None = None,
        tags: Mapping[str, str] | None = None,
        by: str,
        why: str = "",
    ) -> Outcome:
        """Create a run for a worker; the payload is JSON."""
        act = self._act("start", by, why)
        run = await self._starter.start(workflow, payload, run_id, tags, act)
        await copy_acts(self.store, run.run_id, [act])
        return Outcome(run.run_id, "start", "done", run.status, f"Started {run.run_id}.")

    async def signal(
        self,
        run_id: str,
        event: str,
        payload: object = None,
        *,
        dedup_id: str | None = None,
        by: str,
        why: str = "",
    ) -> Outcome:
        """Deliver an event to a run, whether or not it waits for it yet; the payload is JSON.

        A `dedup_id` that was used before for this run is refused.
        """
        request = self._request("signal", by, why, check_event(event, "event"), payload)
        if dedup_id is not None:
            request = replace(request, id=f"={check_user_id(dedup_id, 'dedup_id')}")
        return await self._changes.apply(check_id(run_id, "run_id"), request)

    async def cancel(self, run_id: str, *, by: str, why: str = "") -> Outcome:
        """End a run as cancelled. If another process owns it, the step under way is cancelled."""
        return await self._apply(run_id, "cancel", by, why)

    async def pause(self, run_id: str, *, by: str, why: str = "") -> Outcome:
        """Let a run begin no more steps until it is resumed; steps under way end first."""
        return await self._apply(run_id, "pause", by, why)

    async def unpause(self, run_id: str, *, by: str, why: str = "") -> Outcome:
        """Let a worker continue a paused run."""
        return await self._apply(run_id, "unpause", by, why)

    async def retry(self, run_id: str, *, by: str, why: str = "") -> Outcome:
        """Let a worker continue a failed run: the steps that ended it run again."""
        return await self._apply(run_id, "retry", by, why)

    async def wake(
        self, run_id: str, wait: str | None = None, *, by: str, why: str = ""
    ) -> Outcome:
        """End a sleep, start the next attempt, or let a wait for an event time out, now.

        `wait` is the id of one wait; without it, all waits of the run end.
        """
        return await self._apply(run_id, "wake", by, why, wait or "")

    async def complete_step(
        self, run_id: str, step: str, value: object, *, by: str, why: str = ""
    ) -> Outcome:
        """Record a value, which is JSON, for a step that failed or has no record yet."""
        return await self._apply(run_id, "complete_step", by, why, _check_key(step), value)

    async def skip_step(self, run_id: str, step: str, *, by: str, why: str = "") -> Outcome:
        """Let a step that failed or has no record yet return `None`."""
        return await self._apply(run_id, "skip_step", by, why, _check_key(step))

    async def fail_step(
        self, run_id: str, step: str, error: object, *, by: str, why: str = ""
    ) -> Outcome:
        """Let a step that failed or has no record yet fail with this error, which is JSON."""
        return await self._apply(run_id, "fail_step", by, why, _check_key(step), error)

    async def retry_step(self, run_id: str, step: str, *, by: str, why: str = "") -> Outcome:
        """Let a worker run a failed step again, also one whose failure the function handled."""
        return await self._apply(run_id, "retry_step", by, why, _check_key(step))

    async def rewind(self, run_id: str, at: str, *, by: str, why: str = "") -> Outcome:
        """Drop the record of a step and all later ones, and continue there."""
        return await self._apply(run_id, "rewind", by, why, _check_key(at, "at"))

    async def edit_payload(
        self, run_id: str, payload: object, *, by: str, why: str = ""
    ) -> Outcome:
        """Replace the payload of a run that has no records yet."""
        data = self._starter.check_payload((await self._load(run_id)).get("workflowName"), payload)
        return await self._apply(run_id, "edit_payload", by, why, "", data)

    async def preview(
        self, run_id: str, verb: Verb, step: str | None = None, value: object = None
    ) -> Preview:
        """Return what a verb would do to the records of a run; nothing is written."""
        request = Request("preview", verb, "preview", self.via, "", step or "", value)
        run, before = await self._changes.preview(check_id(run_id, "run_id"), request)
        kept, dropped = compare(run, before)
        sentence = f"{records(len(kept))} kept, {len(dropped)} dropped." if dropped else ""
        return Preview(kept, dropped, dropped, sentence)

    async def fork(
        self,
        run_id: str,
        at: str | None = None,
        *,
        new_id: str | None = None,
        payload: object | Keep = KEEP,
        values: Mapping[str, Any] | None = None,
        version: int | None = None,
        by: str,
        why: str = "",
    ) -> Outcome:
        """Start a new run with the records before `at`, or with none of them.

        `payload` and `values` (by key) replace what the original has; `version` is another version
        of its workflow. The original is not touched, and keeps its unconsumed events.
        """
        source = await self._load(check_id(run_id, "run_id"))
        if payload is not KEEP:
            payload = self._starter.check_payload(source.get("workflowName"), payload)
        act = self._act("fork", by, why, at or "")
        fork = Fork(at, payload, values or {}, version)
        snapshot, dropped = forked(run_id, source, fork, act, self.clock.now(), by)
        fork_id = new_id or f"{run_id[:400]}~fork-{self._new_id()[:8]}"
        await self._starter.create(fork_id, snapshot)
        await copy_acts(self.store, fork_id, [{**act, "was": f"forked from {run_id}"}])
        kept = len(snapshot["steps"])
        sentence = f"Forked as {fork_id}. {records(kept)} kept, {len(dropped)} left out."
        return Outcome(fork_id, "fork", "done", "queued", sentence, kept, tuple(dropped))

    async def delete(self, run_id: str, *, by: str, why: str = "") -> Outcome:
        """Delete a run and everything that belongs to it; the act remains."""
        act = self._act("delete", by, why)
        await self._changes.delete(check_id(run_id, "run_id"), act)
        return Outcome(run_id, "delete", "done", None, "Deleted.")

    async def prune(
        self,
        older_than: Duration,
        *,
        statuses: Iterable[RunStatus] = (),
        workflow: str | None = None,
        dry_run: bool = False,
        by: str,
        why: str = "",
    ) -> int:
        """Delete runs that were over for longer than `older_than`; return how many.

        With `dry_run` they are counted and nothing is deleted.
        """
        store = require_maintenance(self.store, "Operations.prune")
        span = parse_duration(older_than, "older_than")
        act = self._act("prune", by, why, workflow or "")
        total = 0
        for status in tuple(statuses) or (None,):
            limit = _PRUNE_BATCH if not dry_run else 10**9
            while deleted := await store.prune(
                span, status=status, workflow=workflow, limit=limit, dry_run=dry_run
            ):
                total += deleted
                if dry_run or deleted < limit:
                    break
        if not dry_run:
            await self._note({**act, "was": f"{total} runs older than {span}"})
        return total

    async def count_bulk(self, query: str, limit: int | None = 1000) -> Tally:
        """Return how many runs a bulk operation would change; more than `limit` are not counted."""
        insights = self._insights()
        return await count_matches(insights, insights.parse(query), limit)

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

        `rate` is how many runs are changed per second at most. It is refused if more than `limit`
        runs match; `None` means that any number may. `arguments` are those of the verb. A generator
        that is closed early leaves an operation that `resume_bulk` continues.
        """
        request = request_of(check_verb(verb), arguments)
        by, why = _check_by(by), _check_why(why)
        _check_json(request.value)
        matched = await self.count_bulk(query, limit)
        if matched.capped:
            reason = f"more than {limit:,} runs match; pass a higher limit"
            raise Refused(query, "bulk", reason)
        document = BulkDocument(
            id=self._new_id(),
            query=query,
            verb=verb,
            by=by,
            why=why,
            began_at=self.clock.now(),
            matched=matched.count,
            rate=_check_rate(rate),
            limit=limit,
            arguments=arguments,
        )
        await self._note(self._act("bulk", by, why, f"{verb} {query}"[:_MAX_NAME]))
        async for progress in self._work(document, None):
            yield progress

    async def resume_bulk(self, id: str, *, by: str, why: str = "") -> AsyncGenerator[BulkProgress]:
        """Continue a bulk operation that was stopped, or whose process died."""
        documents = require_search(self.store, "Operations.resume_bulk").documents
        document, stored = await read_document(documents, id)
        if not can_resume(document, self.clock.now()):
            raise Refused(id, "resume_bulk", f"it is {document.state}")
        await self._note(self._act("resume_bulk", by, why, id))
        async for progress in self._work(replace(document, state="running"), stored):
            yield progress

    async def stop_bulk(self, id: str, *, by: str, why: str = "") -> BulkProgress:
        """Stop a bulk operation; the process that works on it notices within a second."""
        documents = require_search(self.store, "Operations.stop_bulk").documents
        await self._note(self._act("stop_bulk", by, why, id))
        return await stop(documents, id)

    def _work(self, document: BulkDocument, stored: str | None) -> AsyncGenerator[BulkProgress]:
        store = require_search(self.store, "Operations.bulk")
        request = request_of(check_verb(document.verb), document.arguments)
        request = replace(request, by=document.by, via=self.via, why=document.why)

        async def change(run_id: str, request_id: str) -> None:
            numbered = replace(request, id=request_id)
            if document.verb == "delete":
                await self._changes.delete(run_id, new_act(numbered, self.clock.now()))
            else:
                await self._changes.apply(run_id, numbered)

        return Bulk(store, self._insights(), self.clock, document, change).run(stored)

    def _insights(self) -> Insights:
        return Insights(self.store, redact=NOTHING_REDACTED, clock=self.clock)

    async def pause_workflow(self, workflow: str, *, by: str, why: str = "") -> Outcome:
        """Let workers leave the runs of a workflow alone; those they own continue."""
        return await self._switch_workflow(workflow, True, self._act("pause_workflow", by, why))

    async def unpause_workflow(self, workflow: str, *, by: str, why: str = "") -> Outcome:
        """Let workers take up the runs of a workflow again."""
        return await self._switch_workflow(workflow, False, self._act("unpause_workflow", by, why))

    async def _switch_workflow(self, workflow: str, paused: bool, act: dict[str, Any]) -> Outcome:
        now = self.clock.now()
        name = check_user_id(workflow, "workflow")
        await set_switch(
            self.store, WorkflowSwitch(name, paused, act["by"], act.get("why", ""), now)
        )
        await self._note({**act, "step": name})
        done = "is paused" if paused else "is resumed"
        sentence = f"Workflow {name} {done}. Takes effect within 10 seconds."
        return Outcome("", act["verb"], "done", None, sentence)

    async def drain_worker(self, worker: str, *, by: str, why: str = "") -> Outcome:
        """Let a worker claim nothing more, finish its runs and stop."""
        act = self._act("drain_worker", by, why, check_id(worker, "worker"))
        if await read_worker(self.store, worker) is None:
            raise Refused(worker, "drain_worker", "there is no live worker with this id")
        switch = WorkerSwitch(worker, True, act["by"], act.get("why", ""), self.clock.now())
        await set_switch(self.store, switch)
        await self._note(act)
        sentence = f"Worker {worker} will drain. Takes effect within 10 seconds."
        return Outcome("", "drain_worker", "done", None, sentence)

    async def _apply(
        self, run_id: str, verb: Verb, by: str, why: str, step: str = "", value: object = None
    ) -> Outcome:
        request = self._request(verb, by, why, step, value)
        return await self._changes.apply(check_id(run_id, "run_id"), request)

    def _request(
        self, verb: Verb, by: str, why: str, step: str = "", value: object = None
    ) -> Request:
        _check_json(value)
        by, why = _check_by(by), _check_why(why)
        return Request(self._new_id(), verb, by, self.via, why, step, value)

    def _act(self, verb: str, by: str, why: str, step: str = "") -> dict[str, Any]:
        # An act that is not a request to a run has the same fields.
        request = self._request(cast(Verb, verb), by, why, step)
        return new_act(request, self.clock.now())

    async def _note(self, act: dict[str, Any]) -> None:
        """Write an act that concerns no single run."""
        if can_search(self.store):
            await write_act(self.store, act)

    def _new_id(self) -> str:
        return f"{self._random.getrandbits(64):016x}"

    async def _load(self, run_id: str) -> Snapshot:
        snapshot = await self.store.load(check_id(run_id, "run_id"))
        if snapshot is None:
            raise RunNotFound(run_id)
        return snapshot


def _check_key(step: object, parameter: str = "step") -> str:
    return check_text(step, parameter, "the key of a step")


def _check_by(by: object) -> str:
    expected = f"the operator's name, at most {_MAX_NAME} characters"
    if len(name := check_text(by, "by", expected)) > _MAX_NAME:
        raise InvalidArgument("by", by, expected)
    return name


def _check_why(why: object) -> str:
    if not isinstance(why, str) or len(why) > _MAX_WHY or not is_encodable(why):
        raise InvalidArgument("why", why, f"a string of at most {_MAX_WHY} characters")
    return why


def _check_json(value: object) -> None:
    if not is_plain(value):
        raise InvalidArgument("value", value, "JSON: dicts, lists, strings, numbers, bools, None")


def _check_rate(rate: object) -> float | None:
    if rate is None:
        return None
    if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 < rate <= 10_000:
        raise InvalidArgument("rate", rate, "a positive number of runs per second, or None")
    return float(rate)
