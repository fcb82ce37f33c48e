"""A transaction on a libSQL server: a stream that stays open between requests."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from perdure.errors import StoreError, StoreUnavailable
from perdure.stores.libsql.hrana import CLOSE, StatementError, execute_request, read_outcome
from perdure.stores.libsql.server import BUSY, Server
from perdure.stores.sqlite.runs import Verb
from perdure.stores.sqlite.statements import Outcome, Statement
from perdure.stores.sqlite.transaction import Session, Values

T = TypeVar("T")

_BEGIN = Statement("BEGIN IMMEDIATE", ())
_COMMIT = Statement("COMMIT", ())


class StreamSession(Session):
    """A server stream with an open transaction, identified by the latest baton."""

    def __init__(self, server: Server) -> None:
        super().__init__(server)
        self._server = server
        self._baton: str | None = None
        self._base_url: str | None = None

    async def begin(self, verb: Callable[[], Verb[T]]) -> T:
        """Begin a transaction that may write, and return the result of the verb in it."""
        await self._server.retry(self._begin, repeatable=True)
        self.open = True
        return await self._drive(verb())

    async def execute(self, sql: str, values: Values) -> Outcome:
        """Run one statement of the user; an error is raised as a `StoreError`."""
        if not self.open:
            raise StoreError("the transaction is over; its connection can no longer be used")
        try:
            [outcome] = await self._round([Statement(sql, values)])
        except StoreUnavailable as error:
            self.failure = error
            raise
        return outcome

    async def finish(self, verb: Callable[[], Verb[bool]]) -> bool:
        """Run the verb and commit if it returns `True`; otherwise roll back."""
        is_written = await self._drive(verb())
        if is_written:
            await self._round([_COMMIT])
        return is_written

    async def end(self) -> None:
        """Close the stream, which rolls back what was not committed."""
        self.open = False
        if self._baton is not None:
            # If this fails, the server ends the transaction after a few seconds.
            with suppress(StoreError):
                await self._send([CLOSE])

    async def _begin(self) -> None:
        try:
            await self._round([_BEGIN])
        except BaseException:
            await self.end()
            raise

    async def _drive(self, verb: Verb[T]) -> T:
        try:
            statements = next(verb)
            while True:
                statements = verb.send(await self._round(statements))
        except StopIteration as done:
            result: T = done.value
            return result

    async def _round(self, statements: Sequence[Statement]) -> Sequence[Outcome]:
        results = await self._send([execute_request(statement) for statement in statements])
        try:
            return [read_outcome(result) for result in results]
        except StatementError as error:
            if self.open and error.code in BUSY:
                raise StoreUnavailable(
                    f"libSQL at {self._server.url} ended the transaction: {error}; it does so "
                    "when others have waited for 5 seconds, so do slow work outside the "
                    "transaction"
                ) from error
            raise

    async def _send(self, requests: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
        baton, self._baton = self._baton, None
        answer = await self._server.pipeline(requests, baton, self._base_url)
        self._baton, self._base_url = answer.baton, answer.base_url or self._base_url
        return answer.results
