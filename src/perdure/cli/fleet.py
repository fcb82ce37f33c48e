"""Commands about workflows, queues, workers and bulk operations."""

from collections.abc import Iterator
from functools import partial
from typing import get_args

import click

from perdure.cli.changes import WHY, follow, print_outcome
from perdure.cli.connections import insights, operations
from perdure.cli.context import Settings, command, group, option
from perdure.cli.description import describe
from perdure.cli.failures import NOT_FOUND, Failure
from perdure.cli.output import Column, Output, duration
from perdure.insights.model import (
    BulkProgress,
    LimitRow,
    QueueRow,
    Tally,
    WorkerRow,
    WorkflowRow,
)
from perdure.insights.words import tally_words
from perdure.limits import LimitOf

COUNTED = ("queued", "running", "suspended", "waiting", "failed", "completed")


@command
async def list_workflows(settings: Settings) -> None:
    """List the workflows that have runs, or that a worker knows."""
    async with insights(settings) as ask:
        answer = await ask.workflows()
    columns: list[Column[WorkflowRow]] = [
        Column("WORKFLOW", lambda row: row.name),
        *(Column(status.upper(), partial(_count, status)) for status in COUNTED),
        Column("P95", _p95),
        Column("WORKERS", lambda row: f"{len(row.workers):,}"),
        Column("STATE", _state),
    ]
    Output(settings).rows(answer, answer, columns, (row.name for row in answer))


def _count(status: str, row: WorkflowRow) -> str:
    return tally_words(row.counts.get(status))


def _p95(row: WorkflowRow) -> str:
    p95 = row.durations and row.durations.p95
    return duration(p95) if p95 else ""


def _state(row: WorkflowRow | QueueRow) -> str:
    return f"paused {row.paused_reason}".strip() if row.paused else ""


def show_answer(settings: Settings, answer: object | None, name: str, id: str) -> None:
    """Print what was asked for, or end with the code for what does not exist."""
    if answer is None:
        raise Failure(f"there is no {name}", NOT_FOUND)
    output = Output(settings)
    output.answer(answer, lambda: describe(output, answer), [id])


@command
@click.argument("name")
async def show_workflow(settings: Settings, name: str) -> None:
    """Show one workflow: versions, workers, durations of its steps."""
    async with insights(settings) as ask:
        show_answer(settings, await ask.workflow(name), f"workflow {name!r}", name)


@command
@click.argument("name")
@WHY
async def pause_workflow(settings: Settings, name: str, why: str) -> None:
    """Stop workers from continuing runs of a workflow; it takes effect within 10 seconds."""
    async with operations(settings) as act:
        outcome = await act.pause_workflow(name, by=settings.by, why=why)
    print_outcome(Output(settings), outcome)


@command
@click.argument("name")
@WHY
async def resume_workflow(settings: Settings, name: str, why: str) -> None:
    """Let workers continue runs of a workflow again."""
    async with operations(settings) as act:
        outcome = await act.unpause_workflow(name, by=settings.by, why=why)
    print_outcome(Output(settings), outcome)


@command
async def list_queues(settings: Settings) -> None:
    """List the queues with due or running runs."""
    async with insights(settings) as ask:
        answer = await ask.queues()
    output = Output(settings)
    columns: list[Column[QueueRow]] = [
        Column("QUEUE", lambda row: row.name or "(none)"),
        Column("DUE", lambda row: tally_words(Tally(row.due, row.capped))),
        Column("RUNNING", lambda row: f"{row.leased:,}"),
        Column("OLDEST", lambda row: output.time(row.oldest_due)),
        Column("LIMITS", lambda row: ", ".join(map(_limit, row.limits))),
        Column("STATE", _state),
    ]
    output.rows(answer, answer, columns, (row.name for row in answer))


def _limit(row: LimitRow) -> str:
    """Return a limit as `concurrency 2/50` or `key_rate 10 per 60 s`."""
    used = f"{row.n:,}" if row.in_use is None else f"{row.in_use:,}/{row.n:,}"
    per = "" if row.per is None else f" per {row.per:g} s"
    return f"{row.of} {used}{per}"


@command
@click.argument("name")
async def show_queue(settings: Settings, name: str) -> None:
    """Show one queue: its limits, and the keys with due or running runs."""
    async with insights(settings) as ask:
        show_answer(
            settings, await ask.queue(name), f"queue {name!r} with due or running runs", name
        )


@command
@click.argument("name")
@WHY
async def pause_queue(settings: Settings, name: str, why: str) -> None:
    """Stop workers from claiming runs of a queue; it takes effect within 10 seconds."""
    async with operations(settings) as act:
        outcome = await act.pause_queue(name, by=settings.by, why=why)
    print_outcome(Output(settings), outcome)


@command
@click.argument("name")
@WHY
async def resume_queue(settings: Settings, name: str, why: str) -> None:
    """Let workers claim runs of a queue again."""
    async with operations(settings) as act:
        outcome = await act.unpause_queue(name, by=settings.by, why=why)
    print_outcome(Output(settings), outcome)


