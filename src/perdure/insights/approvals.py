"""The approvals that runs wait for."""

from perdure.clock import Clock
from perdure.insights.model import ApprovalRow, ApprovalsPage
from perdure.insights.redaction import Redact
from perdure.runtime.answers import OpenApproval, list_approvals
from perdure.store import SearchStore


async def approvals(
    store: SearchStore, redact: Redact, clock: Clock, to: str | None, limit: int, after: str | None
) -> ApprovalsPage:
    """Return a page of open approvals, newest runs first."""
    page = await list_approvals(store, clock, to, limit, after)
    return ApprovalsPage(tuple(_row(each, redact) for each in page.approvals), page.cursor)


def _row(approval: OpenApproval, redact: Redact) -> ApprovalRow:
    # The token is left out, because anyone who has it can answer.
    return ApprovalRow(
        approval.run_id,
        approval.workflow,
        approval.id,
        redact.text(approval.question),
        approval.to,
        approval.options,
        approval.since,
        approval.expires_at,
    )
