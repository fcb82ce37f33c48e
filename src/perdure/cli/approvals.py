"""Commands that list approvals and answer them."""

from shlex import quote
from typing import Any

import click

from perdure.cli.changes import print_outcome
from perdure.cli.connections import insights, operations
from perdure.cli.context import Settings, command, message, option
from perdure.cli.formatting import printable
from perdure.cli.output import Column, Output
from perdure.cli.payloads import parse_json, parse_payload
from perdure.cli.runs import AFTER, LIMIT
from perdure.insights.model import ApprovalRow

ID = click.argument("run_id", metavar="ID")
WAIT = option("--wait", metavar="NAME", help="What to answer, if the run asks several questions.")
NOTE = option("--why", default="", metavar="TEXT", help="A note, which is recorded.")


@command
@option("--to", metavar="NAME", help="Only those that ask this person or group.")
@LIMIT
@AFTER
async def approvals(settings: Settings, to: str | None, limit: int, after: str | None) -> None:
    """List the approvals that runs wait for.

    Those of the newest runs come first. `perdure approve ID` and `perdure reject ID` answer one.
    """
    async with insights(settings) as ask:
        page = await ask.approvals(to, limit, after)
    output = Output(settings)
    columns: list[Column[ApprovalRow]] = [
        Column("RUN", lambda row: row.run_id),
        Column("WAIT", lambda row: row.wait),
        Column("TO", lambda row: row.to),
        Column("QUESTION", lambda row: row.question),
        Column("OPTIONS", lambda row: ", ".join(row.options), is_minor=True),
        Column("SINCE", lambda row: output.time(row.since)),
        Column("EXPIRES", lambda row: output.time(row.expires_at), is_minor=True),
    ]
    output.rows(page, page.approvals, columns, (row.run_id for row in page.approvals))
    if page.cursor is not None:
        message(settings, f"There are more: --after {quote(page.cursor)}")
    elif not page.approvals:
        message(settings, "No run waits for an approval.")


async def _answer(settings: Settings, verb: str, run_id: str, **arguments: Any) -> None:
    async with operations(settings) as act:
        outcome = await getattr(act, verb)(run_id, **arguments, by=settings.by)
    print_outcome(Output(settings), outcome)
    message(settings, f"Recorded as {printable(settings.by)}.")


@command
@ID
@WAIT
@option("--choice", metavar="OPTION", help="The option that is chosen.")
@option("--value", metavar="JSON", help="A value to pass to the run with the answer.")
@NOTE
async def approve(
    settings: Settings,
    run_id: str,
    wait: str | None,
    choice: str | None,
    value: str | None,
    why: str,
) -> None:
    """Approve what a run asks for.

    ID is the id of the run, or a token. The first answer counts.
    """
    given = None if value is None else parse_json(value, "--value")
    await _answer(settings, "approve", run_id, wait=wait, choice=choice, value=given, why=why)


@command
@ID
@WAIT
@NOTE
async def reject(settings: Settings, run_id: str, wait: str | None, why: str) -> None:
    """Reject what a run asks for.

    ID is the id of the run, or a token. The first answer counts.
    """
    await _answer(settings, "reject", run_id, wait=wait, why=why)


@command
@ID
@click.argument("payload", nargs=-1)
@WAIT
@NOTE
async def answer(
    settings: Settings, run_id: str, payload: tuple[str, ...], wait: str | None, why: str
) -> None:
    """Answer a callback of a run.

    ID is the id of the run, or a token. The payload is JSON, or pairs: by=ana count:=3. The first
    answer counts.
    """
    given = parse_payload(payload)
    await _answer(settings, "answer", run_id, wait=wait, payload=given, why=why)