@command
@click.argument("name")
@click.argument("n", required=False, type=click.IntRange(1))
@option(
    "--of", type=click.Choice(get_args(LimitOf)), default="concurrency", help="What is limited."
)
@WHY
async def limit_queue(settings: Settings, name: str, n: int | None, of: LimitOf, why: str) -> None:
    """Override a limit; without N, return to the declared one.

    It takes effect within 10 seconds. With --of steps, NAME is that of a Limit.
    """
    async with operations(settings) as act:
        outcome = await act.set_limit(name, n, of=of, by=settings.by, why=why)
    print_outcome(Output(settings), outcome)


@command
async def list_limits(settings: Settings) -> None:
    """List the limits of queues and steps that live workers declare."""
    async with insights(settings) as ask:
        answer = await ask.limits()
    columns: list[Column[LimitRow]] = [
        Column("NAME", lambda row: row.name),
        Column("LIMIT", _limit),
        Column("DECLARED", lambda row: f"{row.declared:,}"),
    ]
    Output(settings).rows(answer, answer, columns, (row.name for row in answer))


@command
async def list_workers(settings: Settings) -> None:
    """List the workers that are alive, and those lost within a day."""
    async with insights(settings) as ask:
        answer = await ask.workers()
    output = Output(settings)
    columns: list[Column[WorkerRow]] = [
        Column("WORKER", lambda row: row.id),
        Column("STATE", lambda row: row.state),
        Column("HOST", lambda row: f"{row.host}:{row.pid}"),
        Column("SLOTS", lambda row: f"{row.running:,}/{row.slots:,}"),
        Column("STARTED", lambda row: output.time(row.started_at)),
        Column("SEEN", lambda row: output.time(row.seen_at)),
        Column("WORKFLOWS", lambda row: ", ".join(_versions(row))),
    ]
    output.rows(answer, answer, columns, (row.id for row in answer))


def _versions(worker: WorkerRow) -> Iterator[str]:
    for each in worker.workflows:
        last = "" if each.first == each.last else f"–{each.last}"
        yield f"{each.workflow} v{each.first}{last}"


@command
@click.argument("worker_id", metavar="ID")
async def show_worker(settings: Settings, worker_id: str) -> None:
    """Show one worker and the steps it is executing, the longest first."""
    async with insights(settings) as ask:
        show_answer(settings, await ask.worker(worker_id), f"worker {worker_id!r}", worker_id)


@command
@click.argument("worker_id", metavar="ID")
@WHY
async def drain_worker(settings: Settings, worker_id: str, why: str) -> None:
    """Let a worker finish its runs and stop; it takes effect within 10 seconds."""
    async with operations(settings) as act:
        outcome = await act.drain_worker(worker_id, by=settings.by, why=why)
    print_outcome(Output(settings), outcome)


@command
async def list_bulks(settings: Settings) -> None:
    """List the bulk operations."""
    async with insights(settings) as ask:
        answer = await ask.bulks()
    output = Output(settings)
    columns: list[Column[BulkProgress]] = [
        Column("ID", lambda row: row.id),
        Column("VERB", lambda row: row.verb),
        Column("QUERY", lambda row: row.query),
        Column("STATE", lambda row: row.state),
        Column("DONE", lambda row: f"{row.done:,}"),
        Column("REFUSED", lambda row: f"{row.refused:,}"),
        Column("BY", lambda row: row.by),
        Column("BEGAN", lambda row: output.time(row.began_at)),
    ]
    output.rows(answer, answer, columns, (row.id for row in answer))


@command
@click.argument("bulk_id", metavar="ID")
async def show_bulk(settings: Settings, bulk_id: str) -> None:
    """Show the progress of a bulk operation."""
    async with insights(settings) as ask:
        show_answer(settings, await ask.bulk(bulk_id), f"bulk operation {bulk_id!r}", bulk_id)


@command
@click.argument("bulk_id", metavar="ID")
@WHY
async def stop_bulk(settings: Settings, bulk_id: str, why: str) -> None:
    """Stop a bulk operation; what it has done stays done."""
    async with operations(settings) as act:
        await act.stop_bulk(bulk_id, by=settings.by, why=why)


@command
@click.argument("bulk_id", metavar="ID")
@WHY
async def resume_bulk(settings: Settings, bulk_id: str, why: str) -> None:
    """Continue a bulk operation that was stopped, or whose process died."""
    async with operations(settings) as act:
        await follow(settings, act.resume_bulk(bulk_id, by=settings.by, why=why), "done")


workflows = group(
    "List, show, pause and resume workflows.",
    list=list_workflows,
    show=show_workflow,
    pause=pause_workflow,
    resume=resume_workflow,
)
queues = group(
    "List, show, pause and resume queues, and change limits.",
    list=list_queues,
    show=show_queue,
    pause=pause_queue,
    resume=resume_queue,
    limit=limit_queue,
    limits=list_limits,
)
workers = group(
    "List, show and drain workers.", list=list_workers, show=show_worker, drain=drain_worker
)
bulk = group(
    "List, show, stop and resume bulk operations.",
    list=list_bulks,
    show=show_bulk,
    stop=stop_bulk,
    resume=resume_bulk,
)
