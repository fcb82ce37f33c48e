"""Parse `mysql://` URLs into connection options."""

from collections.abc import Mapping
from ssl import SSLContext
from typing import Any
from urllib.parse import SplitResult, parse_qsl, unquote, unquote_to_bytes, urlsplit

from perdure.errors import InvalidArgument

_EXPECTED = "a URL such as mysql://user:password@host:3306/database"
_YES = {"1", "true", "yes", "on"}
_NO = {"0", "false", "no", "off"}


def connect_options(url: object, ssl: object = None) -> dict[str, Any]:
    """Return the driver's options for a URL.

    Its query may contain `ssl=true` (encrypt), `ssl_ca=file` (encrypt, and check the server's
    certificate) and `unix_socket=file`.
    """
    parts = _split(url)
    options: dict[str, Any] = {
        "host": parts.hostname or "localhost",
        "port": parts.port or 3306,
        "user": unquote(parts.username or "root"),
        # As bytes, because the driver would encode a string as Latin-1.
        "password": unquote_to_bytes(parts.password or ""),
        "database": unquote(parts.path[1:]),
    }
    options |= _query_options(dict(parse_qsl(parts.query, keep_blank_values=True)))
    if not isinstance(ssl, SSLContext | bool | None):
        expected = "an ssl.SSLContext, or True to encrypt without checking the certificate"
        raise InvalidArgument("ssl", ssl, expected)
    if ssl is not None:
        options["ssl"] = ssl or None
    return options


def host_and_database(options: Mapping[str, Any]) -> str:
    """Return the host and database for use in messages, without user and password."""
    host = options.get("unix_socket") or f"{options['host']}:{options['port']}"
    return f"{host}/{options['database']}"


def _split(url: object) -> SplitResult:
    if not isinstance(url, str):
        raise InvalidArgument("url", url, _EXPECTED)
    try:
        parts = urlsplit(url)
        is_valid_port = parts.port is None or parts.port > 0
    except ValueError:
        is_valid_port, parts = False, SplitResult("", "", "", "", "")
    if parts.scheme not in ("mysql", "mariadb") or not is_valid_port or len(parts.path) < 2:
        # The URL itself is not shown: it may contain a password.
        raise InvalidArgument("url", "…", _EXPECTED)
    return parts


def _query_options(query: dict[str, str]) -> dict[str, Any]:
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
