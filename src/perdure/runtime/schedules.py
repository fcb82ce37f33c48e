"""Create, list, pause, change and delete schedules.

schedule = await runtime.schedule("daily", report, every=Cron("0 9 * * *", tz="Europe/Berlin"))
await schedule.pause(by="ana", why="the warehouse is closed")
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import islice
from typing import Any, TypeVar, Unpack, overload

from msgspec.structs import replace

from perdure import codec
from perdure.clock import as_utc
from perdure.durable.lifecycle import log_failure
from perdure.durable.run import already_running
from perdure.durable.session import Session, wake_workers
from perdure.errors import InvalidArgument, PerdureError, ScheduleConflict, ScheduleNotFound
from perdure.runtime.acts import copy_acts
from perdure.runtime.definition import Definition
from perdure.runtime.edits import RunEdit, leased_edit, settle
from perdure.runtime.options import check_options
from perdure.runtime.requests import Request, Verb
from perdure.runtime.run import Run
from perdure.runtime.schedule_info import (
    ScheduleChanges,
    ScheduleInfo,
    ScheduleOptions,
    change_declared_spec,
    change_spec,
    declared_differences_of,
    differences_of,
    info_of,
    new_schedule,
    options_of,
    schedule_of,
    spec_of,
)
from perdure.runtime.schedule_workflow import (
    SCHEDULE,
    SCHEDULE_WORKFLOW,
    ScheduleInput,
    Spec,
    encode_input,
    new_run,
    queued_run,
    read_input,
    schedule_id,
)
from perdure.runtime.starter import BATCH, Starter
from perdure.runtime.verbs import apply
from perdure.schedules import (
    Schedule,
    ScheduleState,
    check_name,
    first_time,
    next_time,
    planned_start,
    run_id_at,
    times_between,
    timing_of,
)
from perdure.snapshot import (
    Snapshot,
    is_over,
    new_uuid,
    rest_status,
    visible_tags,
)
from perdure.store import Grant, Refusal, Rest, can_search, require_schedule
from perdure.validation import check_text

logger = logging.getLogger(__name__)

P = TypeVar("P")
T = TypeVar("T")

MAX_BACKFILL = 10_000
_PAGE = 500
_PAUSE = 0.05
_PATIENCE = timedelta(minutes=1)


class ScheduleClient(Starter):
    """The part of `Client` that manages schedules."""

    @overload
    async def schedule(
        self,
        name: str,
        workflow: Definition[None, T],
        payload: None = None,
        **options: Unpack[ScheduleOptions],
    ) -> "ScheduleHandle": ...
    @overload
    async def schedule(
        self,
        name: str,
        workflow: Definition[P, T],
        payload: P,
        **options: Unpack[ScheduleOptions],
    ) -> "ScheduleHandle": ...
    @overload
    async def schedule(
        self, name: str, workflow: str, payload: Any = None, **options: Unpack[ScheduleOptions]
    ) -> "ScheduleHandle": ...
    async def schedule(
        self,
        name: str,
        workflow: Definition[Any, Any] | str,
        payload: Any = None,
        **options: Unpack[ScheduleOptions],
    ) -> "ScheduleHandle":
        """Create a schedule, by which workers start runs; the options are those of `Schedule`.

        The run for a nominal time has the id `name@2030-01-01T09:00:00Z`, in UTC, and the `tags`.
        Creating the same schedule again is allowed; a different one with this name raises
        `ScheduleConflict`.
        """
        schedule_options: dict[str, Any] = {**options}
        tags = schedule_options.pop("tags", None)
        spec = self._spec(name, workflow, payload, new_schedule(schedule_options), tags)
        if not await self._create_schedule(spec):
            snapshot, stored_input = await self._load_schedule(name)
            differences = list(differences_of(spec, stored_input.spec))
            if is_over(rest_status(snapshot)):
                differences.append("status")
            if differences:
                raise ScheduleConflict(name, differences)
        return ScheduleHandle(self, name)

    async def get_schedule(self, name: str) -> "ScheduleHandle":
        """Return the handle of a schedule, or raise `ScheduleNotFound`."""
        await self._load_schedule(name)
        return ScheduleHandle(self, name)

    async def schedules(self) -> list[ScheduleInfo]:
        """Return all schedules, by name."""
        names = await self._schedule_names()
        all_infos: list[ScheduleInfo] = []
        for first in range(0, len(names), _PAGE):
            several = names[first : first + _PAGE]
            infos = await asyncio.gather(*map(self._schedule_info, several))
            all_infos += (info for info in infos if info is not None)
        return sorted(all_infos, key=lambda info: info.name)

    async def _schedule_names(self) -> list[str]:
        prefix, after = schedule_id(""), None
        names: list[str] = []
        while True:
            page = await self.store.list(prefix=prefix, limit=_PAGE, after=after)
            names += (run.id.removeprefix(prefix) for run in page)
            if len(page) < _PAGE:
                return names
            after = page[-1].cursor

    async def _declare_schedules(self) -> None:
        for name in self.registry.names:
            definition = self.registry.newest(name)
            if definition.schedule is not None:
                await self._declare(definition, definition.schedule)

    async def _declare(self, definition: Definition[Any, Any], schedule: Schedule) -> None:
        name = definition.name
        spec = self._spec(name, definition, None, schedule)
        spec = replace(spec, declared=definition.version)
        try:
            is_new = await self._create_schedule(spec)
        except InvalidArgument as error:
            # The last time of the schedule has passed; the worker starts without it.
            logger.warning("schedule %r is not created: %s", name, error)
            return
        if is_new:
            logger.info("schedule %r was created", name)
            return
        old_spec = (await self._load_schedule(name))[1].spec
        if not (differences := ", ".join(declared_differences_of(spec, old_spec))):
            return
        if 0 < old_spec.declared < spec.declared:
            logger.info("schedule %r is updated: %s", name, differences)
            await self._change_schedule(name, lambda run: change_declared_spec(run, spec))
        elif old_spec.declared <= spec.declared:
            # An older deployment beside a newer one leaves it alone, without a warning.
            logger.warning(_NOT_UPDATED, name, differences, spec.declared)

    def _spec(
        self,
        name: str,
        workflow: Definition[Any, Any] | str,
        payload: Any,
        schedule: Schedule,
        tags: Mapping[str, str] | None = None,
    ) -> Spec:
        name, now = check_name(name), self.clock.now()
        timing = timing_of(schedule, now)
        # As `trigger` would create it, including its queue.
        plan = check_options(now, tags=tags)
        start = self._start(workflow, payload, run_id_at(name, now), plan)
        new = start.new_run()
        metadata = {key: value for key, value in start.metadata.items() if key not in _OF_ONE_RUN}
        return Spec(
            name,
            start.workflow,
            timing,
            since=timing.origin if timing.start_at is None else now,
            metadata=codec.loads(codec.dumps(metadata)),
            queue=new.queue,
            head_start=new.head_start,
        )

    async def _update_schedule(self, name: str, changes: ScheduleChanges) -> None:
        # Applied to what is stored when the run is leased: another process may change another
        # option at the same time.
        await self._change_schedule(
            name, lambda run: change_spec(run, self._updated_spec(spec_of(run), changes))
        )

    def _updated_spec(self, old_spec: Spec, changes: ScheduleChanges) -> Spec:
        new_options: dict[str, Any] = {**options_of(schedule_of(old_spec)), **changes}
        payload = new_options.pop("payload", None)
        tags = new_options.pop("tags", visible_tags(old_spec.metadata.get("tags")))
        schedule, now = new_schedule(new_options), self.clock.now()
        first_time(timing_of(schedule, now), now)
        if "payload" in changes:
            return self._spec(old_spec.name, old_spec.workflow, payload, schedule, tags)
        others = {key: value for key, value in old_spec.metadata.items() if key != "tags"}
        metadata = {**others, **check_options(now, tags=tags).metadata}
        return replace(old_spec, timing=timing_of(schedule, now), metadata=metadata)

    async def _create_schedule(self, spec: Spec) -> bool:
        """Create the run of a schedule; return whether it is new."""
        input = ScheduleInput(spec, ScheduleState(last=spec.since))
        metadata = {"input": encode_input(input), **SCHEDULE_WORKFLOW.identity}
        new = queued_run(schedule_id(spec.name), SCHEDULE, metadata, self.clock.now(), self.random)
        if next_time(spec.timing, spec.since) is None and await self.store.load(new.id):
            # A program that creates the schedule at every start may do so after its end.
            return False
        time = first_time(spec.timing, spec.since)
        new = replace(new, wake_at=planned_start(spec.timing, spec.name, time))
        [is_new] = await require_schedule(self.store, "schedule").enqueue([new])
        return is_new

    async def _load_schedule(self, name: str) -> tuple[Snapshot, ScheduleInput]:
        snapshot = await self.store.load(schedule_id(check_name(name)))
        if snapshot is None:
            raise ScheduleNotFound(name)
        return snapshot, read_input((snapshot.get("metadata") or {}).get("input"))

    async def _schedule_info(self, name: str) -> ScheduleInfo | None:
        try:
            snapshot, input = await self._load_schedule(name)
        except ScheduleNotFound:
            return None
        open_runs = [run_id_at(name, time) for time in input.state.open]
        if can_search(self.store) and open_runs:
            summaries = await self.store.summaries(open_runs)
            open_runs = [run.id for run in summaries if run is not None and not is_over(run.status)]
        return info_of(snapshot, input, open_runs)

    async def _change_schedule(
        self, name: str, edit: Callable[[RunEdit], None], *, delete: bool = False
    ) -> None:
        """Change the run of a schedule in one write, and let a worker continue it."""
        async with self.session() as session:
            while True:
                run, host = leased_edit(session, await self._lease_schedule(session, name))
                try:
                    edit(run)
                except PerdureError:
                    await log_failure(host.release())
                    raise
                block, rest = run.rest(host)
                if delete:
                    rest = Rest(run.status, delete=True)
                if await settle(host, block, rest) is not None:
                    break
        await copy_acts(self.store, run.run_id, run.acts)
        wake_workers(self.store)

    async def _lease_schedule(self, session: Session, name: str) -> Grant:
        """Lease the run of a schedule, retrying while it is owned.

        A worker owns it for some milliseconds at each of its times. If its owner died, the lease
        has to expire first.
        """
        end = self.clock.monotonic() + _PATIENCE.total_seconds()
        while True:
            answer = await session.acquire(self._lease_request(schedule_id(name)))
            if not isinstance(answer, Refusal):
                return answer
            if answer.reason == "missing":
                raise ScheduleNotFound(name)
            if self.clock.monotonic() > end:
                raise already_running(answer)
            await self.clock.sleep(_PAUSE)

    async def _trigger_schedule(self, name: str, metadata: Mapping[str, Any] = {}) -> Run:
        """Start the run for the current time, with additional metadata."""
        spec, now = await self._spec_with(name, metadata), self.clock.now()
        time = now.replace(microsecond=now.microsecond // 1000 * 1000)
        [run] = await self._start_now(spec, [time])
        return run

    async def _backfill_schedule(
        self, name: str, start: datetime, end: datetime, metadata: Mapping[str, Any] = {}
    ) -> list[Run]:
        """Start the runs for a period, with additional metadata."""
        start, end = as_utc(start, "start"), as_utc(end, "end")
        if end > self.clock.now():
            raise InvalidArgument("end", end, "a datetime in the past")
        spec = await self._spec_with(name, metadata)
        return await self._start_now(spec, _times_to_backfill(spec, start, end))

    async def _spec_with(self, name: str, metadata: Mapping[str, Any]) -> Spec:
        spec = (await self._load_schedule(name))[1].spec
        return replace(spec, metadata={**spec.metadata, **metadata})

    async def _start_now(self, spec: Spec, times: Sequence[datetime]) -> list[Run]:
        """Create the runs for these times; return them, or those that already exist."""
        store, now = require_schedule(self.store, "schedule"), self.clock.now()
        runs: list[Run] = []
        for first in range(0, len(times), BATCH):
            new = [new_run(spec, time, now, self.random) for time in times[first : first + BATCH]]
            answers = await store.enqueue(new)
            for each, is_new in zip(new, answers, strict=True):
                run = self._run(each.id, codec.loads(each.snapshot)) if is_new else None
                runs.append(run or await self._require(each.id))
        wake_workers(self.store)
        return runs


_NOT_UPDATED = (
    "schedule %r is stored with another %s than version %d of the workflow declares; raise the "
    "workflow's version=, or delete the schedule"
)
_OF_ONE_RUN = {"createdAt", "seed", "version", "definitionHash"}


@dataclass(frozen=True, slots=True)
class ScheduleHandle:
    """A schedule by its name, and the client that changes it."""

    client: ScheduleClient
    name: str

    async def get(self) -> ScheduleInfo | None:
        """Return the schedule as it is now, or `None` if it was deleted."""
        return await self.client._schedule_info(self.name)

    async def pause(self, *, by: str = "", why: str = "") -> None:
        """Start no more runs until it is unpaused; runs that were started continue."""
        await self._apply("pause", by, why)

    async def unpause(self, *, by: str = "", why: str = "") -> None:
        """Start runs again, beginning with the next time."""
        await self._apply("unpause", by, why)

    async def trigger(self) -> Run:
        """Start a run now, for the current time, whether or not others are open."""
        return await self.client._trigger_schedule(self.name)

    async def backfill(self, start: datetime, end: datetime) -> list[Run]:
        """Start the runs for all times from `start` to `end` now; existing runs are kept.

        The times may be before the schedule was created. Overlap policy and jitter do not apply.
        """
        return await self.client._backfill_schedule(self.name, start, end)

    async def update(self, **changes: Unpack[ScheduleChanges]) -> None:
        """Change the schedule from now on; options that are not passed stay as they are.

        If its times change, old times whose runs have not started yet are skipped.
        """
        await self.client._update_schedule(self.name, changes)

    async def delete(self) -> None:
        """Delete the schedule; runs that were started continue."""
        await self.client._change_schedule(self.name, lambda run: None, delete=True)

    async def _apply(self, verb: Verb, by: str, why: str) -> None:
        by = by and check_text(by, "by", "the name of an operator")
        why = why and check_text(why, "why", "a string")
        request = Request(
            new_uuid(self.client.random),
            verb,
            by=by,
            via="python",
            why=why,
        )
        await self.client._change_schedule(self.name, lambda run: apply(run, request))


def _times_to_backfill(spec: Spec, start: datetime, end: datetime) -> list[datetime]:
    if end < start:
        raise InvalidArgument("end", end, f"a datetime after start, {start}")
    times = list(islice(times_between(spec.timing, start, end), MAX_BACKFILL + 1))
    if len(times) > MAX_BACKFILL:
        expected = f"a period with at most {MAX_BACKFILL:,} times"
        raise InvalidArgument("end", end, expected, "Backfill one part after the other")
    return times
