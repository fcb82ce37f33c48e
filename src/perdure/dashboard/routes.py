"""The paths of the dashboard: what they show, what they do, and the rights that they need.

Most pages are a template and the questions to `Insights` that it shows, by name.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeAlias

from starlette.exceptions import HTTPException
from starlette.responses import Response

from perdure.dashboard import actions, runs
from perdure.dashboard.board import read_region
from perdure.dashboard.rendering import CHART_WINDOWS, ERROR_WINDOWS, View, environment, render
from perdure.dashboard.visit import Visit
from perdure.operations.verbs import VERBS, Right
from perdure.urls import decode_id

Question: TypeAlias = Callable[[Visit], Awaitable[Any]]

# What a question takes from the query of the URL. The names in its path come first.
_ARGUMENTS: Mapping[str, Callable[[Visit], dict[str, Any]]] = {
    "history": lambda visit: {"window": visit.choice("window", CHART_WINDOWS, "24h")},
    "errors": lambda visit: {"window": visit.choice("window", ERROR_WINDOWS, "24h")},
    "approvals": lambda visit: {"to": visit.query.get("to") or None, "after": visit.after},
    "acts": lambda visit: {"query": visit.query.get("find", ""), "after": visit.after},
}
_OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"


@dataclass(frozen=True, slots=True)
class Route:
    """A path, its views, and the right that both need besides `view`.

    It may be that of the verb in the path, as for `/runs/<id>/do/<verb>`. `params` are those that
    the path does not contain. `is_long`: it may take long to read.
    """

    path: str
    get: View | None = None
    post: View | None = None
    right: Right | Literal["verb"] = "view"
    params: Mapping[str, str] = field(default_factory=dict)
    is_long: bool = False

    def match(self, path: str) -> dict[str, str] | None:
        """Return the parameters of a path, decoded, or `None` if it is another path."""
        names, segments = self.path.split("/"), path.split("/")
        if len(names) != len(segments):
            return None
        params = dict(self.params)
        for name, segment in zip(names, segments, strict=True):
            if name.startswith("{"):
                if (id := decode_id(segment)) is None:
                    return None
                params[name[1:-1]] = id
            elif segment != name:
                return None
        return params

    def right_for(self, params: Mapping[str, str], form: Mapping[str, list[str]]) -> Right | None:
        """Return the right that is needed, or `None` if there is no such verb here."""
        if self.right != "verb":
            return self.right
        verb = VERBS.get(params["verb"])
        if verb is None or not (params["place"] == verb.place if "place" in params else verb.bulk):
            return None
        # Only the form of a bulk operation has this field.
        limit = form.get("limit", [""])[-1].strip()
        is_large = limit.isdecimal() and int(limit) > actions.BULK_LIMIT
        return "admin" if is_large else verb.right


def _verb(path: str, verb: str, get: View | None = None) -> Route:
    """Return the route of a verb with its own path."""
    params = {"verb": verb, "place": VERBS[verb].place}
    return Route(path, get, actions.act, "verb", params)


def _page(
    template: str, *names: str, topics: tuple[str, ...] = ("counts",), **others: Question
) -> View:
    """Return the view of a page with one answer, or with several that may fail independently.

    `names` are methods of `Insights`; without any question it is the one named as the template. The
    page is notified of the topics, unless it is not the first of several.
    """
    names = names or (() if others else (template,))
    questions = {name: partial(_ask, name) for name in names} | others

    async def show(visit: Visit) -> Response:
        data, context = await _read(visit, questions)
        is_first = visit.after is None
        return render(visit, f"{template}.html", data, topics=topics if is_first else (), **context)

    return show


async def _ask(name: str, visit: Visit) -> Any:
    arguments = _ARGUMENTS[name](visit) if name in _ARGUMENTS else {}
    return await getattr(visit.board.insights, name)(*visit.params.values(), **arguments)


async def _read(visit: Visit, questions: Mapping[str, Question]) -> tuple[Any, dict[str, Any]]:
    """Return the data of a page, and the context of its template: an answer, or regions."""
    [(name, question), *others] = questions.items()
    if not others:
        answer = await question(visit)
        if answer is None and name in visit.params:
            raise HTTPException(404, f"There is no {name} {visit.params[name]!r}.")
        return answer, {name: answer}
    reads = (read_region(question(visit)) for question in questions.values())
    regions = dict(zip(questions, await asyncio.gather(*reads), strict=True))
    problems = [region["error"] for region in regions.values() if region["error"]]
    if len(problems) == len(regions):
        raise HTTPException(503, problems[0])
    # As JSON, a region is its data, or an object that says why there is none.
    data = {name: each if each["error"] else each["data"] for name, each in regions.items()}
    return data, regions


async def _show_metrics(visit: Visit) -> Response:
    """Return the numbers of the overview as OpenMetrics."""
    overview = await visit.board.insights.overview()
    text = environment().get_template("metrics.txt").render(overview=overview)
    return Response(text + "\n", media_type=_OPENMETRICS)


ROUTES: tuple[Route, ...] = (
    Route("/", _page("overview", "overview", "history", "workflows", topics=("counts", "fleet"))),
    Route("/runs", runs.list_runs),
    Route("/runs/{run}", runs.show_run),
    Route("/runs/{run}/steps", runs.show_run),
    Route("/runs/{run}/value", runs.download, is_long=True),
    Route("/runs/{run}/export", runs.download, is_long=True),
    Route("/{place}/{name}/do/{verb}", actions.confirm, actions.act, "verb"),
    Route("/workflows", _page("workflows")),
    Route("/workflows/{workflow}", _page("workflow")),
    _verb("/workflows/{name}/start", "start", actions.confirm),
    Route("/queues", _page("queues", "queues", "limits", "history")),
    Route("/queues/{queue}", _page("queue")),
    Route("/schedules", _page("schedules")),
    Route("/schedules/{schedule}", _page("schedule")),
    Route("/workers", _page("workers", topics=("fleet",))),
    Route("/workers/{worker}", _page("worker", topics=("fleet",))),
    Route("/errors", _page("errors")),
    Route("/agenda", _page("agenda", "agenda", "approvals")),
    Route("/approvals", _page("approvals")),
    Route("/acts", _page("acts", topics=("acts",))),
    Route("/views", _page("views", topics=())),
    _verb("/views/save", "save_view", actions.confirm),
    Route("/compare", _page("compare", topics=(), comparison=runs.compare), is_long=True),
    Route(
        "/store",
        _page("store", "store", "check", "retention", topics=(), prunable=actions.count_prunable),
    ),
    _verb("/store/import", "import_run"),
    Route("/store/prune", None, actions.prune, "delete"),
    Route("/bulk/selected", actions.confirm_bulk),
    Route("/bulk/selected/{verb}", actions.confirm_bulk, actions.act_on_selected, "verb"),
    Route("/bulk/all", actions.confirm_bulk),
    Route("/bulk/all/{verb}", actions.confirm_bulk, actions.act_on_all, "verb"),
    Route("/bulk/{bulk}", actions.show_bulk),
    Route("/bulk/{bulk}/stop/{verb}", None, actions.stop_bulk, "verb"),
    Route("/bulk/{bulk}/resume/{verb}", None, actions.resume_bulk, "verb"),
    Route("/preferences", actions.show_preferences, actions.save_preferences),
    Route("/complete", runs.complete),
    Route("/metrics", _show_metrics),
)
