"""A libSQL server over HTTP: sends rounds of statements, and retries while it is unavailable."""

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
from perdure.stores.libsql.batching import RoundQueue
from perdure.stores.libsql.hrana import (
    CLOSE,
    Answer,
    StatementError,
    batch_request,
    execute_request,
    read_outcome,
    read_outcomes,
)
from perdure.stores.libsql.http import (
    HttpxTransport,
    NoResponse,
    Response,
    StreamTransport,
    Transport,
)
from perdure.stores.libsql.pages import PagedRead, is_too_large
from perdure.stores.sqlite.runs import Verb
from perdure.stores.sqlite.statements import Outcome, Statement

T = TypeVar("T")

EXPECTED_URL = "libsql://host, https://host, http://host:port, or file:path"

_SCHEMES = {"libsql": "https", "https": "https", "wss": "https", "http": "http", "ws": "http"}
_FIRST_DELAY, _MAX_DELAY = 0.02, 1.0

# The server accepts rows of up to half its --max-response-size, which is 10 MB by default. The rest
# is headroom for the other columns of the row.
VALUE_SIZE = 4_608 * 1024
_TOO_BIG = "string or blob too big"

# Codes for a lock that was not granted or was revoked: nothing was written.
BUSY = {"SQLITE_BUSY", "SQLITE_LOCKED", "TRANSACTION_TIMEOUT", "TRANSACTION_BUSY"}


class Address:
    """A server's HTTP address and token, from any URL that libSQL's own clients accept."""

    def __init__(self, url: str, auth_token: str | None) -> None:
        parts = urlsplit(url)
        options = parse_qs(parts.query)
        scheme = _SCHEMES.get(parts.scheme.lower())
        if scheme is None or not parts.hostname:
            raise InvalidArgument("url", url, EXPECTED_URL)
        if options.get("tls") == ["0"]:
            scheme = "http"
        host = parts.netloc.rpartition("@")[2]
        self.base = urlunsplit((scheme, host, parts.path.rstrip("/"), "", ""))
        self.token = auth_token or next(iter(options.get("authToken", [])), None)
        if self.token is not None and not (self.token.isascii() and self.token.isprintable()):
            raise InvalidArgument(
                "auth_token", "…", "a token of printable ASCII, without line breaks"
            )


