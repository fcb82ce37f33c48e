"""SQLAlchemy sessions in transactional steps, on real servers."""

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from sqlalchemy import JSON, String, func, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from perdure import Runtime, Step, workflow
from perdure.errors import InvalidArgument
from perdure.integrations.sqlalchemy import session
from perdure.store import Store
from perdure.stores import mysql, postgres, sqlite
from perdure.testing import FaultyStore


class Base(DeclarativeBase):
    pass


class Reservation(Base):
    __tablename__ = "reservations"

    id: Mapped[int] = mapped_column(primary_key=True)
    order_id: Mapped[str] = mapped_column(String(50), unique=True)
    details: Mapped[dict[str, Any]] = mapped_column(JSON)


class Place:
    """A database with the table of the tests, and the store on it."""

    def __init__(self, store: Callable[[], Store], url: str) -> None:
        self.store = store
        self.engine = create_async_engine(url)

    async def reserved(self) -> list[str]:
        async with AsyncSession(self.engine) as db:
            rows = await db.scalars(select(Reservation.order_id).order_by(Reservation.id))
            return list(rows)


@pytest.fixture(params=["postgres", "mysql"])
async def place(request: pytest.FixtureRequest) -> AsyncIterator[Place]:
    url: str = request.getfixturevalue(f"{request.param}_url")
    if request.param == "postgres":
        dialect = url.replace("postgresql://", "postgresql+asyncpg://")
        place = Place(lambda: postgres(url), dialect)
    else:
        place = Place(lambda: mysql(url), url.replace("mysql://", "mysql+asyncmy://"))
    async with place.engine.begin() as connection:
        await connection.run_sync(Base.metadata.create_all)
    yield place
    await place.engine.dispose()


async def reserve(connection: Any, order_id: str) -> int:
    async with session(connection) as db:
        db.add(Reservation(order_id=order_id, details={"by": ["ana"]}))
    async with session(connection) as db:
        stored = await db.scalar(select(Reservation).where(Reservation.order_id == order_id))
        assert stored is not None
        assert stored.details == {"by": ["ana"]}
        return int(await db.scalar(select(func.count()).select_from(Reservation)) or 0)


@workflow("order")
async def order(step: Step, order_id: str) -> list[int]:
    return [await step.transaction(f"reserve {n}", reserve, f"{order_id}-{n}") for n in range(3)]


async def test_what_a_session_writes_is_committed_with_the_step(place: Place) -> None:
    async with Runtime(place.store(), workflows=[order]) as runtime:
        run = await runtime.trigger(order, "a", run_id="1")
        assert run.output == [1, 2, 3]
        await runtime.store.close()
    assert await place.reserved() == ["a-0", "a-1", "a-2"]


@workflow("order twice")
async def order_twice(step: Step, order_id: str) -> str:
    await step.transaction("first", reserve, order_id)
    try:
        await step.transaction("second", reserve, order_id)
    except Exception as error:  # noqa: BLE001
        return type(error).__name__
    return "reserved twice"


async def test_a_failure_undoes_what_the_session_wrote(place: Place) -> None:
    store = place.store()
    run = await Runtime(store, workflows=[order_twice]).trigger(order_twice, "a")
    await store.close()
    assert run.output == IntegrityError.__name__
    assert await place.reserved() == ["a"]


async def attempt(connection: Any) -> None:
    async with session(connection) as db:
        db.add(Reservation(order_id="kept", details={}))
        await db.commit()
        db.add(Reservation(order_id="rolled back", details={}))
        await db.flush()
        await db.rollback()
        with pytest.raises(IntegrityError):
            async with db.begin_nested():
                db.add(Reservation(order_id="kept", details={}))
        db.add(Reservation(order_id="last", details={}))


@workflow("attempts")
async def attempts(step: Step) -> None:
    await step.transaction("attempt", attempt)


async def test_commit_and_rollback_of_the_session_concern_savepoints(place: Place) -> None:
    store = place.store()
    run = await Runtime(store, workflows=[attempts]).trigger(attempts)
    await store.close()
    assert (run.status, run.error) == ("completed", None)
    assert await place.reserved() == ["kept", "last"]


async def test_a_lost_answer_does_not_reserve_twice(place: Place) -> None:
    """The process crashes after the commit, before it knows of it."""
    store = place.store()
    faulty = FaultyStore(store, fail_at=1, how="after", verbs={"transact"}, stays_down=True)
    with pytest.raises(Exception, match="planned failure"):
        await Runtime(faulty, workflows=[order], lease_ttl=0.2).trigger(order, "a", run_id="1")
    runtime = Runtime(store, workflows=[order])
    run = await runtime.get_run("1")
    while run is not None and not run.over:
        await runtime.sweep()
        run = await runtime.get_run("1")
    await store.close()
    assert run is not None
    assert run.output == [1, 2, 3]
    assert await place.reserved() == ["a-0", "a-1", "a-2"]


async def test_options_are_those_of_the_session(place: Place) -> None:
    observations: list[bool] = []

    async def look(connection: Any) -> None:
        async with session(connection, expire_on_commit=False, info={"by": "ana"}) as db:
            observations.append(db.sync_session.expire_on_commit)
            assert db.info == {"by": "ana"}

    @workflow("look")
    async def look_once(step: Step) -> None:
        await step.transaction("look", look)

    store = place.store()
    run = await Runtime(store, workflows=[look_once]).trigger(look_once)
    await store.close()
    assert (run.error, observations) == (None, [False])


async def test_a_sqlite_store_refuses_sessions(tmp_path: Any) -> None:
    @workflow("try")
    async def try_once(step: Step) -> None:
        await step.transaction("reserve", reserve, "a")

    async with sqlite(tmp_path / "runs.db") as store:
        run = await Runtime(store, workflows=[try_once]).trigger(try_once)
    assert isinstance(run.error, InvalidArgument)
    assert "on SQLite" in str(run.error)
