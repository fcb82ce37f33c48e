"""A transaction that stays open while a coroutine works in it, and the coroutine's view of it."""

import re
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, TypeAlias, TypeVar

from perdure.errors import InvalidArgument, StoreError, StoreUnavailable
from perdure.stores.sqlite.runs import Verb
from perdure.stores.sqlite.statements import Outcome

T = TypeVar("T")
Values: TypeAlias = Sequence[Any] | Mapping[str, Any]

_ENDS_TRANSACTION = re.compile(
    r"(?:\s|--[^\n]*\n|/\*.*?\*/)*(?:BEGIN|COMMIT|END|ROLLBACK(?!.*\bTO\b))\b",
    re.IGNORECASE | re.DOTALL,
)

_inside: ContextVar["Session | None"] = ContextVar("perdure_sqlite_session", default=None)


class Session(ABC):
    """One transaction, of the store or database it is made for. At last, `end` is always called."""

    def __init__(self, home: object) -> None:
        self.home = home
        self.open = False
        self.lost: StoreUnavailable | None = None
        """Why the transaction cannot go on, when the database failed while it was used."""

    @abstractmethod
    async def begin(self, verb: Callable[[], Verb[T]]) -> T:
        """Open the transaction with the right to write, and give what the verb gives in it."""

    @abstractmethod
    async def execute(self, sql: str, values: Values) -> Outcome:
        """Give what one statement of the user's gives."""

    @abstractmethod
    async def finish(self, verb: Callable[[], Verb[bool]]) -> bool:
        """Drive the verb and commit if it says so; roll back if not, or if it fails."""

    @abstractmethod
    async def end(self) -> None:
        """Roll back what was not committed."""

    async def enter(
        self, work: Callable[["Transaction"], Awaitable[T]], transaction: "Transaction"
    ) -> T:
        """Give what `work` gives; while it runs it cannot call the store whose writer it holds."""
        token = _inside.set(self)
        try:
            return await work(transaction)
        except Exception as error:
            if self.lost is not None:
                raise StoreUnavailable(f"{self.lost}") from error
            raise
        finally:
            _inside.reset(token)


def check_outside(home: object) -> None:
    """Raise inside an open transaction of the same home: a write there would wait for itself."""
    session = _inside.get()
    if session is not None and session.open and session.home is home:
        raise StoreError(
            "the store was called inside its own transaction, which would wait for itself; "
            "use the connection that the transaction gave"
        )


class Transaction:
    """The store's connection in a transactional step: what is written here commits with the step.

    async def debit(transaction: Transaction) -> None:
        await transaction.execute("UPDATE account SET balance = balance - ? WHERE id = ?", (5, "a"))
    """

    def __init__(self, session: Session) -> None:
        self._session = session

    async def execute(self, sql: str, values: Values = (), /) -> int:
        """Run one statement and give how many rows it changed."""
        return (await self._run(sql, values)).changed

    async def fetchall(self, sql: str, values: Values = (), /) -> Sequence[tuple[Any, ...]]:
        """Give all rows of one statement."""
        return (await self._run(sql, values)).rows

    async def fetchone(self, sql: str, values: Values = (), /) -> tuple[Any, ...] | None:
        """Give the first row of one statement, or None."""
        rows = (await self._run(sql, values)).rows
        return rows[0] if rows else None

    async def _run(self, sql: str, values: Values) -> Outcome:
        if _ENDS_TRANSACTION.match(sql):
            hint = "The store begins and ends the transaction; raise an exception to roll it back"
            raise InvalidArgument("sql", sql, "a statement that leaves the transaction open", hint)
        return await self._session.execute(sql, values)
