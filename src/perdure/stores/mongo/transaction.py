"""Commit a user's own writes with a step's entry, on a server that has transactions.

The entry's slot is the fence, as everywhere. While the transaction is open, a seal for that slot
waits for its end; once it has committed, a process that seals the log finds the entry, and
everything that was written with it. The run's own document is not written: the lease is renewed
while the transaction is open, and the two writes would conflict.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from pymongo.asynchronous.client_session import AsyncClientSession
from pymongo.asynchronous.database import AsyncDatabase
from pymongo.errors import OperationFailure
from pymongo.read_concern import ReadConcern

from perdure.errors import StoreUnavailable
from perdure.store import Entry, Verdict
from perdure.stores.mongo.append import Appender, PendingWrite
from perdure.stores.mongo.batch import RunBatch
from perdure.stores.mongo.connection import Connection
from perdure.stores.mongo.errors import WRITE_CONFLICT, is_unavailable
from perdure.stores.mongo.schema import Collections


@dataclass(frozen=True, slots=True)
class MongoTransaction:
    """The store's session in a transactional step; its writes are committed with the step.

    async def debit(transaction: MongoTransaction) -> None:
        accounts = transaction.database["accounts"]
        await accounts.update_one(
            {"_id": "ana"}, {"$inc": {"balance": -5}}, session=transaction.session
        )
    """

    session: AsyncClientSession
    database: AsyncDatabase[Any]


async def transact(
    connection: Connection[Collections],
    appender: Appender,
    key: str,
    epoch: int,
    work: Callable[[MongoTransaction], Awaitable[Entry]],
) -> Verdict:
    """Commit the writes of `work` together with the entry it returns."""
    with connection.use() as db:
        verdict = await _fence(db, key, epoch)
        if verdict is not Verdict.ACCEPTED:
            return verdict
        session = db.client.start_session()
    async with session:
        with connection.use():
            concern = db.database.write_concern
            await session.start_transaction(ReadConcern("snapshot"), concern)
        # Outside of `use`: errors of the user's code are raised unchanged.
        database = db.client.get_database(db.database.name)
        try:
            entry = await work(MongoTransaction(session, database))
        except Exception as error:
            if failure := _lost_connection(error):
                message = f"MongoDB became unavailable in a transaction of run {key!r}: {failure}"
                raise StoreUnavailable(message) from error
            raise
        with connection.use():
            async with appender.lock([key]):
                return await _end(db, session, appender, RunBatch(key, [entry]))


async def _end(
    db: Collections, session: AsyncClientSession, appender: Appender, batch: RunBatch
) -> Verdict:
    write = appender.next_write(db, batch) or await _plan(db, appender, batch)
    if isinstance(write, Verdict):
        return write
    if await _commit(session, write):
        await appender.confirm(db, batch, write)
        return Verdict.ACCEPTED
    verdict = await _plan(db, appender, batch)
    if isinstance(verdict, Verdict):
        return verdict
    raise StoreUnavailable(f"run {batch.last.id!r} was written at the same time; try again")


async def _plan(db: Collections, appender: Appender, batch: RunBatch) -> PendingWrite | Verdict:
    write = await appender.plan_write(db, batch)
    if write is not Verdict.ACCEPTED:
        return write
    # In an open epoch, an existing entry means that the user's writes exist too. A rest accepts all
    # entries before it, whether they were written or not.
    return await _fence(db, batch.key, batch.last.epoch)


async def _fence(db: Collections, key: str, epoch: int) -> Verdict:
    run = await db.runs.find_one({"_id": key}, {"epoch": 1, "owner": 1})
    if run is None:
        return Verdict.UNKNOWN
    is_open = run.get("epoch") == epoch and run.get("owner") is not None
    return Verdict.ACCEPTED if is_open else Verdict.FENCED


def _lost_connection(error: BaseException) -> BaseException | None:
    """Return the underlying driver error that means a lost connection, if there is one."""
    cause: BaseException | None = error
    while cause is not None:
        if is_unavailable(cause) and getattr(cause, "code", None) != WRITE_CONFLICT:
            return cause
        cause = cause.__cause__ or cause.__context__
    return None


async def _commit(session: AsyncClientSession, write: PendingWrite) -> bool:
    try:
        if not await write.execute(session):
            return False
    except OperationFailure as error:
        if error.code != WRITE_CONFLICT:
            raise
        return False
    await session.commit_transaction()
    return True
