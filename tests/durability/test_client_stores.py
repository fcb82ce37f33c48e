"""The verbs of a client on every kind of store: workers find and continue what they write."""

import pytest

from perdure import Client, Runtime, Step, workflow
from perdure.snapshot import rest_status
from perdure.store import Store


@pytest.fixture
def store(every_store: Store) -> Store:
    return every_store


@workflow("divide")
async def divide(step: Step, n: int) -> int:
    return await step("divide", lambda: 12 // (n + len(repaired)))


repaired: list[str] = []


@pytest.fixture(autouse=True)
def unrepaired() -> None:
    repaired.clear()


@workflow("listen")
async def listen(step: Step) -> str:
    return str(await step.wait_for_event("event", "told"))


@pytest.fixture
def client(store: Store) -> Client:
    return Client(store)


@pytest.fixture
def runtime(store: Store) -> Runtime:
    return Runtime(store, workflows=[divide, listen])


async def test_a_restarted_run_is_due(client: Client, runtime: Runtime) -> None:
    await runtime.trigger(divide, 3, run_id="run")
    again = await client.trigger("divide", 4, run_id="run", if_exists="restart_if_over")
    assert again.status == "queued"
    await runtime.sweep()
    assert await client.result("run", timeout="10s") == 3


async def test_a_retried_run_is_due(client: Client, runtime: Runtime, store: Store) -> None:
    assert (await runtime.trigger(divide, 0, run_id="run")).status == "failed"
    await client.retry("run")
    stored = await store.load("run")
    assert stored is not None
    assert (rest_status(stored), stored["steps"]) == ("queued", {})
    repaired.append("run")
    await runtime.sweep()
    assert await client.result("run", timeout="10s") == 12


async def test_a_resumed_run_is_due_and_waits_again(client: Client, runtime: Runtime) -> None:
    await runtime.trigger(listen, run_id="run")
    assert (await client.resume("run")).status == "queued"
    assert [run.status for run in await runtime.sweep()] == ["waiting"]
    assert await client.signal("run", "told", "hello")
    await runtime.sweep()
    assert await client.result("run", timeout="10s") == "hello"


async def test_many_runs_are_known_from_what_was_written(client: Client) -> None:
    runs = await client.trigger_many("divide", range(30), tags={"batch": "1"}, delay="1h")
    assert await client.get_run(runs[7].id) == runs[7]
    listed_runs = await client.list_runs(tags={"batch": "1"}, limit=50)
    assert {run.id for run in listed_runs} == {run.id for run in runs}


async def test_a_run_is_watched(client: Client, runtime: Runtime) -> None:
    run = await client.trigger("divide", 6)
    observations = []
    async for change in client.watch(run):
        observations.append(change.status)
        await runtime.sweep()
    assert (observations[0], observations[-1]) == ("queued", "completed")
