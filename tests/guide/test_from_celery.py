"""A shop that used Celery: synchronous SQLAlchemy, Redis, retries, groups and chords.

Its tasks are plain functions that block, as they were. A web application starts them with a
synchronous client; a worker in another thread stands for the worker process.
"""

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, func, select
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from perdure import Queue, Retry, Runtime, Schedule, Step, Worker, durable, sync, workflow
from perdure.errors import Cancelled, RunFailed
from perdure.runtime.definition import Definition
from perdure.stores import redis


class Base(DeclarativeBase):
    """The tables of the shop."""


class Payment(Base):
    __tablename__ = "payments"
    key: Mapped[str] = mapped_column(primary_key=True)
    order_id: Mapped[int]


class Picture(Base):
    __tablename__ = "pictures"
    name: Mapped[str] = mapped_column(primary_key=True)
    size: Mapped[int]


class Shop:
    """The tasks of the shop, which were `@app.task` functions."""

    def __init__(self, path: Path) -> None:
        self.engine: Engine = create_engine(f"sqlite:///{path}")
        self.threads: set[int] = set()
        self.failures = 0
        self.lock = threading.Lock()
        self.sending = self.most = 0
        self.sent: set[str] = set()
        Base.metadata.create_all(self.engine)

    def charge(self, order_id: int) -> str:
        """Insert a payment, once: the key is the same each time this is called for an order."""
        self.threads.add(threading.get_ident())
        key = durable.current().idempotency_key
        with Session(self.engine) as session, session.begin():
            session.merge(Payment(key=key, order_id=order_id))
        if self.failures:
            self.failures -= 1
            raise ConnectionError("the bank is closed")
        return f"receipt {order_id}"

    def send(self, to: str) -> None:
        """Send an email, which takes some time."""
        with self.lock:
            self.sending += 1
            self.most = max(self.most, self.sending)
        time.sleep(0.01)
        with self.lock:
            self.sending -= 1
            self.sent.add(to)

    def resize(self, name: str) -> int:
        if not name.endswith(".png"):
            raise ValueError(f"{name} is not a picture")
        with Session(self.engine) as session, session.begin():
            session.merge(Picture(name=name, size=len(name)))
        return len(name)

    def total(self, expected: int) -> int:
        """Read what the members of a chord have written."""
        with Session(self.engine) as session:
            total = session.scalar(select(func.sum(Picture.size))) or 0
        assert total == expected
        return total

    def count(self, table: type[Base]) -> int:
        with Session(self.engine) as session:
            return session.scalar(select(func.count()).select_from(table)) or 0


@workflow("order")
async def order(step: Step[Shop], order_id: int) -> str:
    """`@app.task(autoretry_for=(ConnectionError,), retry_backoff=True, max_retries=4)`."""
    retry = Retry(5, delay="1ms", retry_if=lambda error: isinstance(error, ConnectionError))
    return await step("charge", step.deps.charge, order_id, retry=retry)


@workflow("thumbnail")
async def thumbnail(step: Step[Shop], name: str) -> int:
    return await step("resize", step.deps.resize, name)


@workflow("gallery")
async def gallery(step: Step[Shop], names: list[str]) -> int:
    """`chord((thumbnail.s(name) for name in names), total.s())`."""
    sizes = await step.map_runs("thumbnails", thumbnail, names)
    return await step("total", step.deps.total, sum(sizes))


@workflow("careful gallery")
async def careful_gallery(step: Step, names: list[str]) -> str:
    """`link_error`: here it is `except`."""
    try:
        return f"{await step.call('gallery', gallery, names)} bytes"
    except RunFailed as failed:
        return str(failed)


@workflow("chunk")
async def chunk(step: Step, rows: list[int]) -> int:
    return await step("sum", sum, rows)


@workflow("import")
async def import_rows(step: Step, rows: list[int]) -> int:
    """`import_row.chunks(rows, 10)`."""
    chunks = [rows[n : n + 10] for n in range(0, len(rows), 10)]
    return sum(await step.map_runs("rows", chunk, chunks))


@workflow("email", queue=Queue("emails", concurrency=2))
async def email(step: Step[Shop], to: str) -> None:
    """`@app.task(queue="emails")`, of which at most two are sent at once, by all workers."""
    await step("send", step.deps.send, to)


@workflow("newsletter")
async def newsletter(step: Step, to: list[str]) -> None:
    """`group(email.s(each) for each in to)`."""
    await step.map_runs("emails", email, to)


@workflow("sweep", schedule=Schedule(every="1s"))
async def sweep(step: Step[Shop]) -> int:
    """`beat_schedule = {"sweep": {"task": "sweep", "schedule": 1.0}}`."""
    return await step("count", step.deps.count, Payment)


@workflow("approval")
async def approval(step: Step) -> str:
    answer: str = await step.wait_for_event("answer", "answered")
    return answer


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Shop]:
    shop = Shop(tmp_path / "shop.db")
    yield shop
    shop.engine.dispose()


