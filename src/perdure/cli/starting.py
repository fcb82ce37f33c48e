"""Commands that create runs: start and import."""

import difflib
import json
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import IO, Any

import click

from perdure.cli.changes import WHY, print_outcome
from perdure.cli.connections import operations
from perdure.cli.context import Settings, command, message, option
from perdure.cli.failures import USAGE, Failure
from perdure.cli.formatting import printable
from perdure.cli.output import Output
from perdure.cli.payloads import hint_at_json, parse_options, parse_payload
from perdure.cli.watching import follow_run
from perdure.errors import InvalidPayload, UnknownWorkflow
from perdure.insights import Insights


@command
@click.argument("workflow")
@click.argument("payload", nargs=-1)
@option("--id", "run_id", metavar="ID", help="The id of the new run.")
@option("--tag", "tags", multiple=True, metavar="NAME=VALUE")
@WHY
@option("--wait", is_flag=True, help="Print what the run does until it ends.")
@option("--timeout", metavar="DURATION", help="With --wait: how long, such as 30s.")
async def start(
    settings: Settings,
    workflow: str,
    payload: tuple[str, ...],
    run_id: str | None,
    tags: tuple[str, ...],
    why: str,
    wait: bool,
    timeout: str | None,
) -> None:
    """Create a run, which a worker executes.

    The payload is JSON, or pairs: email=a@b.c count:=3. With --app it is checked first.
    """
    async with operations(settings) as act:
        if act.workflow_names:
            _check_known(workflow, act.workflow_names, settings.app)
        with _explaining_strings(payload):
            outcome = await act.start(
                workflow,
                parse_payload(payload),
                run_id=run_id,
                tags=parse_options(tags, "--tag"),
                by=settings.by,
                why=why,
            )
        print_outcome(Output(settings), outcome)
        answer = await Insights(act.store).why(outcome.run_id)
        if answer.situation == "no_worker":
            message(settings, printable(answer.sentence))
        if wait:
            await follow_run(settings, Insights(act.store), outcome.run_id, timeout)


def _check_known(workflow: str, names: Sequence[str], app: str | None) -> None:
    """Raise if the application does not have the workflow: no worker would ever claim the run."""
    if workflow not in names:
        close = difflib.get_close_matches(workflow, names, n=1)
        hint = f"did you mean {close[0]}?" if close else f"it has {', '.join(names)}"
        raise UnknownWorkflow(workflow, f"{app} has no workflow {workflow!r}; {hint}")


@contextmanager
def _explaining_strings(arguments: Sequence[str]) -> Generator[None, None, None]:
    """Add to the error of an invalid payload that `count=3` is a string."""
    try:
        yield
    except InvalidPayload as error:
        raise Failure(f"{error}{hint_at_json(arguments, error.errors)}", USAGE) from error


@command
@click.argument("file", type=click.File(encoding="utf-8"))
@option("--id", "run_id", metavar="ID", help="Use another id for the run.")
@WHY
async def import_run(settings: Settings, file: IO[str], run_id: str | None, why: str) -> None:
    """Create a run from an exported bundle; - reads it from stdin."""
    try:
        bundle: Any = json.load(file)
    except ValueError as error:
        raise click.UsageError(f"{file.name} is not a bundle: {error}") from error
    async with operations(settings) as act:
        outcome = await act.import_run(bundle, run_id=run_id, by=settings.by, why=why)
    print_outcome(Output(settings), outcome)
    message(settings, f"Recorded as {printable(settings.by)}.")
