"""Read and change a schedule through its run."""

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, Required, TypedDict

import msgspec
from msgspec.structs import replace

from perdure import codec
from perdure.clock import Cron, Duration
from perdure.errors import InvalidArgument
from perdure.runtime.edits import RunEdit
from perdure.runtime.schedule_workflow import ScheduleInput, Spec, encode_input, read_input
from perdure.schedules import OnFailure, Overlap, Schedule, Timing, next_time
from perdure.snapshot import RunStatus, Snapshot, is_over, rest_status, visible_tags

NEXT_TIMES = 5
"""How many of its next times a schedule lists."""


class ScheduleChanges(TypedDict, total=False):
    """The options of a schedule that can be changed."""

    payload: Any
    every: Cron | Duration
    jitter: Duration
    overlap: Overlap
    catch_up: Duration
    start_at: datetime | None
    end_at: datetime | None
    on_failure: OnFailure
    tags: Mapping[str, str]


class ScheduleOptions(TypedDict, total=False):
    """The options of `Client.schedule`, which are those of `Schedule`, and the tags of its runs."""

    every: Required[Cron | Duration]
    jitter: Duration
    overlap: Overlap
    catch_up: Duration
    start_at: datetime | None
    end_at: datetime | None
    on_failure: OnFailure
    tags: Mapping[str, str]


class ScheduleInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A schedule as it was when it was read.

    `next_times` are the nominal times of the next runs; empty if it is paused or has ended.
    `last_at` is the nominal time of the latest run. `open` are the ids of runs that are not over,
    `buffered` counts the runs that wait for them. `missed` counts the times that were left out
    because no worker was running, `skipped` those that were left out because a run was not over.
    `reason` is why it is paused. `declared` is the version of the workflow that declared it, or 0.
    """

    name: str
    workflow: str
    schedule: Schedule
    payload: Any
    tags: dict[str, str]
    status: RunStatus
    next_times: tuple[datetime, ...]
    last_at: datetime | None
    open: tuple[str, ...]
    buffered: int
    started: int
    missed: int
    skipped: int
    reason: str
    declared: int

    @property
    def paused(self) -> bool:
        """Whether the schedule is paused."""
        return self.status == "paused"

    @property
    def next_at(self) -> datetime | None:
        """The nominal time of the next run."""
        return next(iter(self.next_times), None)


def new_schedule(options: Mapping[str, Any]) -> Schedule:
    fields = Schedule.__struct_fields__
    for name, value in options.items():
        if name not in fields:
            raise InvalidArgument(name, value, f"an option: {', '.join(fields)} or tags")
    if "every" not in options:
        raise InvalidArgument("every", None, "a Cron, or a duration")
    return Schedule(**options)


def schedule_of(spec: Spec) -> Schedule:
    timing = spec.timing
    return Schedule(
        every=Cron(timing.cron, timing.tz) if timing.cron else timing.interval,
        jitter=timing.jitter,
        overlap=timing.overlap,
        catch_up=timing.catch_up,
        start_at=timing.start_at,
        end_at=timing.end_at,
        on_failure=timing.on_failure,
    )


def options_of(schedule: Schedule) -> dict[str, Any]:
    return {name: getattr(schedule, name) for name in schedule.__struct_fields__}


def differences_of(new_spec: Spec, old_spec: Spec) -> Iterator[str]:
    """Yield the names of the options that differ between two schedules."""
    if new_spec.workflow != old_spec.workflow:
        yield "workflow"
    new, old = options_of(schedule_of(new_spec)), options_of(schedule_of(old_spec))
    yield from (name for name in new if new[name] != old[name])
    for name, key in (("payload", "input"), ("tags", "tags")):
        if new_spec.metadata.get(key) != old_spec.metadata.get(key):
            yield name


def declared_differences_of(new_spec: Spec, old_spec: Spec) -> Iterator[str]:
    """Yield the names of the options that differ between two declarations of a workflow."""
    yield from differences_of(new_spec, old_spec)
    # Not compared otherwise: a client without the definition does not know them.
    if new_spec.queue != old_spec.queue:
        yield "queue"
    if new_spec.head_start != old_spec.head_start:
        yield "priority"


def spec_of(run: RunEdit) -> Spec:
    """Return the specification of a schedule that is being changed."""
    return read_input(run.history.metadata["input"]).spec


def change_declared_spec(run: RunEdit, spec: Spec) -> None:
    """Replace the specification, unless a newer version has done so in the meantime."""
    if spec_of(run).declared < spec.declared:
        change_spec(run, spec)


def change_spec(run: RunEdit, spec: Spec) -> None:
    """Replace the specification of a schedule; its times count from now on."""
    input = read_input(run.history.metadata["input"])
    old_spec, old, new = input.spec, input.spec.timing, spec.timing
    if new.start_at is None and old.start_at is None:
        # An interval that stays the same must not start over.
        new = replace(new, origin=old.origin)
    has_ended = next_time(old, max(old_spec.since, input.state.last)) is None
    is_changed = _times_of(new) != _times_of(old) or has_ended or run.was_over
    since = max(old_spec.since, run.now) if is_changed else old_spec.since
    declared_version = spec.declared or old_spec.declared
    spec = replace(spec, timing=new, since=since, declared=declared_version)
    run.history.metadata["input"] = encode_input(replace(input, spec=spec))
    if run.was_over:
        # An operator cancelled the schedule: it starts over.
        run.history.drop(run.history)
    run.continue_run()


def _times_of(timing: Timing) -> tuple[object, ...]:
    return timing.cron, timing.tz, timing.interval, timing.origin, timing.start_at


def info_of(snapshot: Snapshot, input: ScheduleInput, open_runs: Sequence[str]) -> ScheduleInfo:
    spec, state, status = input.spec, input.state, rest_status(snapshot)
    is_active = status != "paused" and not is_over(status)
    block: Mapping[str, Any] = snapshot["execution"]
    return ScheduleInfo(
        name=spec.name,
        workflow=spec.workflow,
        schedule=schedule_of(spec),
        payload=codec.decode(spec.metadata.get("input")),
        tags=visible_tags(spec.metadata.get("tags")),
        status=status,
        next_times=tuple(_next_times(input)) if is_active else (),
        last_at=state.latest,
        open=tuple(open_runs),
        buffered=len(state.buffer),
        started=state.started,
        missed=state.missed,
        skipped=state.skipped,
        reason=str(block.get("reason", "")),
        declared=spec.declared,
    )


def _next_times(input: ScheduleInput) -> Iterator[datetime]:
    time: datetime | None = max(input.state.last, input.spec.since)
    for _ in range(NEXT_TIMES):
        time = None if time is None else next_time(input.spec.timing, time)
        if time is not None:
            yield time