@pytest.fixture
def client(redis_url: str, redis_prefix: str) -> Iterator[sync.Client]:
    """The client of a Flask application: one for the program, shared by its threads."""
    with sync.Client(redis(redis_url, namespace=redis_prefix)) as client:
        yield client


@pytest.fixture
def _worker(redis_url: str, redis_prefix: str, shop: Shop) -> Iterator[None]:
    """`celery -A shop worker`."""
    workflows: list[Definition[Any, Any]] = [
        order,
        thumbnail,
        gallery,
        careful_gallery,
        chunk,
        import_rows,
        email,
        newsletter,
        sweep,
        approval,
    ]

    async def work() -> None:
        store = redis(redis_url, namespace=redis_prefix)
        runtime = Runtime(store, workflows=workflows, deps=shop)
        async with store, runtime, Worker(runtime):
            while not stopped.is_set():
                await asyncio.sleep(0.01)

    stopped = threading.Event()
    thread = threading.Thread(target=lambda: asyncio.run(work()))
    thread.start()
    yield
    stopped.set()
    thread.join()


pytestmark = pytest.mark.usefixtures("_worker")


def test_a_task_is_started_and_its_result_is_fetched(client: sync.Client) -> None:
    """`charge.delay(1).get(timeout=10)`."""
    run = client.trigger("order", 1)
    assert client.result(run, timeout="10s") == "receipt 1"


def test_a_blocking_function_is_called_in_a_thread(client: sync.Client, shop: Shop) -> None:
    """It does not block the worker, and it is called under its idempotency key."""
    client.result(client.trigger("order", 1), timeout="10s")
    assert shop.threads.isdisjoint({threading.get_ident()})
    assert shop.count(Payment) == 1


def test_the_same_task_id_is_one_run(client: sync.Client, shop: Shop) -> None:
    """A second `apply_async(task_id=…)` would run again."""
    for _ in range(2):
        client.trigger("order", 1, run_id="order-1")
    assert client.result("order-1", timeout="10s") == "receipt 1"
    assert shop.count(Payment) == 1


def test_a_task_is_retried_and_writes_once(client: sync.Client, shop: Shop) -> None:
    """`autoretry_for`: each attempt has the same idempotency key."""
    shop.failures = 3
    assert client.result(client.trigger("order", 1), timeout="10s") == "receipt 1"
    assert shop.count(Payment) == 1


def test_a_countdown_delays_a_task(client: sync.Client) -> None:
    """`apply_async(countdown=3600)`: it is queued, and found by its tags until then."""
    client.trigger("order", 1, delay="1h", tags={"customer": "ana"})
    [run] = client.list_runs(tags={"customer": "ana"})
    assert run.status == "queued"


def test_a_chord_calls_its_body_when_all_members_have_ended(
    client: sync.Client, shop: Shop
) -> None:
    names = [f"{n:02}.png" for n in range(50)]
    assert client.result(client.trigger("gallery", names), timeout="30s") == 300
    assert shop.count(Picture) == 50


def test_an_error_in_a_chord_is_an_exception(client: sync.Client) -> None:
    """Unlike `ChordError`, it names the member and has its exception."""
    run = client.trigger("careful gallery", ["a.png", "b.txt"], run_id="g")
    assert client.result(run, timeout="10s").endswith(
        "run 'g/1/gallery/1/thumbnails/1' of workflow 'thumbnail' failed: "
        "ValueError: b.txt is not a picture"
    )


def test_a_task_is_mapped_over_chunks(client: sync.Client) -> None:
    run = client.trigger("import", list(range(95)), run_id="import-1")
    assert client.result(run, timeout="10s") == sum(range(95))
    assert len(client.list_runs(prefix="import-1/")) == 10


def test_a_queue_limits_how_many_tasks_run_at_once(client: sync.Client, shop: Shop) -> None:
    to = [f"{n}@example.com" for n in range(20)]
    client.result(client.trigger("newsletter", to), timeout="30s")
    assert shop.sent == set(to)
    assert shop.most == 2


def test_a_worker_starts_scheduled_tasks(client: sync.Client) -> None:
    """Without beat. The worker has created the schedule when it started."""
    while not (runs := client.list_runs(prefix="sweep@", status="completed")):
        time.sleep(0.05)
    assert client.result(runs[0].id) == 0
    assert [schedule.name for schedule in client.schedules()] == ["sweep"]


def test_a_task_is_revoked(client: sync.Client) -> None:
    """Durably, and even if it is waiting."""
    run = client.trigger("approval")
    client.cancel(run.id, reason="revoked")
    with pytest.raises(Cancelled, match="revoked"):
        client.result(run, timeout="10s")


def test_the_result_of_an_unknown_task_is_not_pending(client: sync.Client) -> None:
    assert client.get_run("no such run") is None
