"""An old and a new worker at the same time: each run is driven by its version or migrated up."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from perdure import Client, Runtime, Step, Worker, workflow
from perdure.errors import AlreadyAnswered, StoreError, VersionMismatch
from perdure.snapshot import Snapshot, version_of
from perdure.store import Store
from perdure.stores import MemoryStore, open_store
from perdure.testing import FaultyStore, TestClock
from tests.durability.forked import forked

LEASE = 120
"""A run that waits for a lease fails the test: it takes seconds."""

RUNS = 12


def driven_by(name: str) -> Any:
    """Return a workflow function of four steps, between which any worker may continue the run."""

    async def body(step: Step) -> list[str]:
        drivers = []
        for n in range(4):
            drivers.append(await step(f"part {n}", lambda: name))
            await step.sleep(f"pause {n}", "50ms")
        await step.wait_for_event("go", "go", timeout="1s")
        return [*drivers, await step("last", lambda: name)]

    return body


def unchanged(snapshot: Snapshot, version: int) -> Snapshot:
    return snapshot


OLD = workflow("order")(driven_by("old"))
BESIDE = workflow("order", version=2)(driven_by("new"))
MIGRATING = workflow("order", version=2, migrate=unchanged)(driven_by("new"))

DEPLOYMENTS: dict[str, list[Any]] = {
    "old": [OLD],
    "beside": [workflow("order")(driven_by("old")), BESIDE],
    "migrating": [MIGRATING],
}


async def serve(url: str, deployment: str) -> None:
    async with open_store(url) as store:
        runtime = Runtime(
            store,
            workflows=DEPLOYMENTS[deployment],
            lease_ttl=LEASE,
            suspend_after=0,
            on_definition_change="ignore",
        )
        await Worker(runtime, poll=0.05).serve()


def work(url: str, deployment: str) -> None:
    asyncio.run(serve(url, deployment))


@asynccontextmanager
async def worker(url: str, deployment: str) -> AsyncGenerator[None]:
    process = forked().Process(target=work, args=(url, deployment))
    process.start()
    try:
        yield
    finally:
        process.terminate()
        await asyncio.to_thread(process.join)


async def outputs(client: Client, ids: list[str]) -> list[list[str]]:
    async with asyncio.timeout(60):
        return list(await asyncio.gather(*(client.result(id) for id in ids)))


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/runs.db"
    return str(request.getfixturevalue("postgres_url"))


@pytest.mark.parametrize("deployment", ["beside", "migrating"])
async def test_no_run_waits_for_a_lease_while_both_are_up(url: str, deployment: str) -> None:
    """Runs that began with the old version, with the new one, and that name none."""
    async with Client(url) as client, worker(url, "old"):
        old = [f"old-{n}" for n in range(RUNS)]
        for id in old:
            await client.trigger(OLD, run_id=id)
        async with worker(url, deployment):
            new, any_ = [f"new-{n}" for n in range(RUNS)], [f"any-{n}" for n in range(RUNS)]
            for one, other in zip(new, any_, strict=True):
                await client.trigger(BESIDE, run_id=one)
                await client.trigger("order", run_id=other)
                await client.signal(one, "go")
            ended = await outputs(client, [*old, *new, *any_])
        versions = await client.versions("order")
    assert versions.counts == {}
    for drivers in ended:
        # Once the new version has driven a run, the old one never does.
        assert drivers == sorted(drivers, reverse=True), drivers
    for drivers in ended[RUNS : 2 * RUNS]:
        assert set(drivers) == {"new"}


@workflow("w", version=2)
async def newer(step: Step) -> str:
    await step("a", asyncio.sleep, 0)
    await step.wait_for_event("go", "go")
    return "new"


@workflow("w")
async def older(step: Step) -> str:
    return "old"


async def test_an_old_process_that_signals_a_newer_run_does_not_delay_it() -> None:
    """It has leased the run to continue it, and finds that it cannot."""
    clock = TestClock()
    store = MemoryStore(clock=clock)
    new = Runtime(store, workflows=[newer], clock=clock)
    await new.trigger(newer, run_id="r")
    with pytest.raises(VersionMismatch):
        await Runtime(store, workflows=[older], clock=clock).signal("r", "go")
    (run,) = await new.sweep()
    assert run.output == "new"


async def test_an_old_process_does_not_continue_a_run_whose_first_owner_died() -> None:
    """The run was created by name, and the newer version has recorded a step before it died."""
    clock = TestClock()
    store = MemoryStore(clock=clock)
    await Client(store, clock=clock).trigger("w", run_id="r")
    faulty = FaultyStore(store, fail_at=2, verbs={"append"}, error=StoreError, stays_down=True)
    await Runtime(faulty, workflows=[newer], clock=clock, lease_ttl="30s").sweep()
    stored = await store.load("r")
    assert stored is not None
    assert (list(stored["steps"]), version_of(stored["metadata"])) == (["a"], 2)
    await clock.advance("31s")
    old, new = (Runtime(store, workflows=[each], clock=clock) for each in (older, newer))
    await old.sweep()
    assert await old.sweep() == []
    (run,) = await new.sweep()
    assert run.status == "waiting"


async def test_a_migration_in_place_is_stored_before_the_run_continues() -> None:
    """Otherwise the next owner would migrate again what the first one has recorded since."""
    migrations = []

    def migrate(snapshot: Snapshot, version: int) -> Snapshot:
        migrations.append(version)
        snapshot["steps"].clear()
        return snapshot

    @workflow("w", version=3, migrate=migrate)
    async def newest(step: Step) -> str:
        await step("a", lambda: "a")
        await step.wait_for_event("go", "go")
        return "newest"

    clock = TestClock()
    store = MemoryStore(clock=clock)
    await Runtime(store, workflows=[newer], clock=clock).trigger(newer, run_id="r")
    await Client(store, clock=clock).signal("r", "go")
    faulty = FaultyStore(store, fail_at=3, verbs={"append"}, error=StoreError, stays_down=True)
    await Runtime(faulty, workflows=[newest], clock=clock, lease_ttl="30s").sweep()
    await clock.advance("31s")
    await Runtime(store, workflows=[newest], clock=clock).sweep()
    assert (faulty.failed, migrations) == (True, [2])


async def test_a_migration_that_drops_a_question_closes_it() -> None:
    @workflow("asks", version=1)
    async def asks(step: Step) -> None:
        await step.approval("ask", "Go?")

    def migrate(snapshot: Snapshot, version: int) -> Snapshot:
        snapshot["execution"].pop("pending")
        return snapshot

    @workflow("asks", version=2, migrate=migrate)
    async def asks_no_more(step: Step) -> str:
        return "done"

    clock = TestClock()
    store = MemoryStore(clock=clock)
    old = Runtime(store, workflows=[asks], clock=clock)
    (wait,) = (await old.trigger(asks, run_id="r")).pending
    runtime = Runtime(store, workflows=[asks_no_more], clock=clock)
    await runtime.approve(wait.token, by="ana")
    await runtime.sweep()
    assert await runtime.result("r") == "done"
    with pytest.raises(AlreadyAnswered, match="by ana"):
        await runtime.approve(wait.token, by="bob")


async def test_the_versions_of_live_runs_are_counted(every_store: Store) -> None:
    new = Runtime(every_store, workflows=[newer])
    await new.trigger(newer, run_id="waits")
    await new.trigger("w", run_id="queued", wait=False)
    await Client(every_store).trigger("w", run_id="unbound")
    older_runtime = Runtime(every_store, workflows=[older])
    await older_runtime.trigger(older, run_id="over")
    await older_runtime.trigger(older, run_id="later", delay="1d")
    versions = await new.versions(newer)
    assert versions.counts == {0: {"queued": 1}, 1: {"queued": 1}, 2: {"queued": 1, "waiting": 1}}
    assert (versions.totals, versions.capped) == ({0: 1, 1: 1, 2: 2}, False)
    assert (await new.versions("unknown")).counts == {}