class Server:
    """Runs operations; each of their rounds is part of one request and one transaction."""

    def __init__(
        self,
        address: Address,
        *,
        client: Any,
        timeout: timedelta,
        connect_timeout: timedelta,
        clock: Clock,
    ) -> None:
        self.url = address.base
        self._transport = open_transport(self.url, client, timeout.total_seconds())
        self._headers = {"content-type": "application/json"}
        if address.token is not None:
            self._headers["authorization"] = f"Bearer {address.token}"
        self._connect_timeout = connect_timeout.total_seconds()
        self._clock = clock
        self._writes = RoundQueue(self._send)

    async def drive(
        self, verb: Callable[[], Verb[T]], *, writes: bool, repeatable: bool = True
    ) -> T:
        """Run an operation and return its result.

        After a lost reply, it is sent again if it is `repeatable`.
        """
        rounds = verb()
        try:
            statements = next(rounds)
            while True:
                outcomes = await self._round(statements, writes=writes, repeatable=repeatable)
                statements = rounds.send(outcomes)
        except StopIteration as done:
            result: T = done.value
            return result

    async def _round(
        self, statements: Sequence[Statement], *, writes: bool, repeatable: bool
    ) -> Sequence[Outcome]:
        try:
            if writes:
                return await self._writes.put(statements, repeatable)
            return await self._send(statements, atomic=False)
        except StatementError as error:
            if not is_too_large(error) or not all(map(Statement.only_reads, statements)):
                raise
        # These only read, so they can be sent again.
        return await PagedRead(self.pipeline).read(statements)

    async def retry(self, call: Callable[[], Awaitable[T]], *, repeatable: bool) -> T:
        """Return what `call` returns, retrying while the server is unavailable or locked."""
        start = self._clock.monotonic()
        delay = _FIRST_DELAY
        while True:
            try:
                return await call()
            except (NoResponse, StatementError) as error:
                if not _is_retryable(error, repeatable):
                    raise
                elapsed = self._clock.monotonic() - start
                if elapsed + delay > self._connect_timeout:
                    at = "" if isinstance(error, NoResponse) else f"libSQL at {self.url}: "
                    raise StoreUnavailable(f"{at}{error} (tried for {elapsed:.1f}s)") from error
            await self._clock.sleep(delay)
            delay = min(2 * delay, _MAX_DELAY)

    async def pipeline(
        self,
        requests: Sequence[Mapping[str, Any]],
        baton: str | None = None,
        base_url: str | None = None,
    ) -> Answer:
        """Send one pipeline and return its answer."""
        try:
            body = msgspec.json.encode({"baton": baton, "requests": requests})
        except UnicodeEncodeError as error:
            raise StoreError(f"a string cannot be stored: {error}") from error
        url = f"{base_url or self.url}/v2/pipeline"
        response = await self._transport.post(url, body, self._headers)
        self._check(response)
        answer = msgspec.json.decode(response.body)
        return Answer(answer["results"], answer.get("baton"), answer.get("base_url"))

    async def close(self) -> None:
        """Close our own connections; a client that was passed in stays open."""
        await self._writes.drain()
        await self._transport.close()

    def forget_loop(self) -> None:
        """Drop everything that was bound to an event loop that has ended."""
        self._writes.forget_loop()
        self._transport.forget_loop()

    async def _send(
        self, statements: Sequence[Statement], repeatable: bool = True, *, atomic: bool = True
    ) -> Sequence[Outcome]:
        # A single statement is its own transaction.
        single = len(statements) == 1
        if single:
            request = execute_request(statements[0])
        else:
            request = batch_request(statements, atomic=atomic)

        async def send() -> Sequence[Outcome]:
            result = (await self.pipeline([request, CLOSE])).results[0]
            if single:
                return [read_outcome(result)]
            return read_outcomes(result, len(statements), atomic=atomic)

        try:
            return await self.retry(send, repeatable=repeatable)
        except StatementError as error:
            if _TOO_BIG not in f"{error}":
                raise
            what = f"a value for libSQL at {self.url}"
            raise ValueTooLarge(what, _largest(statements), VALUE_SIZE) from error

    def _check(self, response: Response) -> None:
        status = response.status
        if status < 400:
            return
        text = response.body[:200].decode(errors="replace")
        message = f"libSQL at {self.url} answered HTTP {status}: {text}"
        if status in (401, 403):
            raise StoreError(f"{message}; pass a valid auth_token")
        if status >= 500:
            raise NoResponse(f"{message}; it may have executed the request", was_sent=True)
        raise StoreError(message)


def _largest(statements: Sequence[Statement]) -> int:
    """Return the size of the largest value of the statements, in bytes."""
    values = chain.from_iterable(
        one.values.values() if isinstance(one.values, Mapping) else one.values for one in statements
    )
    texts = (value.encode() if isinstance(value, str) else value for value in values)
    return max((len(text) for text in texts if isinstance(text, bytes)), default=0)


def _is_retryable(error: NoResponse | StatementError, repeatable: bool) -> bool:
    if isinstance(error, StatementError):
        return error.code in BUSY
    return repeatable or not error.was_sent


def open_transport(url: str, client: Any, timeout: float) -> Transport:
    """Return the transport to a server: httpx if a client was passed in or a proxy is set."""
    httpx = _load_httpx()
    parts = urlsplit(url)
    proxies = getproxies().keys() & {parts.scheme, "all"}
    if client is not None or (proxies and not proxy_bypass(parts.hostname or "")):
        return HttpxTransport(httpx, client, url, timeout)
    return StreamTransport(httpx.create_ssl_context, url, timeout)


def _load_httpx() -> Any:
    try:
        import httpx
    except ImportError:
        raise MissingDependency("httpx", "libsql") from None
    return httpx
