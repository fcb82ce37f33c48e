"""Commands about schedules."""

from collections.abc import Iterator

import click

from perdure.cli.changes import WHY, WHY_REQUIRED, print_outcome
from perdure.cli.connections import insights, operations
from perdure.cli.context import Settings, command, group
from perdure.cli.fleet import show_answer
from perdure.cli.output import Column, Output
from perdure.clock import SystemClock
from perdure.insights.model import ScheduleRow
from perdure.insights.terms import parse_time

NAME = click.argument("name")


@command
async def list_schedules(settings: Settings) -> None:
    """List the schedules with their next and last times."""
    async with insights(settings) as ask:
        answer = await ask.schedules()
    output = Output(settings)
    columns: list[Column[ScheduleRow]] = [
        Column("SCHEDULE", lambda row: row.name),
        Column("WORKFLOW", lambda row: row.workflow),
        Column("EVERY", lambda row: " ".join(_timing(row))),
        Column("NEXT", lambda row: output.time(next(iter(row.next_times), None))),
        Column("LAST", lambda row: output.time(row.last_at)),
        Column("OPEN", lambda row: f"{len(row.open):,}"),
        Column("MISSED", lambda row: f"{row.missed:,}", is_minor=True),
        Column("SKIPPED", lambda row: f"{row.skipped:,}", is_minor=True),
        Column("STATE", _state),
    ]
    output.rows(answer, answer, columns, (row.name for row in answer))


def _timing(row: ScheduleRow) -> Iterator[str]:
    yield row.every
    if row.tz:
        yield row.tz


def _state(row: ScheduleRow) -> str:
    if row.status == "paused":
        return f"paused {row.reason}".strip()
    return "" if row.next_times else "ended"


@command
@NAME
async def show_schedule(settings: Settings, name: str) -> None:
    """Show one schedule: its options, its next times and its open runs."""
    async with insights(settings) as ask:
        show_answer(settings, await ask.schedule(name), f"schedule {name!r}", name)


@command
@NAME
@WHY
async def pause_schedule(settings: Settings, name: str, why: str) -> None:
    """Let a schedule start no more runs; those that it started continue."""
    async with operations(settings) as act:
        outcome = await act.pause_schedule(name, by=settings.by, why=why)
    print_outcome(Output(settings), outcome)


@command
@NAME
@WHY
async def resume_schedule(settings: Settings, name: str, why: str) -> None:
    """Let a schedule start runs again, from its next time on."""
    async with operations(settings) as act:
        outcome = await act.unpause_schedule(name, by=settings.by, why=why)
    print_outcome(Output(settings), outcome)


@command
@NAME
@WHY
async def trigger_schedule(settings: Settings, name: str, why: str) -> None:
    """Start a run of a schedule now, whether or not others are open."""
    async with operations(settings) as act:
        outcome = await act.trigger_schedule(name, by=settings.by, why=why)
    print_outcome(Output(settings), outcome)


@command
@NAME
@click.argument("start")
@click.argument("end", default="0s")
@WHY
async def backfill_schedule(settings: Settings, name: str, start: str, end: str, why: str) -> None:
    """Start the runs of all times of a schedule from START to END; those that exist are kept.

    Both are times such as 2030-01-31 or 2030-01-31T09:00, in UTC, or durations such as 7d, which
    count back from now. END is now unless it is passed.
    """
    now = SystemClock().now()
    try:
        begin, until = parse_time(start, now), parse_time(end, now)
    except ValueError as error:
        raise click.UsageError(f"START and END: expected {error}") from None
    async with operations(settings) as act:
        outcome = await act.backfill_schedule(name, begin, until, by=settings.by, why=why)
    print_outcome(Output(settings), outcome)


@command
@NAME
@WHY_REQUIRED
async def delete_schedule(settings: Settings, name: str, why: str) -> None:
    """Delete a schedule; the runs that it started continue."""
    async with operations(settings) as act:
        outcome = await act.delete_schedule(name, by=settings.by, why=why)
    print_outcome(Output(settings), outcome)


schedules = group(
    "List, show and change schedules.",
    list=list_schedules,
    show=show_schedule,
    pause=pause_schedule,
    resume=resume_schedule,
    trigger=trigger_schedule,
    backfill=backfill_schedule,
    delete=delete_schedule,
)
