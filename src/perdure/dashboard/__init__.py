"""Pages on which operators see and repair runs: an ASGI app to mount, and a server of its own.

app = Starlette(routes=[Mount("/perdure", Dashboard(runtime, auth=basic({"ana": hashed})))])
"""

from perdure.errors import MissingDependency

try:
    import jinja2 as _jinja2  # noqa: F401  # fails here, with what to install
    import starlette as _starlette  # noqa: F401
except ImportError as error:
    raise MissingDependency(error.name or "starlette", "dashboard") from error

from perdure.dashboard.access import (
    Access,
    Auth,
    Right,
    allow_all,
    basic,
    hash_password,
    header,
    starlette_user,
)
from perdure.dashboard.app import Dashboard
from perdure.dashboard.server import serve

__all__ = [
    "Access",
    "Auth",
    "Dashboard",
    "Right",
    "allow_all",
    "basic",
    "hash_password",
    "header",
    "serve",
    "starlette_user",
]
