"""A libSQL server reached over HTTP: rounds of statements, and patience while it is away."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import timedelta
from itertools import chain
from typing import Any, TypeVar
from urllib.parse import parse_qs, urlsplit, urlunsplit
from urllib.request import getproxies, proxy_bypass

import msgspec

from perdure.clock import Clock
from perdure.errors import (
    InvalidArgument,
    MissingDependency,
    StoreError,
    StoreUnavailable,
    ValueTooLarge,
)
from perdure.stores.libsql.batching import Rounds
from perdure.stores.libsql.hrana import (
    CLOSE,
    Answer,
    Refused,
    batching,
    executing,
    outcome_of,
    outcomes_of,
)
from perdure.stores.libsql.http import ClientHttp, Http, LinkHttp, Reply, Unanswered
from perdure.stores.libsql.pages import PagedRead, is_too_large
from perdure.stores.sqlite.runs import Verb
from perdure.stores.sqlite.statements import Outcome, Statement

T = TypeVar("T")

WANTED_URL = "libsql://host, https://host, http://host:port, or file:path"

_SCHEMES = {"libsql": "https", "https": "https", "wss": "https", "http": "http", "ws": "http"}
_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 1.0

# The server takes rows of up to 5 MB, unless it was started with a larger --max-response-size: half
# of that. What is in a row beside the value has room in what is left.
VALUE_SIZE = 4_608 * 1024
_TOO_BIG = "string or blob too big"

# The server's words for a lock that was not to be had, and for one that was taken away: either way
# nothing was written.
BUSY = {"SQLITE_BUSY", "SQLITE_LOCKED", "TRANSACTION_TIMEOUT", "TRANSACTION_BUSY"}


class Address:
    """Where a server is, out of the URL that libSQL's own clients take."""

    def __init__(self, url: str, auth_token: str | None) -> None:
        parts = urlsplit(url)
        options = parse_qs(parts.query)
        scheme = _SCHEMES.get(parts.scheme.lower())
        if scheme is None or not parts.hostname:
            raise InvalidArgument("url", url, WANTED_URL)
        if options.get("tls") == ["0"]:
            scheme = "http"
        host = parts.netloc.rpartition("@")[2]
        self.base = urlunsplit((scheme, host, parts.path.rstrip("/"), "", ""))
        self.token = auth_token or next(iter(options.get("authToken", [])), None)
        if self.token is not None and not (self.token.isascii() and self.token.isprintable()):
            raise InvalidArgument("auth_token", "…", "a token without line ends, as one header")


