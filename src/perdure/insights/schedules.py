"""Schedules, from the snapshots of their runs."""

import asyncio

import msgspec

from perdure.errors import PerdureError
from perdure.insights.model import ScheduleRow
from perdure.insights.redaction import Redact
from perdure.insights.words import duration_words
from perdure.runtime.schedule_info import ScheduleInfo, info_of
from perdure.runtime.schedule_workflow import ScheduleInput, read_input, schedule_id
from perdure.schedules import run_id_at
from perdure.snapshot import Snapshot, is_over
from perdure.store import SearchStore

MOST = 500
"""The maximum number of schedules listed."""


async def schedules(store: SearchStore, redact: Redact) -> tuple[ScheduleRow, ...]:
    """Return up to `MOST` schedules, by name."""
    prefix = schedule_id("")
    summaries = await store.list(prefix=prefix, limit=MOST)
    names = [run.id.removeprefix(prefix) for run in summaries]
    rows = await asyncio.gather(*(schedule(store, name, redact) for name in names))
    return tuple(sorted((row for row in rows if row is not None), key=lambda row: row.name))


async def schedule(store: SearchStore, name: str, redact: Redact) -> ScheduleRow | None:
    """Return a schedule, or `None` if it is missing or cannot be read."""
    try:
        snapshot = await store.load(schedule_id(name))
        schedule_input = None if snapshot is None else read_schedule_input(snapshot)
        if snapshot is None or schedule_input is None:
            return None
        info = info_of(snapshot, schedule_input, await _open_runs(store, name, schedule_input))
    except PerdureError:
        # An unreadable schedule must not hide the others.
        return None
    return _row(info, schedule_input, redact)


def read_schedule_input(snapshot: Snapshot) -> ScheduleInput | None:
    """Return the input and state of a schedule's run, or `None` if it cannot be read."""
    try:
        return read_input((snapshot.get("metadata") or {}).get("input"))
    except msgspec.ValidationError:
        return None


async def _open_runs(store: SearchStore, name: str, schedule_input: ScheduleInput) -> list[str]:
    ids = [run_id_at(name, time) for time in schedule_input.state.open]
    summaries = await store.summaries(ids) if ids else ()
    return [run.id for run in summaries if run is not None and not is_over(run.status)]


def _row(info: ScheduleInfo, schedule_input: ScheduleInput, redact: Redact) -> ScheduleRow:
    spec, timing = schedule_input.spec, schedule_input.spec.timing
    return ScheduleRow(
        name=info.name,
        workflow=info.workflow,
        every=timing.cron or duration_words(timing.interval),
        tz=timing.tz,
        status=info.status,
        next_times=info.next_times,
        last_at=info.last_at,
        open=info.open,
        started=info.started,
        missed=info.missed,
        skipped=info.skipped,
        buffered=info.buffered,
        overlap=timing.overlap,
        catch_up=timing.catch_up,
        jitter=timing.jitter,
        on_failure=timing.on_failure,
        run_id=schedule_id(info.name),
        reason=redact.text(info.reason),
        start_at=timing.start_at,
        end_at=timing.end_at,
        payload=redact.value(spec.metadata.get("input"), ("payload",)),
        tags=redact.tags(info.tags),
        queue=spec.queue,
        declared=info.declared,
    )
