"""`Client`: starting and reading runs from other programs. Workers call the functions."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from perdure import Client, Err, Ok, Result, RunConflict, Runtime, Signal, Step, Worker, workflow
from perdure.errors import Cancelled, InvalidPayload, RunFailed, RunNotFound, StoreClosed
from perdure.store import Delivery
from perdure.stores import MemoryStore, sqlite
from perdure.testing import TestClock


@dataclass
class Order:
    item: str
    price: int = 5


@dataclass
class Receipt:
    total: int


@workflow("order", version=3)
async def order(step: Step, payload: Order) -> Receipt:
    if payload.price < 0:
        raise ValueError("a negative price")
    paid = await step("pay", lambda: payload.price)
    return Receipt(paid)


@workflow("approval")
async def approval(step: Step) -> Result[str, str]:
    answer = await step.wait_for_event("answer", "answered")
    return Ok(answer) if answer != "no" else Err("refused")


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def client(store: MemoryStore) -> Client:
    """Return a client that knows the definitions. One without them names the workflows."""
    return Client(store, workflows=[order, approval])


@pytest.fixture
async def worker(store: MemoryStore) -> AsyncIterator[Worker]:
    """Run a worker, as another process would."""
    runtime = Runtime(MemoryStore(shares=store), workflows=[order, approval])
    async with Worker(runtime, poll=0.01) as worker:
        yield worker


async def test_a_client_starts_a_run_and_gets_its_result(client: Client, worker: Worker) -> None:
    """The run is executed by a worker."""
    run = await client.trigger(order, Order("pen"), run_id="order-1")
    assert run.status == "queued"
    assert await client.result(run, timeout="10s") == Receipt(5)


async def test_a_client_needs_only_names(store: MemoryStore, worker: Worker) -> None:
    """Without definitions payloads and outputs are plain JSON, and the worker picks the version."""
    client = Client(store)
    run = await client.trigger("order", {"item": "pen", "price": 7})
    assert run.version == 0
    assert await client.result(run.id, timeout="10s") == {"total": 7}
    stored_run = await client.get_run(run.id)
    assert stored_run is not None
    assert stored_run.version == 3


async def test_a_definition_checks_the_payload(client: Client) -> None:
    """Nothing is written if it does not fit."""
    with pytest.raises(InvalidPayload, match="item: missing"):
        await client.trigger("order", {"price": 1}, run_id="order-1")
    assert await client.get_run("order-1") is None


async def test_a_client_opens_a_url_and_closes_it(tmp_path: Path) -> None:
    async with Client(f"sqlite:///{tmp_path}/runs.db") as client:
        await client.trigger("order", {"item": "pen"}, run_id="order-1")
    with pytest.raises(StoreClosed):
        await client.get_run("order-1")


async def test_a_store_that_is_passed_in_stays_open(tmp_path: Path) -> None:
    async with sqlite(tmp_path / "runs.db") as store:
        async with Client(store) as client:
            await client.trigger("order", run_id="order-1")
        assert await store.load("order-1") is not None


async def test_a_run_can_start_later(clock: TestClock) -> None:
    """`delay` and `at` leave the run to a worker or a sweep, due then."""
    runtime = Runtime(MemoryStore(clock=clock), workflows=[order], clock=clock)
    await runtime.trigger(order, Order("pen"), run_id="delayed", delay="1h")
    await runtime.trigger(order, Order("cup"), run_id="at", at=datetime(2030, 1, 1, 2, tzinfo=UTC))
    assert await runtime.sweep() == []
    await clock.advance("1h")
    assert [run.id for run in await runtime.sweep()] == ["delayed"]
    await clock.advance("1h")
    assert [run.id for run in await runtime.sweep()] == ["at"]


async def test_a_priority_puts_a_run_ahead(client: Client, store: MemoryStore) -> None:
    """Each level counts as a day of waiting, so nothing waits forever."""
    await client.trigger(order, Order("pen"), run_id="normal")
    await client.trigger(order, Order("cup"), run_id="urgent", priority=1)
    due = await store.due(datetime.now(UTC), 10)
    assert [run.id for run in due] == ["urgent", "normal"]


async def test_tags_find_runs(client: Client) -> None:
    for customer in ("41", "42"):
        await client.trigger(order, Order("pen"), run_id=customer, tags={"customer": customer})
    (matching_run,) = await client.list_runs(tags={"customer": "42"})
    run = await client.get_run(matching_run.id)
    assert run is not None
    assert run.tags == {"customer": "42"}


@pytest.mark.parametrize("deadline", ["90s", datetime(2030, 1, 1, tzinfo=UTC)])
async def test_a_deadline_is_stored_with_the_run(
    client: Client, store: MemoryStore, deadline: str | datetime
) -> None:
    """A duration counts from the first claim."""
    await client.trigger(order, Order("pen"), run_id="order-1", deadline=deadline)
    stored = await store.load("order-1")
    assert stored is not None
    metadata = stored.get("metadata") or {}
    deadlines = {name: metadata[name] for name in metadata if name.startswith("deadline")}
    assert deadlines in ({"deadlineAfter": 90.0}, {"deadline": "2030-01-01T00:00:00.000Z"})


async def test_the_same_trigger_again_returns_the_run(client: Client) -> None:
    """So a request can be repeated when its answer was lost."""
    first = await client.trigger(order, Order("pen"), run_id="order-1")
    assert await client.trigger(order, Order("pen"), run_id="order-1") == first


async def test_another_payload_is_a_conflict(client: Client) -> None:
    """The error shows the stored payload and the requested one."""
    await client.trigger(order, Order("pen"), run_id="order-1")
    with pytest.raises(RunConflict, match=r"its payload is .*'pen'.*, not .*'cup'"):
        await client.trigger(order, Order("cup"), run_id="order-1")
    returned = await client.trigger(order, Order("cup"), run_id="order-1", if_exists="return")
    assert returned.payload == {"item": "pen", "price": 5}


async def test_another_workflow_is_always_a_conflict(client: Client) -> None:
    await client.trigger(order, Order("pen"), run_id="order-1")
    with pytest.raises(RunConflict, match="it belongs to workflow 'order'") as raised:
        await client.trigger("approval", run_id="order-1", if_exists="return")
    assert (raised.value.run_id, raised.value.workflow) == ("order-1", "order")


async def test_an_existing_run_can_be_an_error(client: Client) -> None:
    await client.trigger(order, Order("pen"), run_id="order-1")
    with pytest.raises(RunConflict, match="already exists"):
        await client.trigger(order, Order("pen"), run_id="order-1", if_exists="error")


async def test_a_finished_run_can_start_again(client: Client, worker: Worker) -> None:
    """Under the same id, with another payload and without the old steps."""
    await client.result(await client.trigger(order, Order("pen"), run_id="order-1"))
    again = await client.trigger(
        order, Order("cup", 9), run_id="order-1", if_exists="restart_if_over"
    )
    assert (again.status, again.history) == ("queued", ())
    assert await client.result(again, timeout="10s") == Receipt(9)


async def test_many_runs_start_in_one_write(client: Client, worker: Worker) -> None:
    """500 at a time, in the order of the payloads."""
    orders = [Order("pen", price) for price in range(3)]
    runs = await client.trigger_many(order, orders, run_ids=["a", "b", "c"])
    assert [run.id for run in runs] == ["a", "b", "c"]
    results = await asyncio.gather(*map(client.result, runs))
    assert results == [Receipt(0), Receipt(1), Receipt(2)]


async def test_many_signals_are_sent_in_one_write(client: Client, worker: Worker) -> None:
    runs = await client.trigger_many(approval, [None, None])
    signals = [Signal(run.id, "answered", "yes") for run in runs]
    results = await client.signal_many([*signals, Signal("unknown", "answered")])
    assert [result.delivery for result in results][2] is Delivery.UNKNOWN
    assert [await client.result(run, timeout="10s") for run in runs] == ["yes", "yes"]


async def test_concurrent_signals_share_writes(client: Client, worker: Worker) -> None:
    """Each caller gets its own answer: a web server may call `signal` for each request."""
    runs = await client.trigger_many(approval, [None] * 20)
    signals = [client.signal(run.id, "answered", "yes") for run in runs]
    *results, unknown = await asyncio.gather(*signals, client.signal("unknown", "answered"))
    assert all(results)
    assert unknown.delivery is Delivery.UNKNOWN
    assert [await client.result(run, timeout="10s") for run in runs] == ["yes"] * 20


async def test_a_result_raises_the_exception_of_the_run(client: Client, worker: Worker) -> None:
    """A note names the run."""
    run = await client.trigger(order, Order("pen", -1), run_id="order-1")
    with pytest.raises(ValueError, match="a negative price") as raised:
        await client.result(run, timeout="10s")
    assert raised.value.__notes__ == ["run 'order-1' of workflow 'order' failed with this error"]


async def test_a_returned_error_is_raised_as_run_failed(client: Client, worker: Worker) -> None:
    run = await client.trigger(approval)
    await client.signal(run.id, "answered", "no")
    with pytest.raises(RunFailed, match="failed: 'refused'") as raised:
        await client.result(run, timeout="10s")
    assert raised.value.error == "refused"


async def test_the_result_of_a_cancelled_run_is_cancelled(client: Client) -> None:
    run = await client.trigger(approval)
    await client.cancel(run.id, reason="not needed")
    with pytest.raises(Cancelled, match="not needed"):
        await client.result(run)


async def test_a_result_can_time_out(client: Client) -> None:
    """The run continues. The error is Python's own `TimeoutError`."""
    run = await client.trigger(approval, run_id="approval-1")
    with pytest.raises(TimeoutError) as raised:
        await client.result(run, timeout="20ms")
    assert str(raised.value) == (
        "run 'approval-1' is still queued after 0.02s. Is a worker running that knows its "
        "workflow? `perdure why approval-1` says what it waits for"
    )


