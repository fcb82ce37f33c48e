"""The paths of the dashboard, their views, and the rights that they need."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from perdure.dashboard.access import Right
from perdure.dashboard.rendering import View
from perdure.dashboard.verbs import VERBS
from perdure.dashboard.views import actions, bulk, errors, fleet, overview, runs, settings
from perdure.urls import decode_id

RightOf: TypeAlias = Callable[[Mapping[str, str], Mapping[str, list[str]]], Right | None]


@dataclass(frozen=True, slots=True)
class Route:
    """A path, its views, and the right that both need besides `view`.

    The right may depend on the path, as for `/runs/<id>/do/<verb>`, and on the posted form.
    """

    path: str
    get: View | None = None
    post: View | None = None
    right: Right | RightOf = "view"

    def match(self, path: str) -> dict[str, str] | None:
        """Return the parameters of a path, decoded, or `None` if it is another path."""
        segments, expected = path.split("/"), self.path.split("/")
        if len(segments) != len(expected):
            return None
        params: dict[str, str] = {}
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


ROUTES: tuple[Route, ...] = (
    Route("/", overview.show_overview),
    Route("/runs", runs.list_runs),
    Route("/runs/{run}", runs.show_run),
    Route("/runs/{run}/steps", runs.show_run),
    Route("/runs/{run}/value", runs.download_value),
    Route("/runs/{run}/export", runs.export_run),
    Route("/{place}/{name}/do/{verb}", actions.confirm, actions.act, _right_of_verb),
    Route("/workflows", fleet.listing("workflows", "counts")),
    Route("/workflows/{workflow}", fleet.showing("workflow", "counts")),
    Route("/workflows/{workflow}/start", fleet.start_form, fleet.start_run, "operate"),
    Route("/queues", fleet.list_queues),
    Route("/queues/{queue}", fleet.showing("queue", "counts")),
    Route("/schedules", fleet.listing("schedules", "counts")),
    Route("/schedules/{schedule}", fleet.showing("schedule", "counts")),
    Route("/workers", fleet.listing("workers", "fleet")),
    Route("/workers/{worker}", fleet.showing("worker", "fleet")),
    Route("/errors", errors.list_errors),
    Route("/agenda", fleet.listing("agenda", "counts")),
    Route("/approvals", fleet.list_approvals),
    Route("/acts", errors.list_acts),
    Route("/compare", runs.compare),
    Route("/store", errors.show_store),
    Route("/store/import", None, errors.import_run, "operate"),
    Route("/store/prune", None, errors.prune, "delete"),
    Route("/bulk/selected", bulk.confirm_selected),
    Route("/bulk/selected/{verb}", bulk.confirm_selected, bulk.act_on_selected, _right_of_verb),
    Route("/bulk/all", bulk.confirm_all),
    Route("/bulk/all/{verb}", bulk.confirm_all, bulk.act_on_all, _right_of_bulk),
    Route("/bulk/{bulk}", bulk.show_bulk),
    Route("/bulk/{bulk}/stop/{verb}", None, bulk.stop_bulk, _right_of_verb),
    Route("/bulk/{bulk}/resume/{verb}", None, bulk.resume_bulk, _right_of_verb),
    Route("/preferences", settings.show_preferences, settings.save_preferences),
    Route("/complete", runs.complete),
    Route("/metrics", overview.metrics),
)
