"""Reads whose result exceeds the maximum response size of a libSQL server, 10 MB by default."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from string import Template
from typing import Any, TypeAlias

from perdure.errors import StoreError
from perdure.stores.libsql.hrana import CLOSE, Answer, StatementError, execute_request, read_outcome
from perdure.stores.sqlite.statements import Outcome, Statement

Pipeline: TypeAlias = Callable[
    [Sequence[Mapping[str, Any]], str | None, str | None], Awaitable[Answer]
]

_BEGIN = Statement("BEGIN", ())
_PAGE = Template("SELECT * FROM ($read) LIMIT $rows OFFSET $after")
_ROWS = 64


def is_too_large(error: StatementError) -> bool:
    """Return whether the rows did not fit in one response."""
    return error.code == "RESPONSE_TOO_LARGE"


class PagedRead:
    """Reads a page at a time, in one transaction, so that all pages show the same state."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._baton: str | None = None
        self._base_url: str | None = None

    async def read(self, statements: Sequence[Statement]) -> list[Outcome]:
        """Return the outcomes of statements that only read."""
        try:
            await self._execute(_BEGIN)
            return [await self._read(statement) for statement in statements]
        finally:
            # If this fails, the server ends the transaction after a timeout.
            with suppress(StoreError):
                await self._send(CLOSE)

    async def _read(self, statement: Statement) -> Outcome:
        rows: list[tuple[Any, ...]] = []
        size = _ROWS
        while True:
            sql = _PAGE.substitute(read=statement.sql, rows=size, after=len(rows))
            try:
                page = await self._execute(Statement(sql, statement.values))
            except StatementError as error:
                if not is_too_large(error) or size == 1:
                    raise
                size //= 4
                continue
            rows += page.rows
            if len(page.rows) < size:
                return Outcome(rows, 0)

    async def _execute(self, statement: Statement) -> Outcome:
        return read_outcome(await self._send(execute_request(statement)))

    async def _send(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        baton, self._baton = self._baton, None
        answer = await self._pipeline([request], baton, self._base_url)
        self._baton, self._base_url = answer.baton, answer.base_url or self._base_url
        return answer.results[0]
