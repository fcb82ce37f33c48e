"""Commands that read: lists of runs, errors, the agenda, and single answers."""

import json
from collections.abc import Iterator
from shlex import quote

import click

from perdure.cli.connections import insights
from perdure.cli.context import Settings, command, message, option
from perdure.cli.formatting import printable
from perdure.cli.output import Column, Output
from perdure.insights.model import (
    Act,
    Agenda,
    Comparison,
    Difference,
    ErrorGroup,
    Json,
    RunRow,
    RunsPage,
)
from perdure.insights.words import count_words

PAGE = 50
SCHEDULES = "~schedule:"
"""What the ids of the runs of schedules begin with."""

LIMIT = option("-n", "--limit", type=click.IntRange(1, 1000), default=PAGE, show_default=True)
AFTER = option("--after", metavar="CURSOR", help="Continue after the page with this cursor.")


def _detail(output: Output, run: RunRow) -> str:
    """Return what matters about a run in its status."""
    if run.error or run.reason:
        return run.error or run.reason
    if run.status == "running":
        return f"on {run.worker}" if run.worker else ""
    if run.questions:
        return "asks: " + " ".join(run.questions)
    if run.waits_for:
        return f"for {run.waits_for}"
    return f"wakes {output.time(run.wake_at)}" if run.wake_at and run.status == "suspended" else ""


def run_columns(output: Output) -> list[Column[RunRow]]:
    """Return the columns of a list of runs."""
    return [
        Column("ID", lambda run: run.id),
        Column("WORKFLOW", lambda run: f"{run.workflow or ''} v{run.version}", is_minor=True),
        Column("STATUS", lambda run: output.status(run.status), is_status=True),
        Column("UPDATED", lambda run: output.time(run.updated_at), is_minor=True),
        Column("STEPS", lambda run: f"{run.steps:,}", is_minor=True),
        Column("DETAIL", lambda run: _detail(output, run)),
    ]


def print_runs(settings: Settings, page: RunsPage) -> None:
    """Print one page of runs, and on stderr what is not on it."""
    output = Output(settings)
    ids = (run.id for run in page.runs)
    output.rows(page, page.runs, run_columns(output), ids, if_empty="")
    if page.searched_until is not None:
        until = f"{page.searched_until:%Y-%m-%d %H:%M} UTC"
        message(settings, f"Looked at {count_words(page.examined, 'run')}, back to {until}.")
    if page.cursor is not None:
        message(settings, f"There are more: --after {quote(page.cursor)}")
    elif not page.runs and page.searched_until is None:
        message(settings, "No runs match.")


@command
@click.argument("query", nargs=-1)
@LIMIT
@AFTER
async def list_runs(
    settings: Settings, query: tuple[str, ...], limit: int, after: str | None
) -> None:
    """List the runs that match a query (ls).

    A query is words like status:failed workflow:order tag:customer=acme since:24h; a bare word is
    the beginning of an id. The newest runs come first.
    """
    async with insights(settings) as ask:
        page = await ask.runs(" ".join(query), limit=limit, after=after)
    print_runs(settings, page)


@command
@click.argument("run_id", metavar="ID")
async def why(settings: Settings, run_id: str) -> None:
    """Say in one sentence why a run is where it is."""
    async with insights(settings) as ask:
        answer = await ask.why(run_id)
    Output(settings).answer(answer, lambda: [printable(answer.sentence)], [run_id])


@command
@option("--window", default="24h", show_default=True, help="How far to look back.")
async def errors(settings: Settings, window: str) -> None:
    """Group the failed runs by error.

    The last column is a query that finds the runs of a group, for `perdure retry --where`.
    """
    async with insights(settings) as ask:
        answer = await ask.errors(window)
    output = Output(settings)
    columns: list[Column[ErrorGroup]] = [
        Column("RUNS", lambda group: f"{group.count:,}"),
        Column("WORKFLOW", lambda group: group.workflow),
        Column("STEP", lambda group: group.step),
        Column("ERROR", lambda group: f"{group.type}: {group.message}"),
        Column("LAST", lambda group: output.time(group.last_at)),
        Column("QUERY", lambda group: group.query, is_whole=True),
    ]
    ids = (run_id for group in answer.groups for run_id in group.run_ids)
    output.rows(answer, answer.groups, columns, ids, if_empty="")
    if not answer.is_complete:
        message(settings, f"Only the newest {answer.examined:,} failures were examined.")
    elif not answer.groups:
        message(settings, f"No failures in the last {window}.")


