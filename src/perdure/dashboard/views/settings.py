"""How pages look for one person."""

from zoneinfo import available_timezones

from starlette.responses import RedirectResponse, Response

from perdure.dashboard.board import Board
from perdure.dashboard.replies import set_cookie
from perdure.dashboard.rendering import Content
from perdure.dashboard.visit import PREFERENCES_COOKIE, Preferences, Visit

_YEAR = 365 * 24 * 3600

KEYS = (
    ("/", "Search"),
    ("j k", "Next and previous row"),
    ("x", "Select the row"),
    ("Enter", "Open the row"),
    (".", "Actions"),
    ("g o", "Overview"),
    ("g r", "Runs"),
    ("g e", "Errors"),
    ("g a", "Agenda"),
    ("g w", "Workflows"),
    ("g k", "Workers"),
    ("g t", "Audit trail"),
    ("g s", "Store"),
    ("Esc", "Close"),
    ("?", "This page"),
)


async def show_preferences(board: Board, visit: Visit) -> Content:
    """Show the form of the preferences, and the keys."""
    context = {
        "section": "preferences",
        "preferences": visit.preferences,
        "zones": sorted(available_timezones()),
        "keys": KEYS,
    }
    return Content("preferences.html", visit.preferences, context)


async def save_preferences(board: Board, visit: Visit) -> Response:
    """Keep the preferences in a cookie."""
    preferences = Preferences.from_fields({name: visit.value(name) for name in visit.form})
    response = RedirectResponse(visit.url("preferences"), 303)
    set_cookie(response, visit, PREFERENCES_COOKIE, preferences.to_cookie(), _YEAR)
    return response
