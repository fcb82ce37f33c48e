"""The command that lists approvals; those that answer them are verbs."""

from shlex import quote

from perdure.cli.connections import insights
from perdure.cli.context import Settings, command, message, option
from perdure.cli.output import Column, Output
from perdure.cli.runs import AFTER, LIMIT
from perdure.insights.model import ApprovalRow


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
