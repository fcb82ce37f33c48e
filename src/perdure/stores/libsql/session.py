"""A transaction on a libSQL server: a stream that stays open between requests."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from perdure.errors import StoreError, StoreUnavailable
from perdure.stores.libsql.hrana import CLOSE, Refused, executing, outcome_of
from perdure.stores.libsql.server import BUSY, Server
from perdure.stores.sqlite.runs import Verb
from perdure.stores.sqlite.statements import Outcome, Statement
from perdure.stores.sqlite.transaction import Session, Values

T = TypeVar("T")

_BEGIN = Statement("BEGIN IMMEDIATE", ())
_COMMIT = Statement("COMMIT", ())


class StreamSession(Session):
    """One stream of the server's with a transaction on it. The baton names it, and changes."""

    def __init__(self, server: Server) -> None:
        super().__init__(server)
        self._server = server
        self._baton: str | None = None
        self._base_url: str | None = None

    async def begin(self, verb: Callable[[], Verb[T]]) -> T:
        """Open the transaction with the right to write, and give what the verb gives in it."""
        await self._server.patiently(self._begin, repeatable=True)
        self.open = True
        return await self._drive(verb())

    async def execute(self, sql: str, values: Values) -> Outcome:
        """Give what one statement of the user's gives; `StoreError` holds what the server says."""
        if not self.open:
            raise StoreError("the transaction is over; its connection cannot be used any more")
        try:
            [outcome] = await self._round([Statement(sql, values)])
        except StoreUnavailable as error:
            self.lost = error
            raise
        return outcome

    async def finish(self, verb: Callable[[], Verb[bool]]) -> bool:
        """Drive the verb and commit if it says so; roll back if not, or if it fails."""
        written = await self._drive(verb())
        if written:
            await self._round([_COMMIT])
        return written

    async def end(self) -> None:
        """Close the stream, which rolls back what was not committed."""
        self.open = False
        if self._baton is not None:
            # Where the server cannot be told, it finds out by itself after some seconds.
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
            answer: T = done.value
            return answer

    async def _round(self, statements: Sequence[Statement]) -> Sequence[Outcome]:
        results = await self._send([executing(statement) for statement in statements])
        try:
            return [outcome_of(result) for result in results]
        except Refused as error:
            if self.open and error.code in BUSY:
                raise StoreUnavailable(
                    f"libSQL at {self._server.where} ended the transaction: {error}; it does so "
                    "when others have waited for 5 seconds: do what takes long outside of it"
                ) from error
            raise

    async def _send(self, requests: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
        baton, self._baton = self._baton, None
        answer = await self._server.pipeline(requests, baton, self._base_url)
        self._baton, self._base_url = answer.baton, answer.base_url or self._base_url
        return answer.results
