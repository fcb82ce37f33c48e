"""Commands that change runs: one verb for ids, for ids from stdin, or for all runs of a query."""

import asyncio
import inspect
import sys
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, cast

import click
from msgspec import convert

from perdure.cli.connections import operations
from perdure.cli.context import Command, Settings, command, message, option
from perdure.cli.failures import REFUSED, USAGE, Failure, exit_code
from perdure.cli.formatting import printable
from perdure.cli.output import Output, progress
from perdure.cli.payloads import parse_json, parse_payload, parse_rate
from perdure.cli.runs import PAGE, print_runs
from perdure.errors import PerdureError, StoreError
from perdure.insights import Insights
from perdure.insights.model import BulkProgress
from perdure.insights.words import count_words
from perdure.operations import Operations, Outcome
from perdure.operations.bulk import BulkVerb
from perdure.runtime.requests import Verb

Reader: TypeAlias = Callable[..., dict[str, Any]]
"""Turns the words after an id, and the options of a command, into arguments of its verb."""

WHY = option("--why", default="", metavar="TEXT", help="The reason, which is recorded.")
WHY_REQUIRED = option("--why", required=True, metavar="TEXT", help="The reason, which is recorded.")

_OPTIONS = (
    option(
        "--where", metavar="QUERY", help="Change all runs that match this query, instead of ids."
    ),
    option("--dry-run", is_flag=True, help="Only show what would happen."),
    option("--rate", metavar="10/s", help="With --where: how many runs to change per second."),
    option(
        "--limit",
        type=click.IntRange(1),
        default=1000,
        help="With --where: refuse if more runs match.",
    ),
    option("--all", "every", is_flag=True, help="With --where: without a limit."),
    option("-y", "--yes", is_flag=True, help="With --where: do not ask for confirmation."),
)


@dataclass(frozen=True, slots=True)
class Change:
    """A verb with its arguments, and how it is called when it is done."""

    verb: str
    done: str
    arguments: dict[str, Any]
    why: str


@dataclass(frozen=True, slots=True)
class BulkOptions:
    """The options of a change with `--where`."""

    dry_run: bool
    rate: str | None
    limit: int
    every: bool
    yes: bool


def change(
    done: str, usage: str = "", *, verb: str = "", needs_why: bool = False
) -> Callable[[Reader], Command]:
    """Make a command of a function that reads the words after the id, which `usage` names."""

    def decorate(read: Reader) -> Command:
        async def run(
            settings: Settings,
            words: tuple[str, ...],
            where: str | None,
            why: str,
            **options: Any,
        ) -> None:
            bulk = BulkOptions(**{name: options.pop(name) for name in BulkOptions.__slots__})
            ids, rest = _split(words, where, has_arguments=bool(usage))
            arguments = _arguments(read, rest, options)
            intended = Change(verb or read.__name__, done, arguments, why)
            async with operations(settings) as act:
                if where is None:
                    await _change_each(settings, act, intended, ids, dry_run=bulk.dry_run)
                else:
                    await _change_all(settings, act, intended, where, bulk)

        run.__name__, run.__doc__ = read.__name__, read.__doc__
        run.__dict__.update(read.__dict__)
        for each in (*reversed(_OPTIONS), WHY_REQUIRED if needs_why else WHY):
            run = each(run)
        metavar = f"ID {usage}" if usage else "ID..."
        return command(click.argument("words", nargs=-1, metavar=metavar)(run))

    return decorate


