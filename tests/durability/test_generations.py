"""The generation of a run, and what the idempotency keys of its steps are afterwards."""

from typing import Any

import pytest

from perdure import Ok, Step, durable, workflow
from perdure.durable import VersionGap
from perdure.engine.call import idempotency_key
from perdure.errors import InvalidArgument, SnapshotFormatError
from perdure.runtime.definition import Definition
from perdure.stores.memory import MemoryStore
from tests.durability.conftest import MakeRuntime


def key(generation: int) -> str:
    return idempotency_key("order-1", generation, "", "pay")


class Payments:
    """A service that fails at first if it is `down`; `keys` are those it was called with."""

    def __init__(self) -> None:
        self.down = False
        self.keys: list[str] = []

    def definition(self, version: int = 1, migrate: Any = None) -> Definition[Any, Any]:
        @workflow("pay", version=version, migrate=migrate)
        async def pay(step: Step) -> None:
            await self.body(step)

        return pay

    async def body(self, step: Step) -> None:
        def charge() -> None:
            self.keys.append(step.idempotency_key)
            if self.down:
                raise ConnectionError

        await step("pay", charge)


@pytest.fixture
def payments() -> Payments:
    return Payments()


async def set_generation(store: MemoryStore, generation: object) -> None:
    """Write the run's generation as the engine does when the run begins again."""
    snapshot: Any = await store.load("order-1")
    snapshot["metadata"]["generation"] = generation
    await store.save("order-1", snapshot)


async def test_a_retry_stays_in_its_generation(
    make_runtime: MakeRuntime, payments: Payments, store: MemoryStore
) -> None:
    pay = payments.definition()
    payments.down = True
    await make_runtime(pay).trigger(pay, run_id="order-1")
    await set_generation(store, 2)
    for payments.down in (True, False):
        await make_runtime(pay).retry("order-1")
    assert payments.keys == [key(1), key(2), key(2)]
    stored: Any = await store.load("order-1")
    assert stored["metadata"]["generation"] == 2


async def test_a_finished_run_that_is_triggered_again_pays_nothing(
    make_runtime: MakeRuntime, payments: Payments
) -> None:
    pay = payments.definition()
    for _ in range(2):
        await make_runtime(pay).trigger(pay, run_id="order-1")
    assert payments.keys == [key(1)]


async def test_a_deleted_run_that_is_triggered_again_has_the_same_keys(
    make_runtime: MakeRuntime, payments: Payments
) -> None:
    """The id says that it is the same work: the service recognizes the payment."""
    pay = payments.definition()
    runtime = make_runtime(pay)
    await runtime.trigger(pay, run_id="order-1")
    await runtime.delete("order-1")
    await runtime.trigger(pay, run_id="order-1")
    assert payments.keys == [key(1), key(1)]


def without_metadata(snapshot: Any, version: int) -> Any:
    return {**snapshot, "metadata": {}}


def in_another_generation(snapshot: Any, version: int) -> Any:
    snapshot["metadata"]["generation"] = 9
    return snapshot


@pytest.mark.parametrize("migrate", [without_metadata, in_another_generation])
@pytest.mark.parametrize("generation", [1, 2])
async def test_a_migration_stays_in_its_generation(
    make_runtime: MakeRuntime, payments: Payments, store: MemoryStore, migrate: Any, generation: int
) -> None:
    """Whatever the migration does to the metadata."""
    old, new = payments.definition(), payments.definition(2, migrate)
    payments.down = True
    await make_runtime(old).trigger(old, run_id="order-1")
    await set_generation(store, generation)
    payments.down = False
    await make_runtime(new).retry("order-1")
    assert payments.keys == [key(1), key(generation)]


@pytest.mark.parametrize("migrate", [without_metadata, in_another_generation])
@pytest.mark.parametrize("generation", [1, 2])
async def test_a_migration_of_durable_run_stays_in_its_generation(
    payments: Payments, store: MemoryStore, migrate: Any, generation: int
) -> None:
    def changed(gap: VersionGap) -> Any:
        return migrate(gap.snapshot, gap.stored)

    payments.down = True
    await durable.run({}, payments.body, id="order-1", store=store)
    await set_generation(store, generation)
    payments.down = False
    result = await durable.run(
        {}, payments.body, id="order-1", store=store, version=2, on_version_mismatch=changed
    )
    assert result == Ok(None)
    assert payments.keys == [key(1), key(generation)]


async def test_a_run_that_is_cleared_has_the_same_keys(
    payments: Payments, store: MemoryStore
) -> None:
    """`on_version_mismatch="clear"` deletes the run and starts it under the same id."""
    payments.down = True
    for version in (1, 2):
        await durable.run(
            {},
            payments.body,
            id="order-1",
            store=store,
            version=version,
            on_version_mismatch="clear",
        )
    assert payments.keys == [key(1), key(1)]


async def test_a_run_with_a_malformed_generation_is_not_continued(
    payments: Payments, store: MemoryStore
) -> None:
    payments.down = True
    await durable.run({}, payments.body, id="order-1", store=store)
    await set_generation(store, "2")
    result: Any = await durable.run({}, payments.body, id="order-1", store=store)
    assert isinstance(result.error, SnapshotFormatError)
    assert len(payments.keys) == 1


async def test_a_generation_cannot_be_passed_as_metadata(store: MemoryStore) -> None:
    async def body(step: Step) -> None: ...

    with pytest.raises(InvalidArgument, match="without 'generation'"):
        await durable.run({}, body, id="order-1", store=store, metadata={"generation": 2})
