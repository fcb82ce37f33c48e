"""What went wrong, what was done about it, and the store itself."""

from datetime import timedelta

from starlette.responses import Response

from perdure.clock import parse_duration
from perdure.dashboard.board import Board, region
from perdure.dashboard.replies import redirect
from perdure.dashboard.rendering import Content
from perdure.dashboard.visit import Visit
from perdure.errors import InvalidArgument

WINDOWS = {"1h": "1 h", "24h": "24 h", "7d": "7 days", "30d": "30 days"}


async def list_errors(board: Board, visit: Visit) -> Content:
    """Show failed runs, grouped by what failed."""
    window = visit.query.get("window", "24h")
    window = window if window in WINDOWS else "24h"
    groups = await board.insights.errors(parse_duration(window))
    context = {"section": "errors", "groups": groups, "window": window, "windows": WINDOWS}
    return Content("errors.html", groups, context, topics=("counts",))


async def list_acts(board: Board, visit: Visit) -> Content:
    """Show what operators did."""
    text = visit.query.get("find", "").strip()
    acts = await board.insights.acts(text)
    context = {"section": "acts", "acts": acts, "find": text}
    return Content("acts.html", acts, context, topics=("acts",))


async def show_store(board: Board, visit: Visit) -> Content:
    """Show what the store can do, and what should be fixed."""
    store = await board.insights.store()
    findings = await region(board.insights.check())
    older_than = visit.query.get("older_than", "")
    context = {
        "section": "store",
        "store": store,
        "findings": findings,
        "older_than": older_than,
        "prunable": await _prunable(board, visit, older_than),
    }
    return Content("store.html", (store, findings.data), context)


async def _prunable(board: Board, visit: Visit, older_than: str) -> int | None:
    """Count what pruning would delete, if that was asked."""
    if not older_than or not visit.may("delete"):
        return None
    age = parse_duration(older_than, "older_than")
    return await board.operations.prune(age, dry_run=True, by=visit.access.person)


async def prune(board: Board, visit: Visit) -> Response:
    """Delete runs that have been over for long."""
    age = parse_duration(visit.value("older_than"), "older_than")
    if age < timedelta(minutes=1):
        raise InvalidArgument("older_than", visit.value("older_than"), "a duration such as 30d")
    if not visit.value("why").strip():
        raise InvalidArgument("why", "", "a reason", "Say why these runs are deleted")
    count = await board.operations.prune(age, by=visit.access.person, why=visit.value("why"))
    return redirect(visit.url("store"), f"Deleted {count:,} runs.", visit)
