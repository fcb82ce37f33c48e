"""Pages that show answers of `Insights`: a template, and the questions by their names in it."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, TypeAlias
from zoneinfo import available_timezones

from starlette.exceptions import HTTPException
from starlette.responses import Response

from perdure.dashboard.board import read_region
from perdure.dashboard.rendering import CHART_WINDOWS, ERROR_WINDOWS, View, environment, render
from perdure.dashboard.visit import Visit

Question: TypeAlias = Callable[[Visit], Awaitable[Any]]

_OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"
# What a question takes from the query of the URL. The names in its path come first.
_ARGUMENTS: Mapping[str, Callable[[Visit], dict[str, Any]]] = {
    "history": lambda visit: {"window": visit.choice("window", CHART_WINDOWS, "24h")},
    "errors": lambda visit: {"window": visit.choice("window", ERROR_WINDOWS, "24h")},
    "approvals": lambda visit: {"to": visit.query.get("to") or None, "after": visit.after},
    "acts": lambda visit: {"query": visit.query.get("find", ""), "after": visit.after},
}


def page(
    template: str, *names: str, topics: tuple[str, ...] = ("counts",), **others: Question
) -> View:
    """Return the view of a page with one answer, or with several that may fail independently.

    `names` are methods of `Insights`; without any question it is the one named as the template. The
    page is notified of the topics, unless it is not the first of several.
    """
    asked = names or (() if others else (template,))
    questions = {name: partial(_ask, name) for name in asked} | others
    read = _read_one if len(questions) == 1 else _read_regions

    async def show(visit: Visit) -> Response:
        data, context = await read(visit, questions)
        shown = () if visit.after else topics
        return render(visit, f"{template}.html", data, topics=shown, **context)

    return show


async def _ask(name: str, visit: Visit) -> Any:
    arguments = _ARGUMENTS[name](visit) if name in _ARGUMENTS else {}
    return await getattr(visit.board.insights, name)(*visit.params.values(), **arguments)


async def _read_one(visit: Visit, questions: Mapping[str, Question]) -> tuple[Any, Any]:
    [(name, question)] = questions.items()
    answer = await question(visit)
    if answer is None and name in visit.params:
        raise HTTPException(404, f"There is no {name} {visit.params[name]!r}.")
    return answer, {name: answer}


async def _read_regions(visit: Visit, questions: Mapping[str, Question]) -> tuple[Any, Any]:
    reads = (read_region(question(visit)) for question in questions.values())
    regions = dict(zip(questions, await asyncio.gather(*reads), strict=True))
    problems = [region["error"] for region in regions.values() if region["error"]]
    if len(problems) == len(regions):
        raise HTTPException(503, problems[0])
    # As JSON, a region is its data, or an object that says why there is none.
    data = {name: each if each["error"] else each["data"] for name, each in regions.items()}
    return data, regions


async def count_prunable(visit: Visit) -> int | None:
    """Return how many runs pruning would delete, if requested."""
    age = visit.query.get("older_than")
    if not age or not visit.may("delete"):
        return None
    return await visit.board.operations.prune(age, dry_run=True, by=visit.access.person)


async def show_preferences(visit: Visit) -> Response:
    """Show the form of the preferences, and the keys."""
    zones = sorted(available_timezones())
    return render(visit, "preferences.html", visit.preferences, zones=zones)


async def show_metrics(visit: Visit) -> Response:
    """Return the numbers of the overview as OpenMetrics."""
    overview = await visit.board.insights.overview()
    text = environment().get_template("metrics.txt").render(overview=overview)
    return Response(text + "\n", media_type=_OPENMETRICS)
