"""A transaction that stays open while user code runs, and the user's view of it."""

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

_current: ContextVar["Session | None"] = ContextVar("perdure_sqlite_session", default=None)


class Session(ABC):
    """One transaction of a database. `end` is always called last.

    `target` is the database or server: the store on it cannot be called in the meantime.
    """

    def __init__(self, target: object) -> None:
        self.target = target
        self.open = False
        self.failure: StoreUnavailable | None = None
        """The error after which the transaction cannot continue, if the database failed."""

    @abstractmethod
    async def begin(self, verb: Callable[[], Verb[T]]) -> T:
        """Begin a transaction that may write, and return the result of the operation in it."""

    @abstractmethod
    async def execute(self, sql: str, values: Values) -> Outcome:
        """Run one statement of the user and return its outcome."""

    @abstractmethod
    async def finish(self, verb: Callable[[], Verb[bool]]) -> bool:
        """Run the operation and commit if it returns `True`; otherwise roll back."""

    @abstractmethod
    async def end(self) -> None:
        """Roll back unless committed."""

    async def enter(
        self, work: Callable[["Transaction"], Awaitable[T]], transaction: "Transaction"
    ) -> T:
        """Run `work`; in the meantime, calls of the same store are refused."""
        token = _current.set(self)
        try:
            return await work(transaction)
        except Exception as error:
            if self.failure is not None:
                raise StoreUnavailable(f"{self.failure}") from error
            raise
        finally:
            _current.reset(token)


def check_not_inside(target: object) -> None:
    """Raise inside an open transaction on the same target: a write there would deadlock."""
    session = _current.get()
    if session is not None and session.open and session.target is target:
        raise StoreError(
            "the store was called inside its own transaction, which would deadlock; "
            "use the connection that the transaction provides"
        )


class Transaction:
    """The store's connection in a transactional step; writes are committed with the step's record.

    async def debit(transaction: Transaction) -> None:
        await transaction.execute("UPDATE account SET balance = balance - ? WHERE id = ?", (5, "a"))
    """

    def __init__(self, session: Session) -> None:
        self._session = session

    async def execute(self, sql: str, values: Values = (), /) -> int:
        """Run one statement and return how many rows it changed."""
        return (await self._run(sql, values)).changed

    async def fetchall(self, sql: str, values: Values = (), /) -> Sequence[tuple[Any, ...]]:
        """Run one statement and return all of its rows."""
        return (await self._run(sql, values)).rows

    async def fetchone(self, sql: str, values: Values = (), /) -> tuple[Any, ...] | None:
        """Run one statement and return its first row, or `None`."""
        rows = (await self._run(sql, values)).rows
        return rows[0] if rows else None

    async def _run(self, sql: str, values: Values) -> Outcome:
        if _ENDS_TRANSACTION.match(sql):
            hint = "The store begins and ends the transaction; raise an exception to roll it back"
            raise InvalidArgument("sql", sql, "a statement that leaves the transaction open", hint)
        return await self._session.execute(sql, values)
