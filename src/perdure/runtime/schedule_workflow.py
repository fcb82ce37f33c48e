"""The workflow `~schedule`: each of its runs is a schedule.

The run sleeps until the next time. Then its function decides which runs start, in one recorded
step: the same write records the decision and contains the new runs, which are delivered afterwards
like all actions on other runs. When it has returned, the run starts over as its next generation,
with its state as the input, and sleeps until the time after that.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from random import Random
from typing import Any, cast

import msgspec
from msgspec.structs import replace

from perdure import codec
from perdure.clock import isoformat, parse_iso
from perdure.durable.host import RunHost
from perdure.durable.outbox import encode_run
from perdure.engine.call import StepCall
from perdure.engine.current import current_execution
from perdure.engine.execution import Execution
from perdure.engine.step import Step
from perdure.engine.tasks import POSITION
from perdure.errors import StoreError
from perdure.runtime.edits import UNPAUSED, RunEdit
from perdure.runtime.requests import OPERATOR
from perdure.runtime.system_workflow import SystemWorkflow
from perdure.schedules import (
    MAX_STARTS,
    Decision,
    RunEnd,
    ScheduleState,
    Timing,
    decide,
    run_id_at,
)
from perdure.snapshot import (
    ExecutionBlock,
    RunStatus,
    Snapshot,
    is_over,
    new_seed,
    new_snapshot,
    rest_status,
    system_tag,
)
from perdure.store import NewRun, Rest, Store, can_search, header_of

SCHEDULE = "~schedule"
"""The name of the workflow, and of the tag of all runs that a schedule started."""

DONE = "~done"
"""The event that tells the schedule that a run is over, if another run waits for that."""

MAX_BYTES = 1_000_000
"""The maximum total size of the new runs in one write."""

BUFFERS = ("buffer_one", "buffer_all")
SCHEDULED_FOR = "scheduledFor"


class Spec(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a schedule starts, and when. Only its users change it.

    `metadata` is the metadata of each run: its input and tags. Times up to `since` are ignored.
    `declared` is the version of the workflow that declared the schedule, or 0.
    """

    name: str
    workflow: str
    timing: Timing
    since: datetime
    metadata: dict[str, Any]
    queue: str = ""
    head_start: timedelta = timedelta(0)
    declared: int = 0


class ScheduleInput(msgspec.Struct, frozen=True):
    """The input of a schedule's run: its specification and its state."""

    spec: Spec
    state: ScheduleState


def schedule_id(name: str) -> str:
    """Return the id of the run of a schedule."""
    return f"{SCHEDULE}:{name}"


def read_input(data: object) -> ScheduleInput:
    """Return the input of a schedule's run from the JSON in its metadata."""
    return msgspec.convert(data, ScheduleInput)


def encode_input(input: ScheduleInput) -> Any:
    """Return the input of a schedule's run as JSON."""
    # Not through the codec: the payload in it is already encoded.
    return msgspec.to_builtins(input)


def new_run(
    spec: Spec, time: datetime, now: datetime, random: Random, reply_to: str | None = None
) -> NewRun:
    """Return the run for a nominal time. Its first owner determines the version.

    `reply_to` is the id of the schedule's run if it must be notified when this run is over.
    """
    tags = {**spec.metadata.get("tags", {}), SCHEDULE: system_tag(SCHEDULE, spec.name)}
    metadata = {**spec.metadata, "tags": tags, SCHEDULED_FOR: isoformat(time)}
    if reply_to is not None:
        metadata["replyTo"] = {"run": reply_to, "event": DONE}
    new = queued_run(run_id_at(spec.name, time), spec.workflow, metadata, now, random)
    return replace(new, head_start=spec.head_start, queue=spec.queue)


def queued_run(
    run_id: str, workflow: str, metadata: dict[str, Any], now: datetime, random: Random
) -> NewRun:
    """Return a run that is due at once."""
    metadata = {"createdAt": isoformat(now), "seed": new_seed(random), **metadata}
    snapshot = new_snapshot(workflow, now=now, metadata=metadata)
    queued_snapshot: Snapshot = {
        **snapshot,
        "execution": {**snapshot["execution"], "state": "queued"},
    }
    return NewRun(run_id, workflow, codec.dumps(queued_snapshot), **header_of(queued_snapshot))


class ScheduleDecision(msgspec.Struct, frozen=True):
    """The return value of a schedule's function: the next input, and when to begin with it."""

    next_input: ScheduleInput
    decision: Decision


async def decide_and_start(step: Step, input: ScheduleInput) -> ScheduleDecision:
    """Decide once what to do now, and begin to do it."""
    run = current_execution()
    assert run is not None, "a workflow function is called in a run"

    async def decide_once() -> str:
        # As a string, which the codec need not inspect: this is most of the work of a schedule.
        return msgspec.json.encode(await _decide(run, input)).decode()

    decision = msgspec.json.decode(await step("decide", decide_once), type=Decision)
    return ScheduleDecision(replace(input, state=decision.state), decision)


