"""The paths of the dashboard, their views, and the rights that they need."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from perdure.dashboard import actions, runs
from perdure.dashboard.pages import count_prunable, page, show_metrics, show_preferences
from perdure.dashboard.rendering import View
from perdure.operations.verbs import VERBS, Right
from perdure.urls import decode_id


@dataclass(frozen=True, slots=True)
class Route:
    """A path, its views, and the right that both need besides `view`.

    It may be that of the verb in the path, as for `/runs/<id>/do/<verb>`. `params` are those that
    the path does not contain.
    """

    path: str
    get: View | None = None
    post: View | None = None
    right: Right | Literal["verb"] = "view"
    params: Mapping[str, str] = field(default_factory=dict)

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


_OVERVIEW = page("overview", "overview", "history", "workflows", topics=("counts", "fleet"))
_STORE = page("store", "store", "check", "retention", topics=(), prunable=count_prunable)

ROUTES: tuple[Route, ...] = (
    Route("/", _OVERVIEW),
    Route("/runs", runs.list_runs),
    Route("/runs/{run}", runs.show_run),
    Route("/runs/{run}/steps", runs.show_run),
    Route("/runs/{run}/value", runs.download),
    Route("/runs/{run}/export", runs.download),
    Route("/{place}/{name}/do/{verb}", actions.confirm, actions.act, "verb"),
    Route("/workflows", page("workflows")),
    Route("/workflows/{workflow}", page("workflow")),
    _verb("/workflows/{name}/start", "start", actions.confirm),
    Route("/queues", page("queues", "queues", "limits")),
    Route("/queues/{queue}", page("queue")),
    Route("/schedules", page("schedules")),
    Route("/schedules/{schedule}", page("schedule")),
    Route("/workers", page("workers", topics=("fleet",))),
    Route("/workers/{worker}", page("worker", topics=("fleet",))),
    Route("/errors", page("errors")),
    Route("/agenda", page("agenda")),
    Route("/approvals", page("approvals")),
    Route("/acts", page("acts", topics=("acts",))),
    Route("/views", page("views", topics=())),
    _verb("/views/save", "save_view", actions.confirm),
    Route("/compare", page("compare", topics=(), comparison=runs.compare)),
    Route("/store", _STORE),
    _verb("/store/import", "import_run"),
    Route("/store/prune", None, actions.prune, "delete"),
    Route("/bulk/selected", actions.confirm_bulk),
    Route("/bulk/selected/{verb}", actions.confirm_bulk, actions.act_on_selected, "verb"),
    Route("/bulk/all", actions.confirm_bulk),
    Route("/bulk/all/{verb}", actions.confirm_bulk, actions.act_on_all, "verb"),
    Route("/bulk/{bulk}", actions.show_bulk),
    Route("/bulk/{bulk}/stop/{verb}", None, actions.stop_bulk, "verb"),
    Route("/bulk/{bulk}/resume/{verb}", None, actions.resume_bulk, "verb"),
    Route("/preferences", show_preferences, actions.save_preferences),
    Route("/complete", runs.complete),
    Route("/metrics", show_metrics),
)
