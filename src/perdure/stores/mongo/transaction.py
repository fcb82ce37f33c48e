"""A user's own writes that commit with a step's entry, on a server that has transactions.

The entry's slot is the fence here as everywhere. While the transaction is open, a seal for that
slot waits for its end; when it has committed, whoever seals finds the entry and all that came with
it. The run's own document is not written: an owner's lease is renewed while its transaction is
open, and the two would refuse each other.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from pymongo.asynchronous.client_session import AsyncClientSession
from pymongo.asynchronous.database import AsyncDatabase
from pymongo.errors import OperationFailure
from pymongo.read_concern import ReadConcern

from perdure.errors import InvalidArgument, StoreUnavailable
from perdure.store import Entry, Verdict
from perdure.stores.mongo.append import Appender, Plan
from perdure.stores.mongo.batch import Turn
from perdure.stores.mongo.connection import Connection
from perdure.stores.mongo.errors import is_away
from perdure.stores.mongo.schema import Collections

_CONFLICT = 112


@dataclass(frozen=True, slots=True)
class MongoTransaction:
    """The store's session in a transactional step: what is written with it commits with the step.

    async def debit(transaction: MongoTransaction) -> None:
        accounts = transaction.database["accounts"]
        await accounts.update_one(
            {"_id": "ana"}, {"$inc": {"balance": -5}}, session=transaction.session
        )
    """

    session: AsyncClientSession
    database: AsyncDatabase[Any]


Work = Callable[[MongoTransaction], Awaitable[Entry]]


class Transactor:
    """Runs work in a transaction that an entry ends."""

    def __init__(
        self, connection: Connection[Collections], prefix: str, appender: Appender
    ) -> None:
        self._connection = connection
        self._prefix = prefix
        self._appender = appender

    async def transact(
        self, id: str, epoch: int, work: Work, check: Callable[[Entry], None]
    ) -> Verdict:
        """Commit what `work` writes together with the entry it returns."""
        use = self._connection.use
        key = self._prefix + id
        async with use() as db:
            verdict = await _fence(db, key, epoch)
            if verdict is not Verdict.ACCEPTED:
                return verdict
            session = db.client.start_session()
        async with session:
            async with use():
                concern = db.database.write_concern
                await session.start_transaction(ReadConcern("snapshot"), concern)
            # What the user's code raises comes out as it is, and so it is called outside.
            database = db.client.get_database(db.database.name)
            try:
                entry = await work(MongoTransaction(session, database))
            except Exception as error:
                if lost := _lost_connection(error):
                    words = f"MongoDB went away in a transaction of run {id!r}: {lost}"
                    raise StoreUnavailable(words) from error
                raise
            if (entry.id, entry.epoch) != (id, epoch):
                expected = f"a function that gives an entry of run {id!r} and epoch {epoch}"
                raise InvalidArgument("work", entry, expected)
            check(entry)
            async with use(), self._appender.writing([key]):
                return await self._end(db, session, Turn(key, [entry]))

    async def _end(self, db: Collections, session: AsyncClientSession, turn: Turn) -> Verdict:
        plan = self._appender.plan_by_memory(db, turn) or await self._plan(db, turn)
        if isinstance(plan, Verdict):
            return plan
        if await _commit(session, plan):
            await self._appender.written(db, turn, plan)
            return Verdict.ACCEPTED
        settled = await self._plan(db, turn)
        if isinstance(settled, Verdict):
            return settled
        raise StoreUnavailable(f"run {turn.last.id!r} was written at the same moment; try again")

    async def _plan(self, db: Collections, turn: Turn) -> Plan | Verdict:
        plan = await self._appender.plan(db, turn)
        if plan is not Verdict.ACCEPTED:
            return plan
        # In an open epoch, an entry that was there before means that the user's writes were, too. A
        # rest accepts all entries before it, whether they were written or not.
        return await _fence(db, turn.key, turn.last.epoch)


async def _fence(db: Collections, key: str, epoch: int) -> Verdict:
    run = await db.runs.find_one({"_id": key}, {"epoch": 1, "owner": 1})
    if run is None:
        return Verdict.UNKNOWN
    is_open = run.get("epoch") == epoch and run.get("owner") is not None
    return Verdict.ACCEPTED if is_open else Verdict.FENCED


def _lost_connection(error: BaseException) -> BaseException | None:
    """Return the driver's error that says that the connection was lost, if one led to this one."""
    seen: BaseException | None = error
    while seen is not None:
        if is_away(seen) and getattr(seen, "code", None) != _CONFLICT:
            return seen
        seen = seen.__cause__ or seen.__context__
    return None


async def _commit(session: AsyncClientSession, plan: Plan) -> bool:
    try:
        if not await plan.execute(session):
            return False
    except OperationFailure as error:
        if error.code != _CONFLICT:
            raise
        return False
    await session.commit_transaction()
    return True
