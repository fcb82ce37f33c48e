"""What a `mysql://` URL says of a server and how to reach it."""

from collections.abc import Mapping
from ssl import SSLContext
from typing import Any
from urllib.parse import SplitResult, parse_qsl, unquote, unquote_to_bytes, urlsplit

from perdure.errors import InvalidArgument

_WANTED = "a URL such as mysql://user:password@host:3306/database"
_YES = {"1", "true", "yes", "on"}
_NO = {"0", "false", "no", "off"}


def connect_options(url: object, ssl: object = None) -> dict[str, Any]:
    """Give what the driver takes in place of a URL.

    After a `?` may stand `ssl=true` (encrypt), `ssl_ca=file` (encrypt, and check the server's
    certificate) and `unix_socket=file`.
    """
    parts = _split(url)
    options: dict[str, Any] = {
        "host": parts.hostname or "localhost",
        "port": parts.port or 3306,
        "user": unquote(parts.username or "root"),
        # As bytes, for the driver would take text to be Latin-1.
        "password": unquote_to_bytes(parts.password or ""),
        "database": unquote(parts.path[1:]),
    }
    options |= _more(dict(parse_qsl(parts.query, keep_blank_values=True)))
    if not isinstance(ssl, SSLContext | bool | None):
        raise InvalidArgument("ssl", ssl, "an ssl.SSLContext, or True to encrypt and not to check")
    if ssl is not None:
        options["ssl"] = ssl or None
    return options


def place(options: Mapping[str, Any]) -> str:
    """Give where a server is, for people: no user, no password."""
    at = options.get("unix_socket") or f"{options['host']}:{options['port']}"
    return f"{at}/{options['database']}"


def _split(url: object) -> SplitResult:
    if not isinstance(url, str):
        raise InvalidArgument("url", url, _WANTED)
    try:
        parts = urlsplit(url)
        has_port = parts.port is None or parts.port > 0
    except ValueError:
        has_port, parts = False, SplitResult("", "", "", "", "")
    if parts.scheme not in ("mysql", "mariadb") or not has_port or len(parts.path) < 2:
        # Not the URL itself: it may hold a password.
        raise InvalidArgument("url", "…", _WANTED)
    return parts


def _more(query: dict[str, str]) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for name, value in query.items():
        if name == "ssl" and value.lower() in _YES | _NO:
            options["ssl"] = options.get("ssl") or (value.lower() in _YES or None)
        elif name == "ssl_ca" and value:
            options["ssl"] = {"ca": value}
        elif name == "unix_socket" and value:
            options["unix_socket"] = value
        else:
            expected = "ssl=true, ssl_ca=file or unix_socket=file after the ?"
            raise InvalidArgument("url", f"{name}={value}", expected)
    return options
