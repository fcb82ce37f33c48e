"""A libSQL server reached over HTTP: rounds of statements, and patience while it is away."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar
from urllib.parse import parse_qs, urlsplit, urlunsplit

import msgspec

from perdure.clock import Clock
from perdure.errors import InvalidArgument, MissingDependency, StoreError, StoreUnavailable
from perdure.stores._hrana import (
    CLOSE,
    Answer,
    Refused,
    batching,
    executing,
    outcome_of,
    outcomes_of,
)
from perdure.stores._libsql_rounds import Rounds, Unanswered
from perdure.stores._sqlite_sql import Outcome, Statement
from perdure.stores._sqlite_verbs import Verb

T = TypeVar("T")

WANTED_URL = "libsql://host, https://host, http://host:port, or file:path"

_SCHEMES = {"libsql": "https", "https": "https", "wss": "https", "http": "http", "ws": "http"}
_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 1.0

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


class Server:
    """Drives verbs: each of their rounds is part of one request and one transaction."""

    def __init__(
        self,
        address: Address,
        *,
        client: Any,
        timeout: timedelta,
        patience: timedelta,
        clock: Clock,
    ) -> None:
        self._httpx = httpx = _load_httpx()
        self._unsent = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)
        self.where = address.base
        self._token = address.token
        self._timeout = timeout.total_seconds()
        self._patience = patience.total_seconds()
        self._clock = clock
        self._lent = client
        self._own: Any = None
        self._home: asyncio.AbstractEventLoop | None = None
        self._writes = Rounds(self._send)

    async def drive(
        self, verb: Callable[[], Verb[T]], *, writes: bool, repeatable: bool = True
    ) -> T:
        """Give what a verb gives; a `repeatable` one is sent again when no answer came."""
        driven = verb()
        try:
            statements = next(driven)
            while True:
                if writes:
                    outcomes = await self._writes.put(statements, repeatable)
                else:
                    outcomes = await self._send(statements, atomic=False)
                statements = driven.send(outcomes)
        except StopIteration as done:
            answer: T = done.value
            return answer

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
                if tried + pause > self._patience:
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
        headers = {"content-type": "application/json"}
        if self._token is not None:
            headers["authorization"] = f"Bearer {self._token}"
        url = f"{base_url or self.where}/v2/pipeline"
        try:
            response = await self._client().post(
                url, content=body, headers=headers, timeout=self._timeout
            )
        except self._unsent as error:
            raise Unanswered(self._away(error), sent=False) from error
        except self._httpx.HTTPError as error:
            raise Unanswered(
                f"{self._away(error)}; it may have got the request", sent=True
            ) from error
        self._check(response)
        answer = msgspec.json.decode(response.content)
        return Answer(answer["results"], answer.get("baton"), answer.get("base_url"))

    async def close(self) -> None:
        """Close our own connections; a client that was passed in stays open."""
        await self._writes.drained()
        client, self._own = self._own, None
        if client is not None and self._home is asyncio.get_running_loop():
            await client.aclose()

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

        return await self.patiently(once, repeatable=repeatable)

    def _client(self) -> Any:
        if self._lent is not None:
            return self._lent
        loop = asyncio.get_running_loop()
        if self._own is None or self._home is not loop:
            # Connections of a loop that has ended are lost with it. Certificates take long to load
            # and are of no use to plain HTTP.
            secure = self.where.startswith("https:")
            self._own, self._home = self._httpx.AsyncClient(verify=secure), loop
        return self._own

    def _away(self, error: Exception) -> str:
        return f"libSQL at {self.where} does not answer: {str(error) or type(error).__name__}"

    def _check(self, response: Any) -> None:
        status: int = response.status_code
        if status < 400:
            return
        said = f"libSQL at {self.where} answered HTTP {status}: {response.text[:200]}"
        if status in (401, 403):
            raise StoreError(f"{said}; pass the right auth_token")
        if status >= 500:
            raise Unanswered(f"{said}; it may have done what was asked", sent=True)
        raise StoreError(said)


def _is_worth_trying(error: Unanswered | Refused, repeatable: bool) -> bool:
    if isinstance(error, Refused):
        return error.code in BUSY
    return repeatable or not error.sent


def _load_httpx() -> Any:
    try:
        import httpx
    except ImportError:
        raise MissingDependency("httpx", "libsql") from None
    return httpx
