"""The overview, and what a monitoring system asks for."""

from dataclasses import dataclass
from datetime import datetime, timedelta

from starlette.responses import PlainTextResponse, Response

from perdure.dashboard import formatting
from perdure.dashboard.board import Board, region
from perdure.dashboard.rendering import Content
from perdure.dashboard.visit import Visit
from perdure.insights.model import Overview, Tally

WINDOWS = (1, 6, 24, 48)


@dataclass(frozen=True, slots=True)
class Number:
    """One of the large numbers, and the page that it leads to."""

    title: str
    value: str
    status: str
    icon: str
    href: str
    note: str = ""


async def show_overview(board: Board, visit: Visit) -> Content:
    """Show the store at a glance."""
    overview = await board.insights.overview()
    hours = visit.query.get("hours", "")
    window = int(hours) if hours in map(str, WINDOWS) else 24
    history = await region(board.insights.history(timedelta(hours=window)))
    workflows = await region(board.insights.workflows())

    def at(time: datetime) -> str:
        return formatting.time_of_day(time, visit.now, visit.preferences.tz)

    context = {
        "section": "overview",
        "overview": overview,
        "numbers": _numbers(overview, visit),
        "is_empty": not any(each.count for each in overview.counts.values()),
        "history": history,
        "workflows": workflows,
        "windows": WINDOWS,
        "window": window,
        "at": at,
    }
    data = (overview.counts, overview.due, overview.workers, overview.failures, overview.attention)
    return Content(
        "overview.html", (data, history.data, workflows.data), context, topics=("counts", "fleet")
    )


def _numbers(overview: Overview, visit: Visit) -> tuple[Number, ...]:
    counts = overview.counts
    live = [each for each in overview.workers if each.state != "lost"]
    slots, running = sum(each.slots for each in live), sum(each.running for each in live)
    due = f"oldest {formatting.age(overview.oldest_due, visit.now)}" if overview.oldest_due else ""
    return (
        _count(visit, "Running", "running", counts.get("running")),
        Number(
            "Due", formatting.number(overview.due), "queued", "queued",
            visit.url("runs", q="status:queued sort:oldest"), due,
        ),
        _count(visit, "Waiting", "waiting", counts.get("waiting")),
        _count(visit, "Suspended", "suspended", counts.get("suspended")),
        Number(
            "Failed in 24 h", formatting.tally(overview.last_day.get("failed")), "failed", "failed",
            visit.url("runs", q="status:failed since:24h"),
            f"{formatting.tally(overview.last_day.get('completed'))} completed",
        ),
        Number(
            "Workers live", formatting.number(len(live)), "completed" if live else "waiting",
            "workers", visit.url("workers"),
            f"{running:,} of {slots:,} slots in use" if live else "start one: perdure worker",
        ),
    )


def _count(visit: Visit, title: str, status: str, tally: Tally | None) -> Number:
    href = visit.url("runs", q=f"status:{status}")
    return Number(title, formatting.tally(tally), status, status, href)


async def metrics(board: Board, visit: Visit) -> Response:
    """Return the numbers of the overview as OpenMetrics."""
    overview = await board.insights.overview()
    lines = ["# TYPE perdure_runs gauge", "# HELP perdure_runs Runs by status, counted up to a cap."]
    lines += [
        f'perdure_runs{{status="{status}"}} {tally.count}'
        for status, tally in sorted(overview.counts.items())
    ]
    live = [each for each in overview.workers if each.state != "lost"]
    age = max((overview.now - overview.oldest_due).total_seconds(), 0) if overview.oldest_due else 0
    for name, value, text in (
        ("due_runs", overview.due, "Runs whose wake time has passed."),
        ("oldest_due_seconds", age, "How long the oldest due run has been due."),
        ("workers", len(live), "Live workers."),
        ("worker_slots", sum(each.slots for each in live), "Slots of live workers."),
        ("worker_slots_in_use", sum(each.running for each in live), "Slots in use."),
    ):
        lines += [f"# TYPE perdure_{name} gauge", f"# HELP perdure_{name} {text}"]
        lines.append(f"perdure_{name} {value}")
    media_type = "application/openmetrics-text; version=1.0.0; charset=utf-8"
    return PlainTextResponse("\n".join([*lines, "# EOF", ""]), media_type=media_type)