class Server:
    """Drives verbs: each of their rounds is part of one request and one transaction."""

    def __init__(
        self,
        address: Address,
        *,
        client: Any,
        timeout: timedelta,
        connect_timeout: timedelta,
        clock: Clock,
    ) -> None:
        self.where = address.base
        self._http = http_to(self.where, client, timeout.total_seconds())
        self._headers = {"content-type": "application/json"}
        if address.token is not None:
            self._headers["authorization"] = f"Bearer {address.token}"
        self._connect_timeout = connect_timeout.total_seconds()
        self._clock = clock
        self._writes = Rounds(self._send)

    async def drive(
        self, verb: Callable[[], Verb[T]], *, writes: bool, repeatable: bool = True
    ) -> T:
        """Give what a verb gives; a `repeatable` one is sent again when no answer came."""
        driven = verb()
        try:
            statements = next(driven)
            while True:
                outcomes = await self._round(statements, writes=writes, repeatable=repeatable)
                statements = driven.send(outcomes)
        except StopIteration as done:
            answer: T = done.value
            return answer

    async def _round(
        self, statements: Sequence[Statement], *, writes: bool, repeatable: bool
    ) -> Sequence[Outcome]:
        try:
            if writes:
                return await self._writes.put(statements, repeatable)
            return await self._send(statements, atomic=False)
        except Refused as error:
            if not is_too_large(error) or not all(map(_only_reads, statements)):
                raise
        # Nothing is written by these: they may be sent again.
        return await PagedRead(self.pipeline).read(statements)

    async def patiently(self, act: Callable[[], Awaitable[T]], *, repeatable: bool) -> T:
        """Give what `act` gives, trying again while the server is away or locked."""
        began = self._clock.monotonic()
        pause = _FIRST_PAUSE
        while True:
            try:
                return await act()
            except (Unanswered, Refused) as error:
                tried, refused = self._clock.monotonic() - began, isinstance(error, Refused)
                if not _is_worth_trying(error, repeatable):
                    raise
                if tried + pause > self._connect_timeout:
                    said = f"libSQL at {self.where}: {error}" if refused else f"{error}"
                    raise StoreUnavailable(f"{said} (tried for {tried:.1f}s)") from error
            await self._clock.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    async def pipeline(
        self,
        requests: Sequence[Mapping[str, Any]],
        baton: str | None = None,
        base_url: str | None = None,
    ) -> Answer:
        """Send one pipeline and give its answer."""
        try:
            body = msgspec.json.encode({"baton": baton, "requests": requests})
        except UnicodeEncodeError as error:
            raise StoreError(f"a text cannot be stored: {error}") from error
        url = f"{base_url or self.where}/v2/pipeline"
        reply = await self._http.post(url, body, self._headers)
        self._check(reply)
        answer = msgspec.json.decode(reply.body)
        return Answer(answer["results"], answer.get("baton"), answer.get("base_url"))

    async def close(self) -> None:
        """Close our own connections; a client that was passed in stays open."""
        await self._writes.drained()
        await self._http.close()

    async def _send(
        self, statements: Sequence[Statement], repeatable: bool = True, *, atomic: bool = True
    ) -> Sequence[Outcome]:
        # A lone statement is its own transaction.
        lone = len(statements) == 1
        request = executing(statements[0]) if lone else batching(statements, atomic=atomic)

        async def once() -> Sequence[Outcome]:
            result = (await self.pipeline([request, CLOSE])).results[0]
            if lone:
                return [outcome_of(result)]
            return outcomes_of(result, len(statements), atomic=atomic)

        try:
            return await self.patiently(once, repeatable=repeatable)
        except Refused as error:
            if _TOO_BIG not in f"{error}":
                raise
            what = f"a value for libSQL at {self.where}"
            raise ValueTooLarge(what, _largest(statements), VALUE_SIZE) from error

    def _check(self, reply: Reply) -> None:
        status = reply.status
        if status < 400:
            return
        text = reply.body[:200].decode(errors="replace")
        said = f"libSQL at {self.where} answered HTTP {status}: {text}"
        if status in (401, 403):
            raise StoreError(f"{said}; pass the right auth_token")
        if status >= 500:
            raise Unanswered(f"{said}; it may have done what was asked", sent=True)
        raise StoreError(said)


def _only_reads(statement: Statement) -> bool:
    return statement.sql.lstrip().startswith("SELECT")


def _largest(statements: Sequence[Statement]) -> int:
    """Return the size of the largest value of the statements, in bytes."""
    values = chain.from_iterable(
        one.values.values() if isinstance(one.values, Mapping) else one.values for one in statements
    )
    texts = (value.encode() if isinstance(value, str) else value for value in values)
    return max((len(text) for text in texts if isinstance(text, bytes)), default=0)


def _is_worth_trying(error: Unanswered | Refused, repeatable: bool) -> bool:
    if isinstance(error, Refused):
        return error.code in BUSY
    return repeatable or not error.sent


def http_to(where: str, client: Any, timeout: float) -> Http:
    """Give the way to post there: over our own connections, where nothing stands in between."""
    httpx = _load_httpx()
    parts = urlsplit(where)
    proxies = getproxies().keys() & {parts.scheme, "all"}
    if client is not None or (proxies and not proxy_bypass(parts.hostname or "")):
        return ClientHttp(httpx, client, where, timeout)
    return LinkHttp(httpx.create_ssl_context, where, timeout)


def _load_httpx() -> Any:
    try:
        import httpx
    except ImportError:
        raise MissingDependency("httpx", "libsql") from None
    return httpx
