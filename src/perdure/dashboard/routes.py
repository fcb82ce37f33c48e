"""The paths of the dashboard, their views, and the rights that they need."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from perdure.dashboard import actions, bulk, runs
from perdure.dashboard.pages import count_prunable, page, show_metrics, show_preferences
from perdure.dashboard.rendering import CHART_WINDOWS, ERROR_WINDOWS, View
from perdure.operations.verbs import VERBS, Right
from perdure.urls import decode_id

RightOf: TypeAlias = Callable[[Mapping[str, str], Mapping[str, list[str]]], Right | None]


@dataclass(frozen=True, slots=True)
class Route:
    """A path, its views, and the right that both need besides `view`.

    The right may depend on the path, as for `/runs/<id>/do/<verb>`, and on the posted form.
    `params` are those that the path does not contain.
    """

    path: str
    get: View | None = None
    post: View | None = None
    right: Right | RightOf = "view"
    params: Mapping[str, str] = field(default_factory=dict)

    def match(self, path: str) -> dict[str, str] | None:
        """Return the parameters of a path, decoded, or `None` if it is another path."""
        segments, expected = path.split("/"), self.path.split("/")
        if len(segments) != len(expected):
            return None
        params = dict(self.params)
        for segment, name in zip(segments, expected, strict=True):
            if name.startswith("{"):
                if not segment or (value := decode_id(segment)) is None:
                    return None
                params[name[1:-1]] = value
            elif segment != name:
                return None
        return params

    def right_for(self, params: Mapping[str, str], form: Mapping[str, list[str]]) -> Right | None:
        """Return the right that is needed, or `None` if the path names an unknown verb."""
        return self.right(params, form) if callable(self.right) else self.right


def _right_of_verb(params: Mapping[str, str], form: Mapping[str, list[str]]) -> Right | None:
    verb = VERBS.get(params["verb"])
    if verb is None:
        return None
    is_here = params["place"] == verb.place if "place" in params else verb.bulk
    return verb.right if is_here else None


def _right_of_bulk(params: Mapping[str, str], form: Mapping[str, list[str]]) -> Right | None:
    limit = form.get("limit", [""])[-1].strip()
    is_above = limit.isdecimal() and int(limit) > bulk.LIMIT
    return "admin" if is_above else _right_of_verb(params, form)


def _verb(path: str, verb: str, get: View | None = None) -> Route:
    """Return the route of a verb with its own path."""
    params = {"verb": verb, "place": VERBS[verb].place}
    return Route(path, get, actions.act, _right_of_verb, params)


_OVERVIEW = page(
    "overview",
    *("counts", "fleet"),
    overview=lambda ask, visit: ask.overview(),
    history=lambda ask, visit: ask.history(visit.choice("window", CHART_WINDOWS, "24h")),
    workflows=lambda ask, visit: ask.workflows(),
)
_QUEUES = page(
    "queues",
    "counts",
    queues=lambda ask, visit: ask.queues(),
    limits=lambda ask, visit: ask.limits(),
)
_ERRORS = page(
    "errors",
    "counts",
    groups=lambda ask, visit: ask.errors(visit.choice("window", ERROR_WINDOWS, "24h")),
)
_APPROVALS = page(
    "approvals",
    "counts",
    page=lambda ask, visit: ask.approvals(visit.query.get("to") or None, after=visit.after),
)
_ACTS = page(
    "acts", "acts", page=lambda ask, visit: ask.acts(visit.query.get("find", ""), after=visit.after)
)
_STORE = page(
    "store",
    store=lambda ask, visit: ask.store(),
    findings=lambda ask, visit: ask.check(),
    retention=lambda ask, visit: ask.retention(),
    prunable=lambda ask, visit: count_prunable(visit),
)

ROUTES: tuple[Route, ...] = (
    Route("/", _OVERVIEW),
    Route("/runs", runs.list_runs),
    Route("/runs/{run}", runs.show_run),
    Route("/runs/{run}/steps", runs.show_run),
    Route("/runs/{run}/value", runs.download),
    Route("/runs/{run}/export", runs.download),
    Route("/{place}/{name}/do/{verb}", actions.confirm, actions.act, _right_of_verb),
    Route("/workflows", page("workflows", "counts")),
    Route("/workflows/{workflow}", page("workflow", "counts")),
    _verb("/workflows/{name}/start", "start", actions.confirm),
    Route("/queues", _QUEUES),
    Route("/queues/{queue}", page("queue", "counts")),
    Route("/schedules", page("schedules", "counts")),
    Route("/schedules/{schedule}", page("schedule", "counts")),
    Route("/workers", page("workers", "fleet")),
    Route("/workers/{worker}", page("worker", "fleet")),
    Route("/errors", _ERRORS),
    Route("/agenda", page("agenda", "counts")),
    Route("/approvals", _APPROVALS),
    Route("/acts", _ACTS),
    Route("/views", page("views")),
    _verb("/views/save", "save_view", actions.confirm),
    Route("/compare", page("compare", comparison=runs.compare)),
    Route("/store", _STORE),
    _verb("/store/import", "import_run"),
    Route("/store/prune", None, actions.prune, "delete"),
    Route("/bulk/selected", bulk.confirm),
    Route("/bulk/selected/{verb}", bulk.confirm, bulk.act_on_selected, _right_of_verb),
    Route("/bulk/all", bulk.confirm),
    Route("/bulk/all/{verb}", bulk.confirm, bulk.act_on_all, _right_of_bulk),
    Route("/bulk/{bulk}", bulk.show),
    Route("/bulk/{bulk}/stop/{verb}", None, bulk.stop, _right_of_verb),
    Route("/bulk/{bulk}/resume/{verb}", None, bulk.resume, _right_of_verb),
    Route("/preferences", show_preferences, actions.save_preferences),
    Route("/complete", runs.complete),
    Route("/metrics", show_metrics),
)