async def _decide(run: Execution, input: ScheduleInput) -> Decision:
    """Decide, and put the new runs into the outbox, which is part of the same write."""
    spec, now = input.spec, run.clock.now()
    try:
        ends = await _runs_that_ended(run, input)
    except StoreError as error:
        # The schedule has not failed: it is tried again.
        raise run.stop(error) from error.__cause__
    floor = max(input.state.last, spec.since, _unpaused_at(run) or spec.since)
    state = replace(input.state, last=floor)
    # The write of a decision contains all of its runs, so limit them if payloads are large.
    max_starts = max(MAX_BYTES // len(codec.dumps(spec.metadata)), 1)
    decision = decide(
        spec.name, spec.timing, state, now, ends, max_starts=min(max_starts, MAX_STARTS)
    )
    _start_and_cancel(run, spec, decision, now)
    return decision


def _start_and_cancel(run: Execution, spec: Spec, decision: Decision, now: datetime) -> None:
    reply_to = run.run_id if spec.timing.overlap in BUFFERS else None
    for time in decision.starts:
        new = new_run(spec, time, now, run.random, reply_to)
        run.history.outbox.put(f"start:{new.id}", {"start": encode_run(new)})
    cancelled = [run_id_at(spec.name, time) for time in decision.cancels]
    tag = f"{SCHEDULE}={system_tag(SCHEDULE, spec.name)}"
    run.history.cancel_runs("overlap", cancelled, isoformat(now), tag)


def _unpaused_at(run: Execution) -> datetime | None:
    """Return when the schedule was last unpaused; earlier times are skipped."""
    unpaused_at = run.history.metadata.get(UNPAUSED)
    return parse_iso(unpaused_at) if isinstance(unpaused_at, str) else None


async def _runs_that_ended(run: Execution, input: ScheduleInput) -> dict[datetime, RunEnd]:
    """Return which of the open runs are over."""
    host, name = run.host, input.spec.name
    assert isinstance(host, RunHost), "a schedule is executed by a runtime"
    open_runs = {run_id_at(name, time): time for time in input.state.open}
    ends: dict[str, RunEnd] = {}
    if open_runs:
        ends = await _ends(host.session.store, open_runs)
    if input.spec.timing.overlap in BUFFERS:
        ends = {**await _reported_ends(host), **ends}
    return {time: ends[id] for id, time in open_runs.items() if id in ends}


async def _reported_ends(host: RunHost) -> dict[str, RunEnd]:
    """Return the runs that have reported their end, by id.

    A run sends this message before its new status is written. The write of the decision consumes
    it.
    """
    messages = [message for message in await host.read_inbox() if message.name == DONE]
    call = POSITION.get()
    assert isinstance(call, StepCall), "a step decides"
    call.consumes = tuple(message.id for message in messages)
    reports = [codec.loads(message.payload) for message in messages]
    return {report["run"]: _end_in(codec.loads(report["outcome"])) for report in reports}


async def _ends(store: Store, run_ids: Mapping[str, datetime]) -> dict[str, RunEnd]:
    statuses = zip(run_ids, await _statuses(store, list(run_ids)), strict=True)
    return {
        id: "deleted" if status is None else cast(RunEnd, status)
        for id, status in statuses
        if status is None or is_over(status)
    }


async def _statuses(store: Store, run_ids: Sequence[str]) -> list[RunStatus | None]:
    if can_search(store):
        summaries = await store.summaries(run_ids)
        return [None if run is None else run.status for run in summaries]
    snapshots = [await store.load(id) for id in run_ids]
    return [None if snapshot is None else rest_status(snapshot) for snapshot in snapshots]


def _end_in(outcome: Mapping[str, Any]) -> RunEnd:
    if outcome["ok"]:
        return "completed"
    cause = outcome.get("cause")
    is_cancelled = isinstance(cause, Mapping) and cause.get("name") == "Cancelled"
    return "cancelled" if is_cancelled else "failed"


class ScheduleWorkflow(SystemWorkflow):
    """The definition of `~schedule`, which every runtime knows."""

    def decode_payload(self, data: Any) -> ScheduleInput:
        """Return the input as the function receives it."""
        return read_input(data)

    def rest(self, host: RunHost, outcome: ScheduleDecision) -> tuple[ExecutionBlock, Rest]:
        """Return the execution block and the rest of the next generation."""
        next_input, decision = outcome.next_input, outcome.decision
        host.history = host.history.next_generation(encode_input(next_input))
        # It would be stored with every generation, but nothing uses it.
        del host.history.metadata["firstInput"]
        if decision.pause:
            edit = RunEdit(host.id, host.history, host.running_block(), "queued", host.clock.now())
            edit.make("paused", reason=decision.pause)
            return edit.rest(host)
        awaits = (OPERATOR, DONE) if next_input.state.buffer else (OPERATOR,)
        if decision.wake_at is None:
            return host.block(state="waiting"), Rest("waiting", None, awaits)
        return host.block(state="queued"), Rest("queued", decision.wake_at, awaits)


SCHEDULE_WORKFLOW = ScheduleWorkflow(SCHEDULE, decide_and_start)
