"""Commands that change runs, schedules, queues and so on, each generated from a verb.

A verb for runs takes ids, ids from stdin, or all runs of a query.
"""

import asyncio
import sys
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import click
from msgspec import convert

from perdure.cli.connections import operations
from perdure.cli.context import Command, Settings, command, message, option
from perdure.cli.failures import REFUSED, USAGE, Failure, exit_code, explain
from perdure.cli.formatting import printable
from perdure.cli.output import Output, progress
from perdure.cli.payloads import parse_options, parse_payload, parse_rate
from perdure.cli.runs import PAGE, print_runs
from perdure.clock import SystemClock
from perdure.errors import PerdureError, StoreError
from perdure.insights import Insights
from perdure.insights.model import BulkProgress
from perdure.insights.words import count_words
from perdure.operations import Operations, Outcome
from perdure.operations.bulk import BulkVerb
from perdure.operations.verbs import VERBS, Field, Verb, parse_json, read_arguments
from perdure.runtime import requests

WHY = option("--why", default="", metavar="TEXT", help="The reason, which is recorded.")
WHY_REQUIRED = option("--why", required=True, metavar="TEXT", help="The reason, which is recorded.")
WHY_UNLESS_DRY_RUN = option(
    "--why",
    default="",
    metavar="TEXT",
    help="The reason, which is recorded; required without --dry-run.",
)

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
    """A verb with its arguments."""

    verb: Verb
    arguments: dict[str, Any]
    why: str


@dataclass(frozen=True, slots=True)
class BulkOptions:
    """The options of a verb for many runs."""

    where: str | None = None
    dry_run: bool = False
    rate: str | None = None
    limit: int = 1000
    every: bool = False
    yes: bool = False


def verb_command(name: str) -> Command:
    """Return the command of a verb."""
    verb = VERBS[name]
    # The name of a new object is the first word, like that of an existing one.
    fields = verb.fields if verb.has_target else verb.fields[1:]
    arguments = [field for field in fields if field.is_argument]

    async def run(settings: Settings, words: tuple[str, ...], why: str, **options: Any) -> None:
        names = BulkOptions.__slots__
        bulk = BulkOptions(**{each: options.pop(each) for each in names if each in options})
        ids, rest = _split(words, bulk.where, one=bool(arguments) or not verb.done)
        change = Change(verb, _read(fields, arguments, rest, options), why)
        if verb.needs_why:
            check_why(why, dry_run=bulk.dry_run)
        async with operations(settings) as act:
            if bulk.where is None:
                await _change_each(settings, act, change, ids, dry_run=bulk.dry_run)
            else:
                await _change_all(settings, act, change, bulk.where, bulk)

    run.__name__, run.__doc__ = verb.command.rpartition(" ")[2], verb.help
    options = [_option(field) for field in fields if not field.is_argument]
    for each in (
        *reversed(_OPTIONS if verb.done else ()),
        _why_option(verb),
        *reversed(options),
    ):
        run = each(run)
    return command(click.argument("words", nargs=-1, metavar=_usage(verb, arguments))(run))


def _why_option(verb: Verb) -> Any:
    if not verb.needs_why:
        return WHY
    return WHY_UNLESS_DRY_RUN if verb.done else WHY_REQUIRED


def check_why(why: str, *, dry_run: bool) -> None:
    """Raise unless there is a reason, or nothing is changed."""
    if not why and not dry_run:
        context = click.get_current_context()
        raise click.MissingParameter(ctx=context, param_hint="'--why'", param_type="option")


def _usage(verb: Verb, arguments: Sequence[Field]) -> str:
    name = "NAME" if verb.place not in ("runs", "workers") else "ID"
    many = "..." if verb.done and not arguments else ""
    return " ".join([name + many, *map(_metavar, arguments)])


def _metavar(field: Field) -> str:
    name = field.name.upper() if field.kind != "key" else "STEP"
    return (name if field.required else f"[{name}]") + ("..." if field.name == "payload" else "")


def _option(field: Field) -> Any:
    name = field.option or f"--{field.name.replace('_', '-')}"
    if field.kind == "flag":
        return option(f"{name}/--no-{field.name}", field.name, default=True, help=field.help)
    if field.choices:
        kind = click.Choice(field.choices)
        return option(name, field.name, type=kind, default=field.default, help=field.help)
    if field.kind == "values":
        return option(name, field.name, multiple=True, metavar="STEP=JSON", help=field.help)
    metavar = {"json": "JSON", "key": "STEP", "number": "N"}.get(field.kind, "NAME")
    return option(name, field.name, metavar=metavar, help=field.help)


