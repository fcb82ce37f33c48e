"""Operators' actions on saved views, which change no run."""

import msgspec

from perdure.errors import InvalidArgument, Refused
from perdure.insights.insights import Insights
from perdure.insights.model import SavedView
from perdure.insights.views import KEY, check_view
from perdure.operations.outcome import Outcome
from perdure.operations.schedules import ScheduleOperations
from perdure.store import require_search


class ViewOperations(ScheduleOperations):
    """Saves queries on behalf of operators; `Operations` can do more."""

    async def save_view(self, view: str, query: str, *, by: str, why: str = "") -> Outcome:
        """Save a query under a name, for everyone, replacing any query with this name."""
        documents = require_search(self.store, "Operations.save_view").documents
        insights = Insights(self.store, clock=self.clock)
        full_query = await insights.expand(query)
        insights.parse(full_query)
        act = self.act("save_view", by, why, _check(view))
        saved_view = SavedView(view, full_query, act["by"], self.clock.now())
        before = await documents.get(f"{KEY}{view}")
        await documents.set(f"{KEY}{view}", msgspec.json.encode(saved_view).decode())
        await self.note(act if before is None else {**act, "was": before})
        return Outcome("", "save_view", "done", None, f"View {view} is saved.")

    async def delete_view(self, view: str, *, by: str, why: str = "") -> Outcome:
        """Delete a saved query."""
        documents = require_search(self.store, "Operations.delete_view").documents
        act = self.act("delete_view", by, why, _check(view))
        if not await documents.delete(f"{KEY}{view}"):
            raise Refused(view, "delete_view", "there is no view of this name")
        await self.note(act)
        return Outcome("", "delete_view", "done", None, f"View {view} is deleted.")


def _check(view: str) -> str:
    try:
        return check_view(view)
    except (ValueError, TypeError) as error:
        raise InvalidArgument("view", view, str(error)) from None
