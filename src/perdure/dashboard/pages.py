"""Pages that show results of `Insights`: a template, and the queries by their names in it."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, TypeAlias
from zoneinfo import available_timezones

from starlette.responses import Response

from perdure.dashboard.board import Board, region
from perdure.dashboard.rendering import Content, Problem, View, environment
from perdure.dashboard.visit import Visit
from perdure.insights import Insights

Question: TypeAlias = Callable[[Insights, Visit], Awaitable[Any]]
Questions: TypeAlias = Mapping[str, Question]

_OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"


def page(name: str, *topics: str, **questions: Question) -> View:
    """Return the view of a page with one result, or with several that may fail independently.

    Without questions the method of `Insights` with the name of the page is asked, about what the
    path names. The page is notified of the topics, unless it is not the first of several.
    """
    asked = questions or {name: partial(_ask, name)}
    read = _read_one if len(asked) == 1 else _read_regions

    async def show(board: Board, visit: Visit) -> Content:
        data, context = await read(board, visit, asked)
        return Content(f"{name}.html", data, context, topics=() if visit.after else topics)

    return show


async def _ask(name: str, insights: Insights, visit: Visit) -> Any:
    return await getattr(insights, name)(*visit.params.values())


async def _read_one(board: Board, visit: Visit, questions: Questions) -> tuple[Any, Any]:
    [(name, question)] = questions.items()
    answer = await question(board.insights, visit)
    if answer is None and name in visit.params:
        raise Problem(404, f"There is no {name} {visit.params[name]!r}.")
    return answer, {name: answer}


async def _read_regions(board: Board, visit: Visit, questions: Questions) -> tuple[Any, Any]:
    asked = (region(question(board.insights, visit)) for question in questions.values())
    regions = dict(zip(questions, await asyncio.gather(*asked), strict=True))
    problems = [each.error for each in regions.values() if each.error]
    if len(problems) == len(regions):
        raise Problem(503, problems[0])
    data = {
        name: {"error": each.error} if each.error else each.data for name, each in regions.items()
    }
    return data, regions


async def count_prunable(visit: Visit) -> int | None:
    """Return how many runs pruning would delete, if requested."""
    older_than = visit.query.get("older_than")
    if not older_than or not visit.may("delete"):
        return None
    operations = visit.board.operations
    return await operations.prune(older_than, dry_run=True, by=visit.access.person)


async def show_preferences(board: Board, visit: Visit) -> Content:
    """Show the form of the preferences, and the keys."""
    zones = {"zones": sorted(available_timezones())}
    return Content("preferences.html", visit.preferences, zones)


async def show_metrics(board: Board, visit: Visit) -> Response:
    """Return the numbers of the overview as OpenMetrics."""
    overview = await board.insights.overview()
    text = environment().get_template("metrics.txt").render(overview=overview)
    return Response(text + "\n", media_type=_OPENMETRICS)
