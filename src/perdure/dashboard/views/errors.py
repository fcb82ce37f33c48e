"""What went wrong, what was done about it, and the store itself."""

from datetime import timedelta
from typing import Any

from starlette.responses import Response

from perdure.clock import parse_duration
from perdure.dashboard.board import Board, region
from perdure.dashboard.rendering import Content, page
from perdure.dashboard.verbs import parse_json
from perdure.dashboard.visit import Visit
from perdure.errors import InvalidArgument

WINDOWS = {"1h": "1 h", "24h": "24 h", "7d": "7 days", "30d": "30 days"}


async def list_errors(board: Board, visit: Visit) -> Content:
    """Show failed runs, grouped by what failed."""
    asked = visit.query.get("window", "")
    window = asked if asked in WINDOWS else "24h"
    groups = await board.insights.errors(window)
    return page(
        "errors.html", groups, topics=("counts",), groups=groups, window=window, windows=WINDOWS
    )


async def list_acts(board: Board, visit: Visit) -> Content:
    """Show what operators did."""
    text, after = visit.query.get("find", "").strip(), visit.query.get("after") or None
    acts = await board.insights.acts(text, after=after)
    topics = () if after else ("acts",)
    return page("acts.html", acts, topics=topics, page=acts, find=text, after=after)


async def show_store(board: Board, visit: Visit) -> Content:
    """Show what the store can do, and what should be fixed."""
    store, findings = await board.insights.store(), await region(board.insights.check())
    retention = await region(board.insights.retention())
    older_than = visit.query.get("older_than", "")
    prunable = await _prunable(board, visit, older_than)
    data = {"store": store, "findings": findings.data, "retention": retention.data}
    shown: dict[str, Any] = {"store": store, "findings": findings, "retention": retention}
    return page("store.html", data, **shown, older_than=older_than, prunable=prunable)


async def _prunable(board: Board, visit: Visit, older_than: str) -> int | None:
    """Count what pruning would delete, if that was asked."""
    if not older_than or not visit.may("delete"):
        return None
    return await board.operations.prune(older_than, dry_run=True, by=visit.access.person)


async def import_run(board: Board, visit: Visit) -> Response:
    """Create a run from a bundle that was chosen as a file or pasted."""
    bundle = parse_json(visit.value("file") or visit.value("bundle"), "bundle")
    run_id, by, why = visit.value("run_id") or None, visit.access.person, visit.value("why")
    outcome = await board.operations.import_run(bundle, run_id=run_id, by=by, why=why)
    return visit.redirect(outcome.sentence, "runs", outcome.run_id)


async def prune(board: Board, visit: Visit) -> Response:
    """Delete runs that have been over for long."""
    age, why = parse_duration(visit.value("older_than"), "older_than"), visit.value("why").strip()
    if age < timedelta(minutes=1):
        raise InvalidArgument("older_than", visit.value("older_than"), "a duration such as 30d")
    if not why:
        raise InvalidArgument("why", "", "a reason", "It is recorded with your name")
    count = await board.operations.prune(age, by=visit.access.person, why=why)
    return visit.redirect(f"Deleted {count:,} runs.", "store")