async def test_a_result_that_times_out_says_in_which_state_the_run_is(store: MemoryStore) -> None:
    runtime = Runtime(store, workflows=[approval])
    run = await runtime.trigger(approval, run_id="approval-1")
    with pytest.raises(TimeoutError, match=r"is still waiting after 0\.02s\. `perdure why"):
        await runtime.result(run, timeout="20ms")


async def test_the_result_of_an_unknown_run_is_an_error(client: Client) -> None:
    with pytest.raises(RunNotFound):
        await client.result("unknown")


async def test_a_run_can_be_watched(client: Client, worker: Worker) -> None:
    """From any process: its current state, and then each change until it is over."""
    run = await client.trigger(approval)
    observations = []
    async for each in client.watch(run):
        observations.append(each.status)
        if each.status == "waiting":
            await client.signal(run.id, "answered", "yes")
    assert observations[0] in ("queued", "running")
    assert observations[-1] == "completed"
    assert "waiting" in observations


async def test_a_report_is_seen_with_the_run(client: Client, store: MemoryStore) -> None:
    """The newer one counts: the one in the snapshot, or that of the running step."""
    run = await client.trigger(order, Order("pen"))
    await store.claim("worker", timedelta(seconds=30), 1)
    report = '{"progress": 0.4, "note": "packing", "at": "2030-01-01T00:00:00.000Z"}'
    await store.documents.set(f"report:{run.id}", report)
    current = await client.get_run(run.id)
    assert current is not None
    assert (current.progress, current.note) == (0.4, "packing")


async def test_a_failed_run_is_retried_by_a_worker(store: MemoryStore) -> None:
    """The client only makes it due. `Runtime.retry(wait=False)` does the same."""
    answers = ["fine", ""]

    @workflow("flaky")
    async def flaky(step: Step) -> str:
        return await step("call", call)

    async def call() -> str:
        return answers.pop() or str(1 / 0)

    runtime = Runtime(store, workflows=[flaky])
    assert (await runtime.trigger(flaky, run_id="flaky-1")).status == "failed"
    retried = await Client(store).retry("flaky-1")
    assert (retried.status, retried.history) == ("queued", ())
    (swept,) = await runtime.sweep()
    assert swept.output == "fine"


async def test_a_handle_knows_its_run(client: Client, worker: Worker) -> None:
    """All verbs of one run; the definition gives the output its type."""
    handle = client.handle("order-1", order)
    assert await handle.get() is None
    await client.trigger(order, Order("pen"), run_id=handle.id)
    assert await handle.result(timeout="10s") == Receipt(5)
    assert [run.status async for run in handle.watch()] == ["completed"]