def _split(
    words: tuple[str, ...], where: str | None, *, has_arguments: bool
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the ids and the words after them."""
    ids, rest = (words[:1], words[1:]) if has_arguments else (words, ())
    if where is not None:
        ids, rest = ((), words) if has_arguments else (words, ())
    if bool(ids) == (where is not None):
        raise click.UsageError("pass either ids, or - to read them from stdin, or --where QUERY")
    return ids, rest


def _arguments(read: Reader, rest: tuple[str, ...], options: dict[str, Any]) -> dict[str, Any]:
    try:
        inspect.signature(read).bind(*rest, **options)
    except TypeError as error:
        raise click.UsageError(f"wrong number of arguments ({error})") from error
    return read(*rest, **options)


def _each_id(ids: tuple[str, ...]) -> Iterator[str]:
    for run_id in ids:
        if run_id == "-":
            yield from filter(None, (line.rstrip("\r\n") for line in sys.stdin))
        else:
            yield run_id


async def _change_each(
    settings: Settings, act: Operations, change: Change, ids: tuple[str, ...], *, dry_run: bool
) -> None:
    output = Output(settings)
    outcomes: list[Outcome] = []
    code, is_single = 0, len(ids) == 1 and ids[0] != "-"
    for run_id in _each_id(ids):
        try:
            if dry_run:
                sentence = await _preview(act, change, run_id)
                output.answer({"sentence": sentence}, partial(_sentence, sentence), [run_id])
                continue
            verb = getattr(act, change.verb)
            outcome = await verb(run_id, **change.arguments, by=settings.by, why=change.why)
        except PerdureError as error:
            if is_single or isinstance(error, StoreError):
                raise
            code = code or exit_code(error)
            click.echo(printable(f"{run_id}: {error}"), err=True)
        else:
            outcomes.append(outcome)
            if output.format != "json":
                print_outcome(output, outcome)
    if output.format == "json" and not dry_run:
        output.json(outcomes[0] if is_single else outcomes)
    if outcomes:
        message(settings, f"Recorded as {printable(settings.by)}.")
    if code:
        raise click.exceptions.Exit(code)


async def _preview(act: Operations, change: Change, run_id: str) -> str:
    if change.verb == "delete":
        run = (await Insights(act.store).run(run_id)).run
        return f"{run_id}: {count_words(run.steps, 'record')} would be deleted."
    names, values = ("step", "at", "event", "wait"), ("value", "error", "payload")
    target = next((change.arguments[name] for name in names if name in change.arguments), None)
    value = next((change.arguments[name] for name in values if name in change.arguments), None)
    preview = await act.preview(run_id, cast(Verb, change.verb), target, value)
    return f"{run_id}: {preview.sentence or 'no record would be dropped.'}"


def _sentence(sentence: str) -> Iterator[str]:
    yield printable(sentence)


def print_outcome(output: Output, outcome: Outcome) -> None:
    """Print what a verb did."""
    is_named = not outcome.run_id or outcome.run_id in outcome.sentence
    name = "" if is_named else f"{outcome.run_id}: "
    output.answer(outcome, partial(_sentence, f"{name}{outcome.sentence}"), [outcome.run_id])


async def _change_all(
    settings: Settings, act: Operations, change: Change, where: str, bulk: BulkOptions
) -> None:
    rate, limit = parse_rate(bulk.rate), None if bulk.every else bulk.limit
    matched = await act.count_bulk(where, limit)
    if bulk.dry_run or not matched.count:
        print_runs(settings, await Insights(act.store).runs(where, limit=PAGE))
        message(settings, f"{_matches(matched.count)}. Nothing was changed.")
        return
    if matched.capped:
        raise Failure(f"more than {bulk.limit:,} runs match: pass --limit N or --all", REFUSED)
    _confirm(change, matched.count, yes=bulk.yes)
    steps = act.bulk(
        where,
        cast(BulkVerb, change.verb),
        rate=rate,
        limit=limit,
        by=settings.by,
        why=change.why,
        **change.arguments,
    )
    await follow(settings, steps, change.done)


def _matches(count: int) -> str:
    return f"{count_words(count, 'run')} {'matches' if count == 1 else 'match'}"


def _confirm(change: Change, count: int, *, yes: bool) -> None:
    verb = change.verb.replace("_", " ").capitalize()
    question = f"{_matches(count)}. {verb} {'it' if count == 1 else 'them'}?"
    if yes:
        return
    if not sys.stdin.isatty():
        raise Failure(f"{question} Pass --yes to do it, or --dry-run to see them", USAGE)
    if not click.confirm(question, err=True):
        raise click.Abort


async def follow(settings: Settings, steps: AsyncGenerator[BulkProgress, None], done: str) -> None:
    """Show the progress of a bulk operation until it ends; Ctrl-C leaves it to be continued."""
    last: BulkProgress | None = None
    try:
        with progress("Working") as show:
            async for each in steps:
                last = each
                show(each.done + each.refused, each.matched)
    except asyncio.CancelledError:
        if last is not None:
            text = f"Stopped at {last.done + last.refused:,} of {last.matched or 0:,}."
            message(settings, f"{text} Continue with: perdure bulk resume {last.id}")
        raise
    if last is not None:
        # Without what only the process that works on it needs to know.
        _finish(settings, convert(last, BulkProgress, from_attributes=True), done)


def _finish(settings: Settings, last: BulkProgress, done: str) -> None:
    summary = f"{last.done:,} {done}, {last.refused:,} refused."
    Output(settings).answer(last, partial(_sentence, summary), [last.id])
    for reason in last.reasons:
        message(settings, printable(reason))
    if last.refused:
        raise click.exceptions.Exit(REFUSED)


@change("cancelled")
@option("--no-undo", is_flag=True, help="Do not undo steps; end a rollback that has begun.")
def cancel(no_undo: bool) -> dict[str, Any]:
    """Cancel runs; steps that can be undone are undone first."""
    return {"undo": not no_undo}


@change("retried")
def retry() -> dict[str, Any]:
    """Continue failed runs; the steps that ended them run again."""
    return {}


@change("woken")
@option("--wait", metavar="NAME", help="The sleep or wait to end, if there are several.")
def wake(wait: str | None) -> dict[str, Any]:
    """End a sleep now, or let a wait time out."""
    return {"wait": wait}


@change("paused")
def pause() -> dict[str, Any]:
    """Hold runs: they begin no step until they are resumed."""
    return {}


@change("resumed", verb="unpause")
def resume() -> dict[str, Any]:
    """Let paused runs continue."""
    return {}


@change("signalled", "EVENT [PAYLOAD]...")
@option("--dedup-id", metavar="ID", help="A second signal with this id is ignored.")
def signal(event: str, *payload: str, dedup_id: str | None) -> dict[str, Any]:
    """Send an event to a run.

    The payload is JSON, or pairs: by=ana count:=3.
    """
    arguments = {"event": event, "payload": parse_payload(payload)}
    return arguments if dedup_id is None else {**arguments, "dedup_id": dedup_id}


@change("completed", "STEP VALUE", needs_why=True)
def complete_step(step: str, value: str) -> dict[str, Any]:
    """Record a value for a step: JSON, such as '"parcel 7"'."""
    return {"step": step, "value": parse_json(value, "VALUE")}


@change("skipped", "STEP", needs_why=True)
def skip_step(step: str) -> dict[str, Any]:
    """Record a step as completed with null."""
    return {"step": step}


@change("failed", "STEP ERROR", needs_why=True)
def fail_step(step: str, error: str) -> dict[str, Any]:
    """Record a step as failed with a message, which the function sees as an exception."""
    return {"step": step, "error": error}


@change("retried", "STEP", needs_why=True)
def retry_step(step: str) -> dict[str, Any]:
    """Let a failed step run again: its record is dropped."""
    return {"step": step}


@change("rewound", "STEP", needs_why=True)
def rewind(step: str) -> dict[str, Any]:
    """Let a step and all later ones run again: their records are dropped."""
    return {"at": step}


@change("edited", "PAYLOAD...", needs_why=True)
def edit_payload(*payload: str) -> dict[str, Any]:
    """Replace the input of a new run: one that has no records yet."""
    return {"payload": parse_payload(payload)}


@change("deleted", needs_why=True)
def delete() -> dict[str, Any]:
    """Delete runs and everything that belongs to them."""
    return {}