@command
@option("--hours", type=click.IntRange(1, 24 * 31), default=24, show_default=True)
async def agenda(settings: Settings, hours: int) -> None:
    """Show what wakes next, and what runs wait for."""
    async with insights(settings) as ask:
        answer = await ask.agenda(hours)
    output = Output(settings)
    output.answer(answer, lambda: _agenda_lines(output, answer), (run.id for run in answer.next))
    if not answer.is_complete:
        message(settings, f"Only {count_words(answer.examined, 'run')} were examined.")


def _agenda_lines(output: Output, agenda: Agenda) -> Iterator[str]:
    if not agenda.next and not agenda.events:
        yield "Nothing is scheduled."
    for run in agenda.next:
        name = f"{run.id}  {run.workflow or ''}"
        if run.id.startswith(SCHEDULES):
            name = f"schedule {run.id.removeprefix(SCHEDULES)}"
        yield f"{output.time(run.wake_at):<22}  {printable(name)}"
    for event in agenda.events:
        since = output.time(event.oldest_at)
        name = printable(event.event)
        yield f'{count_words(event.count, "run")} waiting for "{name}", the first since {since}'


@command
@click.argument("left")
@click.argument("right")
async def compare(settings: Settings, left: str, right: str) -> None:
    """Show how two runs differ: in their input, and step by step."""
    async with insights(settings) as ask:
        answer = await ask.compare(left, right)
    Output(settings).answer(answer, lambda: _comparison_lines(answer), [left, right])


def _comparison_lines(answer: Comparison) -> Iterator[str]:
    if not answer.payload and not answer.steps:
        yield "The runs have the same input and the same steps."
    for title, differences in (("Input", answer.payload), ("Steps", answer.steps)):
        if differences:
            yield title
        for difference in differences:
            yield f"  {printable(_difference(difference))}"


def _difference(difference: Difference) -> str:
    match difference.kind:
        case "only_left":
            return f"- {difference.where}: {_json(difference.left)}"
        case "only_right":
            return f"+ {difference.where}: {_json(difference.right)}"
        case "changed":
            return f"~ {difference.where}: {_json(difference.left)} → {_json(difference.right)}"


def _json(value: Json) -> str:
    return json.dumps(value, ensure_ascii=False)


@command
@click.argument("query", nargs=-1)
@LIMIT
@AFTER
async def acts(settings: Settings, query: tuple[str, ...], limit: int, after: str | None) -> None:
    """List what operators did: who, what, which run and why."""
    async with insights(settings) as ask:
        answer = await ask.acts(" ".join(query), limit=limit, after=after)
    output = Output(settings)
    columns: list[Column[Act]] = [
        Column("WHEN", lambda act: output.time(act.at)),
        Column("BY", lambda act: act.by),
        Column("VERB", lambda act: act.verb),
        Column("RUN", lambda act: act.run_id),
        Column("STEP", lambda act: act.step),
        Column("WHY", lambda act: (act.refused and f"refused: {act.refused}") or act.why),
    ]
    output.rows(answer, answer.acts, columns, (act.run_id for act in answer.acts if act.run_id))
    if answer.cursor is not None:
        message(settings, f"There are more: --after {quote(answer.cursor)}")


@command
@click.argument("run_id", metavar="ID")
@option("--reveal", is_flag=True, help="Include redacted values.")
async def export(settings: Settings, run_id: str, reveal: bool) -> None:
    """Print a run as a bundle that can be imported elsewhere."""
    async with insights(settings, reveal=reveal) as ask:
        bundle = await ask.export(run_id)
    Output(settings).json(bundle)
