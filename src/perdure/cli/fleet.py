"""Commands about workflows, queues, workers and bulk operations."""

from collections.abc import Iterator
from functools import partial

import click

from perdure.cli.changes import WHY, follow, print_outcome
from perdure.cli.connections import insights, operations
from perdure.cli.context import Settings, command, group
from perdure.cli.failures import NOT_FOUND, Failure
from perdure.cli.output import Column, Output, describe, duration
from perdure.insights.model import BulkProgress, QueueRow, WorkerRow, WorkflowRow
from perdure.insights.words import tally_words

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


def _state(row: WorkflowRow) -> str:
    return f"paused {row.paused_reason}".strip() if row.paused else ""


def _show(settings: Settings, answer: object | None, name: str, id: str) -> None:
    if answer is None:
        raise Failure(f"there is no {name}", NOT_FOUND)
    Output(settings).answer(answer, lambda: describe(answer), [id])


@command
@click.argument("name")
async def show_workflow(settings: Settings, name: str) -> None:
    """Show one workflow: versions, workers, durations of its steps."""
    async with insights(settings) as ask:
        _show(settings, await ask.workflow(name), f"workflow {name!r}", name)


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
        Column("QUEUE", lambda row: row.name),
        Column("DUE", lambda row: f"{row.due:,}"),
        Column("RUNNING", lambda row: f"{row.leased:,}"),
        Column("OLDEST", lambda row: output.time(row.oldest_due)),
    ]
    output.rows(answer, answer, columns, (row.name for row in answer))


@command
@click.argument("name")
async def show_queue(settings: Settings, name: str) -> None:
    """Show one queue."""
    async with insights(settings) as ask:
        row = next((row for row in await ask.queues() if row.name == name), None)
    _show(settings, row, f"queue {name!r} with due or running runs", name)


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
        _show(settings, await ask.worker(worker_id), f"worker {worker_id!r}", worker_id)


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
        _show(settings, await ask.bulk(bulk_id), f"bulk operation {bulk_id!r}", bulk_id)


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
queues = group("List and show queues.", list=list_queues, show=show_queue)
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
