"""Pages for operators to see and repair runs: an ASGI app to mount, and a standalone server.

app = Starlette(routes=[Mount("/perdure", Dashboard(runtime, auth=basic({"ana": password_hash})))])
"""

from perdure.errors import MissingDependency

try:
    from perdure.dashboard.access import (
        Access,
        Auth,
        allow_all,
        basic,
        hash_password,
        header,
        starlette_user,
    )
    from perdure.dashboard.app import Dashboard
    from perdure.dashboard.server import serve
    from perdure.operations.verbs import Right
except ModuleNotFoundError as error:
    if error.name not in ("starlette", "jinja2"):
        raise
    raise MissingDependency(error.name, "dashboard") from error

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