def _split(
    words: tuple[str, ...], where: str | None, *, one: bool
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the ids and the words after them."""
    count = 0 if where is not None and one else 1 if one else len(words)
    ids, rest = words[:count], words[count:]
    if bool(ids) == (where is not None):
        raise click.UsageError("pass either ids, or - to read them from stdin, or --where QUERY")
    return ids, rest


def _read(
    fields: Sequence[Field],
    arguments: Sequence[Field],
    words: tuple[str, ...],
    options: dict[str, Any],
) -> dict[str, Any]:
    """Return the arguments of a verb from the words after the id, and from options."""
    texts: dict[str, str] = {}
    entered_values: dict[str, Any] = {}
    for field in arguments:
        if field.name == "payload" and (words or not field.required):
            entered_values[field.name], words = parse_payload(words), ()
        elif words:
            texts[field.name], words = words[0], words[1:]
        elif field.required:
            raise click.UsageError(f"{_metavar(field)} is missing")
    if words:
        raise click.UsageError(f"there are too many arguments: {' '.join(words)}")
    for field in fields:
        value = options.get(field.name)
        if field.kind == "flag" and value is not None:
            texts[field.name] = "yes" if value else "no"
        elif field.kind == "values" and value:
            pairs = parse_options(value, "--value")
            entered_values[field.name] = {
                step: parse_json(text, step) for step, text in pairs.items()
            }
        elif isinstance(value, str):
            texts[field.name] = value
    rest = [field for field in fields if field.name not in entered_values]
    return read_arguments(rest, texts, SystemClock().now()) | entered_values


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
            verb = getattr(act, change.verb.name)
            outcome = await verb(run_id, **change.arguments, by=settings.by, why=change.why)
        except PerdureError as error:
            if is_single or isinstance(error, StoreError):
                raise
            code = code or exit_code(error)
            click.echo(printable(f"{run_id}: {explain(error)}"), err=True)
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
    if change.verb.name == "delete":
        run = (await Insights(act.store).run(run_id)).run
        return f"{run_id}: {count_words(run.steps, 'record')} would be deleted."
    names, values = ("step", "at", "event", "wait"), ("value", "error", "payload")
    target = next((change.arguments[name] for name in names if name in change.arguments), None)
    value = next((change.arguments[name] for name in values if name in change.arguments), None)
    verb = cast(requests.Verb, change.verb.name)
    preview = await act.preview(run_id, verb, target, value)
    return f"{run_id}: {preview.sentence or 'no record would be dropped.'}"


def _sentence(sentence: str) -> Iterator[str]:
    yield printable(sentence)


def print_outcome(output: Output, outcome: Outcome) -> None:
    """Print what a verb did."""
    is_named = not outcome.run_id or outcome.run_id in outcome.sentence
    name = "" if is_named else f"{outcome.run_id}: "
    output.answer(outcome, partial(_sentence, f"{name}{outcome.sentence}"), [outcome.run_id])


async def _change_all(
    settings: Settings, act: Operations, change: Change, query: str, bulk: BulkOptions
) -> None:
    rate, limit = parse_rate(bulk.rate), None if bulk.every else bulk.limit
    match = await act.count_bulk(query, limit)
    if bulk.dry_run or not match.count:
        print_runs(settings, await Insights(act.store).runs(query, limit=PAGE))
        message(settings, f"{_matches(match.count)}. Nothing was changed.")
        return
    if match.capped:
        raise Failure(f"more than {bulk.limit:,} runs match: pass --limit N or --all", REFUSED)
    _confirm(change, match.count, yes=bulk.yes)
    steps = act.bulk(
        query,
        cast(BulkVerb, change.verb.name),
        rate=rate,
        limit=limit,
        by=settings.by,
        why=change.why,
        **change.arguments,
    )
    await follow(settings, steps, change.verb.done)


def _matches(count: int) -> str:
    return f"{count_words(count, 'run')} {'matches' if count == 1 else 'match'}"


def _confirm(change: Change, count: int, *, yes: bool) -> None:
    verb = change.verb.command.replace("-", " ").capitalize()
    question = f"{_matches(count)}. {verb} {'it' if count == 1 else 'them'}?"
    if yes:
        return
    if not sys.stdin.isatty():
        raise Failure(f"{question} Pass --yes to do it, or --dry-run to see them", USAGE)
    if not click.confirm(question, err=True):
        raise Failure("nothing was changed")


async def follow(settings: Settings, steps: AsyncGenerator[BulkProgress, None], done: str) -> None:
    """Show the progress of a bulk operation until it ends; after Ctrl-C it can be continued."""
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
        # Without the fields that only the process that works on it needs.
        _finish(settings, convert(last, BulkProgress, from_attributes=True), done)


def _finish(settings: Settings, last: BulkProgress, done: str) -> None:
    summary = f"{last.done:,} {done}, {last.refused:,} refused."
    Output(settings).answer(last, partial(_sentence, summary), [last.id])
    for reason in last.reasons:
        message(settings, printable(reason))
    if last.refused:
        raise click.exceptions.Exit(REFUSED)
