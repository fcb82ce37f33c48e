"""Runs in libSQL: a local file, or a server over HTTP (sqld, Turso)."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

from perdure.clock import Clock, Duration, SystemClock, check_clock, parse_duration
from perdure.errors import InvalidArgument
from perdure.store import MAX_VALUE_SIZE, Capabilities, NewMessage, Receipt, SupportedVersions
from perdure.stores._handoff import Claimant, HandoffShell
from perdure.stores._reading import Granted
from perdure.stores._shell import TransactionShell
from perdure.stores.libsql.hrana import StatementError
from perdure.stores.libsql.pages import is_too_large
from perdure.stores.libsql.server import EXPECTED_URL, VALUE_SIZE, Address, Server
from perdure.stores.libsql.session import StreamSession
from perdure.stores.sqlite import SqliteStore, sqlite
from perdure.stores.sqlite.backend import SqliteSchemaBackend
from perdure.stores.sqlite.runs import Verb
from perdure.stores.sqlite.schema import Schema
from perdure.stores.sqlite.statements import Statements
from perdure.stores.sqlite.threads import MEMORY
from perdure.stores.sqlite.transaction import Session, Transaction, check_not_inside

__all__ = ["LibsqlStore", "Transaction", "libsql"]

T = TypeVar("T")


def libsql(
    url: str,
    *,
    auth_token: str | None = None,
    table: str = "perdure_runs",
    prefix: str = "",
    client: Any = None,
    connect_timeout: Duration = 10,
    timeout: Duration = 60,
    clock: Clock = SystemClock(),
    max_value_size: int | None = None,
) -> "LibsqlStore | SqliteStore":
    """Return a store on a libSQL server, or on a local file that `sqlite` may share.

    `client` is your own `httpx.AsyncClient`, which the store never closes. `connect_timeout` is how
    long to retry while the server is unavailable or locked, and `timeout` how long it may take to
    answer. `max_value_size` defaults to 16 MiB for a file and to 4.5 MiB for a server, which
    accepts no more by default.

        store = libsql("libsql://mydb-me.turso.io", auth_token=token)
        store = libsql("http://127.0.0.1:8080")
        store = libsql("file:./workflow.db")
    """
    check_clock(clock)
    retry_for = parse_duration(connect_timeout, "connect_timeout")
    if not isinstance(url, str):
        raise InvalidArgument("url", url, EXPECTED_URL)
    if url.startswith("file:") or url == MEMORY:
        if auth_token is not None or client is not None:
            raise InvalidArgument("url", url, "the URL of a server with auth_token or client")
        # Not through the libsql package: it bundles its own SQLite, and two SQLite libraries in one
        # process do not see each other's locks on a file.
        return sqlite(
            _path(url),
            prefix=prefix,
            table=table,
            busy_timeout=retry_for,
            clock=clock,
            max_value_size=MAX_VALUE_SIZE if max_value_size is None else max_value_size,
        )
    server = Server(
        Address(url, auth_token),
        client=client,
        timeout=parse_duration(timeout, "timeout"),
        connect_timeout=retry_for,
        clock=clock,
    )
    size = VALUE_SIZE if max_value_size is None else max_value_size
    return LibsqlStore(server, table=table, prefix=prefix, max_value_size=size)


class ServerBackend(SqliteSchemaBackend):
    """Runs operations on a libSQL server, whose clock is the store's clock."""

    def __init__(self, server: Server, statements: Statements, prefix: str) -> None:
        super().__init__(statements, prefix, lambda: None)
        self._server = server
        self._schema = Schema("migrations", statements.table)

    async def open(self) -> None:
        try:
            await self._server.drive(self._schema.migrate, writes=True)
        except StatementError:
            # Another process may have migrated at the same time.
            if await self._server.drive(self._schema.missing, writes=False):
                raise

    def forget_loop(self) -> None:
        self._server.forget_loop()

    async def close(self) -> None:
        await self._server.close()

    async def claim(
        self,
        owner: str,
        ttl: timedelta,
        limit: int,
        supports: Sequence[SupportedVersions] | None,
        queues: Mapping[str, int],
    ) -> Sequence[Granted]:
        def claim(most: int) -> Awaitable[Sequence[Granted]]:
            return super(ServerBackend, self).claim(owner, ttl, most, supports, queues)

        granted = await _with_limit(claim, limit)
        if granted is not None:
            return granted
        # A single snapshot always fits; its journal and inbox are then read in pages.
        verb = partial(self._leases.claim, owner, ttl, 1, supports, queues, separately=True)
        return await self._claim(verb)

    async def send_and_claim(
        self, messages: Sequence[NewMessage], claimant: Claimant
    ) -> tuple[Sequence[Receipt], Sequence[Granted]]:
        def send(most: int) -> Awaitable[tuple[Sequence[Receipt], Sequence[Granted]]]:
            return super(ServerBackend, self).send_and_claim(
                messages, claimant._replace(limit=most)
            )

        # The messages of a request whose response is too large are rolled back.
        handoff = await _with_limit(send, min(claimant.limit, len(messages)))
        if handoff is not None:
            return handoff
        claimant = claimant._replace(limit=1)
        verb = partial(self._handoffs.send_and_claim, messages, claimant, separately=True)
        return await self._hand_off(verb)

    async def _write(
        self,
        verb: Callable[[], Verb[T]],
        *,
        repeatable: bool = False,
        inline: bool = False,
    ) -> T:
        check_not_inside(self._server)
        return await self._server.drive(verb, writes=True, repeatable=repeatable)

    async def _read(self, verb: Callable[[], Verb[T]]) -> T:
        check_not_inside(self._server)
        return await self._server.drive(verb, writes=False)

    async def _session(self) -> Session:
        check_not_inside(self._server)
        return StreamSession(self._server)


class LibsqlStore(HandoffShell[ServerBackend], TransactionShell[ServerBackend]):
    """Stores runs on a libSQL server; see `libsql`.

    The server answers before the data is on disk, so a power loss may lose the most recent writes.
    It aborts a transaction that has kept others waiting for 5 seconds.
    """

    def __init__(
        self, server: Server, *, table: str, prefix: str = "", max_value_size: int = VALUE_SIZE
    ) -> None:
        capabilities = Capabilities(
            journal=True,
            lease="atomic",
            schedule=True,
            queues=True,
            inbox=True,
            transaction=True,
            handoff=True,
            maintenance=True,
            search=True,
            shared="network",
            survives="process_crash",
            max_value_size=max_value_size,
        )
        super().__init__(ServerBackend(server, Statements(table), prefix), "libSQL", capabilities)


async def _with_limit(call: Callable[[int], Awaitable[T]], limit: int) -> T | None:
    """Return the result of a call with up to `limit` runs, or fewer if their response is too large.

    Return `None` if the response is too large even for one.
    """
    while limit:
        try:
            return await call(limit)
        except StatementError as error:
            if not is_too_large(error):
                raise
        limit //= 2
    return None


def _path(url: str) -> str:
    """Return the path in a URL such as `file:x.db`, `file:./x.db` or `file:///folder/x.db`."""
    if url == MEMORY:
        return url
    parts = urlsplit(url)
    if parts.query or parts.fragment or parts.netloc not in ("", "localhost") or not parts.path:
        raise InvalidArgument("url", url, "file: and a path, and nothing after it")
    return unquote(parts.path)
