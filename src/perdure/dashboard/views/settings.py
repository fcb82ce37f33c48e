"""How pages look for one person."""

from zoneinfo import available_timezones

from starlette.responses import RedirectResponse, Response

from perdure.dashboard.board import Board
from perdure.dashboard.rendering import Content, page
from perdure.dashboard.visit import PREFERENCES_COOKIE, Preferences, Visit

_YEAR = 365 * 24 * 3600


async def show_preferences(board: Board, visit: Visit) -> Content:
    """Show the form of the preferences, and the keys."""
    return page("preferences.html", visit.preferences, zones=sorted(available_timezones()))


async def save_preferences(board: Board, visit: Visit) -> Response:
    """Keep the preferences in a cookie."""
    preferences = Preferences.from_fields({name: visit.value(name) for name in visit.form})
    response = RedirectResponse(visit.url("preferences"), 303)
    return visit.set_cookie(response, PREFERENCES_COOKIE, preferences.to_cookie(), _YEAR)
