"""The overview, and what a monitoring system asks for."""

from datetime import timedelta

from starlette.responses import Response

from perdure.dashboard.board import Board, region
from perdure.dashboard.rendering import Content, environment, page
from perdure.dashboard.visit import Visit

WINDOWS = (1, 6, 24, 48)
_OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"


async def show_overview(board: Board, visit: Visit) -> Content:
    """Show the store at a glance."""
    overview = await board.insights.overview()
    asked = visit.query.get("hours", "")
    hours = int(asked) if asked in map(str, WINDOWS) else 24
    history = await region(board.insights.history(timedelta(hours=hours)))
    workflows = await region(board.insights.workflows())
    return page(
        "overview.html",
        {"overview": overview, "history": history.data, "workflows": workflows.data},
        topics=("counts", "fleet"),
        overview=overview,
        history=history,
        workflows=workflows,
        windows=WINDOWS,
        hours=hours,
    )


async def metrics(board: Board, visit: Visit) -> Response:
    """Return the numbers of the overview as OpenMetrics."""
    overview = await board.insights.overview()
    text = environment().get_template("metrics.txt").render(overview=overview)
    return Response(text + "\n", media_type=_OPENMETRICS)
