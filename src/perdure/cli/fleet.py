"""Commands about workflows, queues, schedules, workers, bulk operations and saved views."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias

import click
import msgspec

from perdure.cli.changes import WHY, follow, verb_command
from perdure.cli.connections import insights, operations
from perdure.cli.context import Command, Settings, command, group, option
from perdure.cli.description import describe
from perdure.cli.failures import NOT_FOUND, Failure
from perdure.cli.output import Column, Output
from perdure.cli.payloads import parse_rate
from perdure.insights.model import (
    BulkProgress,
    LimitRow,
    QueueRow,
    SavedView,
    ScheduleRow,
    Tally,
    WorkerRow,
    WorkflowRow,
)
from perdure.insights.words import duration, tally_words
from perdure.operations.outcome import KEEP

COUNTED_STATUSES = ("queued", "running", "suspended", "waiting", "failed", "completed")

Columns: TypeAlias = Callable[[Output], list[Column[Any]]]


def listing(question: str, help: str, columns: Columns, key: str = "name") -> Command:
    """Return a command that lists the results of a method of `Insights`."""

    async def run(settings: Settings) -> None:
        async with insights(settings) as ask:
            answer = await getattr(ask, question)()
        output = Output(settings)
        output.rows(answer, answer, columns(output), (getattr(row, key) for row in answer))

    run.__name__, run.__doc__ = "list", help
    return command(run)


def showing(
    question: str,
    help: str,
    noun: str = "",
    metavar: str = "NAME",
    fields: Callable[[Any], Mapping[str, Any]] = msgspec.structs.asdict,
) -> Command:
    """Return a command that prints one result, or ends with the exit code for a missing one.

    `fields` returns the fields of a result as people read them.
    """

    async def run(settings: Settings, name: str) -> None:
        async with insights(settings) as ask:
            answer = await getattr(ask, question)(name)
        if answer is None:
            raise Failure(f"there is no {noun or question} {name!r}", NOT_FOUND)
        output = Output(settings)
        output.answer(answer, lambda: describe(output, fields(answer)), [name])

    run.__name__, run.__doc__ = "show", help
    return command(click.argument("name", metavar=metavar)(run))


def _workflow_columns(output: Output) -> list[Column[WorkflowRow]]:
    return [
        Column("WORKFLOW", lambda row: row.name),
        *(Column(status.upper(), partial(_count, status)) for status in COUNTED_STATUSES),
        Column("P95", _p95),
        Column("WORKERS", lambda row: f"{len(row.workers):,}"),
        Column("STATE", _state),
    ]


def _count(status: str, row: WorkflowRow) -> str:
    return tally_words(row.counts.get(status))


def _p95(row: WorkflowRow) -> str:
    p95 = row.durations and row.durations.p95
    return duration(p95) if p95 else ""


def _state(row: WorkflowRow | QueueRow) -> str:
    return f"paused {row.paused_reason}".strip() if row.paused else ""


def _queue_columns(output: Output) -> list[Column[QueueRow]]:
    return [
        Column("QUEUE", lambda row: row.name or "(none)"),
        Column("DUE", lambda row: tally_words(Tally(row.due, row.capped))),
        Column("RUNNING", lambda row: f"{row.leased:,}"),
        Column("OLDEST", lambda row: output.time(row.oldest_due)),
        Column("LIMITS", lambda row: ", ".join(map(_limit, row.limits))),
        Column("STATE", _state),
    ]


def _limit(row: LimitRow) -> str:
    """Return a limit as `concurrency 2/50` or `key_rate 10 per 60 s`."""
    units = f"{row.n:,}" if row.in_use is None else f"{row.in_use:,}/{row.n:,}"
    per = "" if row.per is None else f" per {row.per:g} s"
    return f"{row.of} {units}{per}"


def _limit_columns(output: Output) -> list[Column[LimitRow]]:
    return [
        Column("NAME", lambda row: row.name),
        Column("LIMIT", _limit),
        Column("DECLARED", lambda row: f"{row.declared:,}"),
    ]


def _schedule_columns(output: Output) -> list[Column[ScheduleRow]]:
    return [
        Column("SCHEDULE", lambda row: row.name),
        Column("WORKFLOW", lambda row: row.workflow),
        Column("EVERY", lambda row: f"{row.every} {row.tz}".rstrip()),
        Column("NEXT", lambda row: output.time(next(iter(row.next_times), None))),
        Column("LAST", lambda row: output.time(row.last_at)),
        Column("OPEN", lambda row: f"{len(row.open):,}"),
        Column("MISSED", lambda row: f"{row.missed:,}", is_minor=True),
        Column("SKIPPED", lambda row: f"{row.skipped:,}", is_minor=True),
        Column("STATE", _schedule_state),
    ]


def _schedule_state(row: ScheduleRow) -> str:
    if row.status == "paused":
        return f"paused {row.reason}".strip()
    return "" if row.next_times else "ended"


def _schedule_fields(row: ScheduleRow) -> dict[str, Any]:
    """Return the fields of a schedule, with its own status instead of that of its run."""
    is_paused = row.status == "paused"
    status = "paused" if is_paused else _schedule_state(row) or "active"
    return {**msgspec.structs.asdict(row), "status": status}


def _worker_columns(output: Output) -> list[Column[WorkerRow]]:
    return [
        Column("WORKER", lambda row: row.id),
        Column("STATE", lambda row: row.state),
        Column("HOST", lambda row: f"{row.host}:{row.pid}"),
        Column("SLOTS", lambda row: f"{row.running:,}/{row.slots:,}"),
        Column("STARTED", lambda row: output.time(row.started_at)),
        Column("SEEN", lambda row: output.time(row.seen_at)),
        Column("WORKFLOWS", _versions),
    ]


def _versions(worker: WorkerRow) -> str:
    ranges = (
        f"{each.workflow} v{each.first}{'' if each.first == each.last else f'–{each.last}'}"
        for each in worker.workflows
    )
    return ", ".join(ranges)


def _view_columns(output: Output) -> list[Column[SavedView]]:
    return [
        Column("VIEW", lambda row: row.name),
        Column("QUERY", lambda row: row.query),
        Column("BY", lambda row: row.by),
        Column("SAVED", lambda row: output.time(row.at)),
    ]


def _bulk_columns(output: Output) -> list[Column[BulkProgress]]:
    return [
        Column("ID", lambda row: row.id),
        Column("VERB", lambda row: row.verb),
        Column("QUERY", lambda row: row.query),
        Column("STATE", lambda row: row.state),
        Column("DONE", lambda row: f"{row.done:,}"),
        Column("REFUSED", lambda row: f"{row.refused:,}"),
        Column("BY", lambda row: row.by),
        Column("BEGAN", lambda row: output.time(row.began_at)),
    ]


@command
@click.argument("bulk_id", metavar="ID")
@WHY
async def stop_bulk(settings: Settings, bulk_id: str, why: str) -> None:
    """Stop a bulk operation; what it has done stays done."""
    async with operations(settings) as act:
        await act.stop_bulk(bulk_id, by=settings.by, why=why)


@command
@click.argument("bulk_id", metavar="ID")
@option("--rate", metavar="10/s", help="Change its rate: how many runs to change per second.")
@WHY
async def resume_bulk(settings: Settings, bulk_id: str, rate: str | None, why: str) -> None:
    """Continue a bulk operation that was stopped, or whose process died."""
    pace = KEEP if rate is None else parse_rate(rate)
    async with operations(settings) as act:
        steps = act.resume_bulk(bulk_id, rate=pace, by=settings.by, why=why)
        await follow(settings, steps, "done")


workflows = group(
    "List, show, pause and resume workflows.",
    list=listing(
        "workflows", "List the workflows that have runs, or that a worker knows.", _workflow_columns
    ),
    show=showing("workflow", "Show one workflow: versions, workers, durations of its steps."),
    pause=verb_command("pause_workflow"),
    resume=verb_command("unpause_workflow"),
)
queues = group(
    "List, show, pause and resume queues, and change limits.",
    list=listing("queues", "List the queues with due or running runs.", _queue_columns),
    show=showing("queue", "Show one queue: its limits, and the keys with due or running runs."),
    pause=verb_command("pause_queue"),
    resume=verb_command("unpause_queue"),
    limit=verb_command("set_limit"),
    limits=listing(
        "limits", "List the limits of queues and steps that live workers declare.", _limit_columns
    ),
)
schedules = group(
    "List, show and change schedules.",
    list=listing(
        "schedules", "List the schedules with their next and last times.", _schedule_columns
    ),
    show=showing(
        "schedule",
        "Show one schedule: its options, its next times and its open runs.",
        fields=_schedule_fields,
    ),
    pause=verb_command("pause_schedule"),
    resume=verb_command("unpause_schedule"),
    trigger=verb_command("trigger_schedule"),
    backfill=verb_command("backfill_schedule"),
    delete=verb_command("delete_schedule"),
)
views = group(
    "List, save and delete queries for everyone.",
    list=listing("views", "List the saved queries; view:NAME stands for one.", _view_columns),
    save=verb_command("save_view"),
    delete=verb_command("delete_view"),
)
workers = group(
    "List, show and drain workers.",
    list=listing(
        "workers",
        "List the workers that are alive, and those lost within a day.",
        _worker_columns,
        "id",
    ),
    show=showing(
        "worker", "Show one worker and the steps it is executing, the longest first.", metavar="ID"
    ),
    drain=verb_command("drain_worker"),
)
bulk = group(
    "List, show, stop and resume bulk operations.",
    list=listing("bulks", "List the bulk operations.", _bulk_columns, "id"),
    show=showing("bulk", "Show the progress of a bulk operation.", "bulk operation", "ID"),
    stop=stop_bulk,
    resume=resume_bulk,
)
