"""People and their rights: the auth hook of a dashboard, and the hooks that are included.

A hook is an async function that takes the request and returns the person's `Access`, or a response
such as a redirect to a login page; it may also raise Starlette's `HTTPException`. Without a hook a
dashboard refuses every request.
"""

import asyncio
import base64
import binascii
import hashlib
import hmac
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network
from random import SystemRandom
from typing import Any, TypeAlias, get_args

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from perdure.errors import InvalidArgument
from perdure.operations.verbs import Right
from perdure.validation import check_text

ALL_RIGHTS: frozenset[Right] = frozenset(get_args(Right))

_SCRYPT = {"n": 2**14, "r": 8, "p": 1}
_MAX_PEOPLE = 1000


@dataclass(frozen=True, slots=True)
class Access:
    """A person, as the audit trail names them, and their rights."""

    person: str
    rights: frozenset[Right] = ALL_RIGHTS

    def __post_init__(self) -> None:
        check_text(self.person, "person", "the person's name, a non-empty string")
        object.__setattr__(self, "rights", check_rights(self.rights))


Auth: TypeAlias = Callable[[Request], Awaitable[Access | Response]]
RightsOf: TypeAlias = Iterable[Right] | Mapping[str, Iterable[Right]]


def check_rights(rights: object) -> frozenset[Right]:
    """Check for a set of names of rights."""
    if isinstance(rights, Iterable) and not isinstance(rights, str | Mapping):
        names: frozenset[Any] = frozenset(rights)
        if names <= ALL_RIGHTS:
            return names
    raise InvalidArgument("rights", rights, "a set of rights, of " + ", ".join(get_args(Right)))


def _rights_by_person(rights: RightsOf) -> Callable[[str], frozenset[Right]]:
    if isinstance(rights, Mapping):
        by_person = {name: check_rights(each) for name, each in rights.items()}
        return lambda person: by_person.get(person, frozenset())
    everyone = check_rights(rights)
    return lambda person: everyone


async def allow_all(request: Request) -> Access:
    """Let everyone who can reach the dashboard do everything, as "anonymous"."""
    return Access("anonymous")


def hash_password(password: str) -> str:
    """Return the scrypt hash of a password, for `basic`."""
    check_text(password, "password", "a non-empty string")
    salt = SystemRandom().randbytes(16)
    return f"scrypt${salt.hex()}${_scrypt(password, salt).hex()}"


def _scrypt(password: str, salt: bytes) -> bytes:
    return hashlib.scrypt(password.encode(), salt=salt, **_SCRYPT)


def _matches(password: str, password_hash: str) -> bool:
    _, salt, expected = password_hash.split("$")
    return hmac.compare_digest(_scrypt(password, bytes.fromhex(salt)), bytes.fromhex(expected))


def basic(users: Mapping[str, str], *, rights: RightsOf = ALL_RIGHTS) -> Auth:
    """Ask for a name and a password. `users` maps names to hashes of `hash_password`.

    `rights` are the rights of everyone, or a mapping of names to rights.
    """
    for name, password_hash in users.items():
        if not password_hash.startswith("scrypt$") or password_hash.count("$") != 2:
            hint = "Pass what perdure.dashboard.hash_password(password) returns"
            raise InvalidArgument(f"users[{name!r}]", "…", "a password hash", hint)
    rights_of = _rights_by_person(rights)
    # Verifying is slow on purpose, and a browser sends the password with every request.
    people: dict[bytes, str] = {}

    async def auth(request: Request) -> Access | Response:
        header = request.headers.get("authorization", "")
        digest = hashlib.sha256(header.encode()).digest()
        person = people.get(digest)
        if person is None:
            person = await _verify(header, users)
            if person is None:
                challenge = {"WWW-Authenticate": 'Basic realm="perdure", charset="UTF-8"'}
                return PlainTextResponse("Sign in to see this page.", 401, challenge)
            if len(people) >= _MAX_PEOPLE:
                people.clear()
            people[digest] = person
        return Access(person, rights_of(person))

    return auth


async def _verify(header: str, users: Mapping[str, str]) -> str | None:
    scheme, _, encoded = header.partition(" ")
    if scheme.lower() != "basic":
        return None
    try:
        name, _, password = base64.b64decode(encoded, validate=True).decode().partition(":")
    except (binascii.Error, UnicodeDecodeError):
        return None
    # An unknown name takes as long as a wrong password, so that the time does not distinguish them.
    password_hash = users.get(name) or f"scrypt${'00' * 16}${'00' * 64}"
    is_right = await asyncio.to_thread(_matches, password, password_hash)
    return name if is_right and name in users else None


def header(name: str, *, trusted: Iterable[str], rights: RightsOf = ALL_RIGHTS) -> Auth:
    """Trust a header that a proxy sets, such as `X-Forwarded-User`.

    `trusted` are the addresses or networks of the proxies, "127.0.0.1" or "10.0.0.0/8", or "unix"
    for a Unix socket. From elsewhere the header is ignored.
    """
    check_text(name, "name", "the name of a header")
    addresses = _check_addresses(trusted)
    rights_of = _rights_by_person(rights)

    async def auth(request: Request) -> Access | Response:
        person = request.headers.get(name, "")
        if not person or not _is_trusted(request.client.host if request.client else "", addresses):
            text = f"This page requires the header {name} from a trusted proxy."
            return PlainTextResponse(text, 403)
        return Access(person, rights_of(person))

    return auth


_Networks: TypeAlias = tuple[IPv4Network | IPv6Network | None, ...]


def _check_addresses(trusted: Iterable[str]) -> _Networks:
    expected = 'addresses such as "127.0.0.1" or "10.0.0.0/8", or "unix"'
    if isinstance(trusted, str):
        raise InvalidArgument("trusted", trusted, f"a list of {expected}")
    try:
        return tuple(None if each == "unix" else ip_network(each) for each in trusted)
    except ValueError as error:
        raise InvalidArgument("trusted", trusted, expected) from error


def _is_trusted(host: str, networks: _Networks) -> bool:
    try:
        address = ip_address(host)
    except ValueError:
        return host == "" and None in networks
    return any(network is not None and address in network for network in networks)


def starlette_user(*, rights: RightsOf = ALL_RIGHTS) -> Auth:
    """Use the user authenticated by Starlette's `AuthenticationMiddleware`."""
    rights_of = _rights_by_person(rights)

    async def auth(request: Request) -> Access | Response:
        user = request.scope.get("user")
        if user is None or not user.is_authenticated:
            return PlainTextResponse("Sign in to see this page.", 403)
        return Access(user.display_name, rights_of(user.display_name))

    return auth


async def refuse_all(request: Request) -> Response:
    """Refuse everyone: the hook of a dashboard that was created without one."""
    text = (
        "This dashboard is closed. Pass auth= to Dashboard: basic({...}), header(...), "
        "starlette_user(), an async function that returns Access(person, rights), or allow_all "
        "to open it to everyone who can reach it.\n"
    )
    return PlainTextResponse(text, 403)
