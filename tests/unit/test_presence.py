"""The documents of workers and the switches: how they are written, and what cannot be read."""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure import Step, workflow
from perdure.durable.in_flight import StepInFlight
from perdure.durable.owners import new_owner
from perdure.errors import InvalidArgument, MissingAbility
from perdure.presence import (
    DefinitionDocument,
    Throughput,
    WorkerPresence,
    WorkerSwitch,
    WorkflowSwitch,
    read_definitions,
    read_last_throughput,
    read_switches,
    read_throughput,
    read_worker,
    read_workers,
    set_switch,
    worker_id,
)
from perdure.presence.definitions import payload_schema
from perdure.presence.documents import write_definition, write_throughput, write_worker
from perdure.presence.durations import CLASSES, add_duration, class_of, percentile, total
from perdure.presence.keys import (
    definition_key,
    throughput_key,
    worker_key,
    worker_switch_key,
    workflow_switch_key,
)
from perdure.presence.switches import read_switches_of
from perdure.stores.adapters.snapshot_only import SnapshotOnlyStore
from perdure.stores.memory import MemoryStore
from perdure.testing.clock import TestClock
from perdure.validation import MAX_ID_LENGTH

NOON = datetime(2030, 1, 1, 12, tzinfo=UTC)
NAMES = st.text(st.characters(exclude_characters="\0", codec="utf-8"), min_size=1, max_size=512)
HOSTILE = ["a:1", "a", "%3A", "~", "switch:worker:a", "🚚" * MAX_ID_LENGTH, 'a"b/../c', "x" * 512]


@pytest.fixture
def clock() -> TestClock:
    return TestClock(NOON)


@pytest.fixture
def store(clock: TestClock) -> MemoryStore:
    return MemoryStore(clock=clock)


def presence(id: str, **facts: object) -> WorkerPresence:
    defaults = {"host": "ops", "pid": 7, "started_at": NOON, "seen_at": NOON}
    return WorkerPresence(id=id, **{**defaults, **facts})  # type: ignore[arg-type]  # any field


def throughput(worker: str, hour: datetime, **facts: object) -> Throughput:
    defaults = {"host": "ops", "pid": 7, "started_at": NOON, "seen_at": hour}
    return Throughput(worker=worker, hour=hour, **{**defaults, **facts})  # type: ignore[arg-type]  # any field


@given(NAMES, NAMES, st.integers(1, 99), st.integers(1, 99))
def test_no_two_documents_share_a_key(one: str, other: str, first: int, second: int) -> None:
    """Whatever characters names contain, and however long they are."""
    for key in (worker_key, workflow_switch_key, worker_switch_key):
        assert (key(one) == key(other)) == (one == other)
    same = (one, first) == (other, second)
    assert (definition_key(one, first) == definition_key(other, second)) == same
    hours = [NOON + timedelta(hours=first), NOON + timedelta(hours=second)]
    assert (throughput_key(hours[0], one) == throughput_key(hours[1], other)) == same


@pytest.mark.parametrize("name", HOSTILE)
async def test_any_name_can_be_written_and_read(store: MemoryStore, name: str) -> None:
    """Names come from the document, not from its key."""
    await write_worker(store, presence(name))
    await write_throughput(store, throughput(name, NOON))
    await write_definition(store, DefinitionDocument(workflow=name, version=2, seen_at=NOON))
    await set_switch(store, WorkflowSwitch(name, True, "ana", "outage", NOON))
    assert [each.id for each in await read_workers(store)] == [name]
    assert [each.worker for each in await read_throughput(store, NOON)] == [name]
    assert [each.workflow for each in await read_definitions(store)] == [name]
    assert (await read_switches(store)).paused == {name}


async def test_a_worker_without_a_heartbeat_disappears(
    store: MemoryStore, clock: TestClock
) -> None:
    await write_worker(store, presence("w-1"))
    assert await read_worker(store, "w-1") is not None
    await clock.advance(31)
    assert (await read_worker(store, "w-1"), await read_workers(store)) == (None, [])


async def test_steps_in_flight_are_read_as_they_were_written(store: MemoryStore) -> None:
    step = StepInFlight("order-1", "order", "ship", NOON, 3, NOON + timedelta(minutes=9))
    await write_worker(store, presence("w-1", steps=(step,)))
    [worker] = await read_workers(store)
    assert worker.steps == (step,)


@pytest.mark.parametrize(
    "broken",
    ["", "{", "[]", '{"id": 1}', '{"id":"w","seen_at":"2030-01-01T00:00:00"}', "[" * 10_000],
)
async def test_a_document_that_cannot_be_read_is_skipped(store: MemoryStore, broken: str) -> None:
    """Another version may have written it, or another program."""
    await write_worker(store, presence("w-1"))
    prefixes = ("worker:", "throughput:2030-01-01T12:", "definition:", "switch:workflow:")
    for prefix in prefixes:
        await store.documents.set(f"{prefix}broken", broken)
    assert [worker.id for worker in await read_workers(store)] == ["w-1"]
    assert (await read_throughput(store, NOON), await read_definitions(store)) == ([], [])
    assert (await read_switches(store)).workflows == {}


async def test_fields_of_a_later_version_are_ignored(store: MemoryStore) -> None:
    await write_worker(store, presence("w-1"))
    text = await store.documents.get(worker_key("w-1"))
    assert text is not None
    await store.documents.set(worker_key("w-1"), text[:-1] + ',"mood":"good"}')
    assert await read_worker(store, "w-1") == presence("w-1")


async def test_throughput_is_read_from_an_hour_on(store: MemoryStore) -> None:
    hours = [NOON + timedelta(hours=n) for n in range(3)]
    for hour in hours:
        await write_throughput(store, throughput("w-1", hour))
    found = await read_throughput(store, hours[1] + timedelta(minutes=30))
    assert [each.hour for each in found] == hours[1:]


async def test_the_newest_throughput_of_each_worker(store: MemoryStore) -> None:
    """It says which workers existed, without reading what they did all day."""
    later = NOON + timedelta(hours=1)
    for worker, hour in (("w-1", NOON), ("w-1", later), ("w-2", NOON)):
        await write_throughput(store, throughput(worker, hour))
    found = await read_last_throughput(store, NOON)
    assert {each.worker: each.hour for each in found} == {"w-1": later, "w-2": NOON}


async def test_more_documents_than_one_read_returns(store: MemoryStore) -> None:
    for n in range(450):
        await write_worker(store, presence(f"w-{n}"))
    assert len(await read_workers(store)) == 450


async def test_a_worker_reads_only_its_own_switches(store: MemoryStore) -> None:
    await set_switch(store, WorkerSwitch("w-1", True, "ana", "", NOON))
    await set_switch(store, WorkerSwitch("w-2", True, "ana", "", NOON))
    await set_switch(store, WorkflowSwitch("order", True, "ana", "", NOON))
    await set_switch(store, WorkflowSwitch("other", True, "ana", "", NOON))
    switches = await read_switches_of(store, "w-1", ["order", "welcome"])
    assert (switches.drains("w-1"), switches.drains("w-2")) == (True, False)
    assert switches.paused == {"order"}


async def test_a_switch_stays_until_it_is_changed(store: MemoryStore, clock: TestClock) -> None:
    await set_switch(store, WorkflowSwitch("order", True, "ana", "outage", NOON))
    await clock.advance("100 days")
    assert (await read_switches(store)).workflows["order"].why == "outage"
    await set_switch(store, WorkflowSwitch("order", False, "bo", "over", clock.now()))
    assert (await read_switches(store)).paused == frozenset()


@pytest.mark.parametrize("name", ["", "a\0b", "\ud800", "x" * (MAX_ID_LENGTH + 1)])
async def test_a_switch_of_an_impossible_name_is_refused(store: MemoryStore, name: str) -> None:
    with pytest.raises(InvalidArgument):
        await set_switch(store, WorkflowSwitch(name, True, "ana", "", NOON))
    with pytest.raises(InvalidArgument):
        await set_switch(store, WorkerSwitch(name, True, "ana", "", NOON))


async def test_a_store_without_documents(store: MemoryStore) -> None:
    """Nothing is known there, and nothing can be switched."""
    bare = SnapshotOnlyStore(store)
    assert (await read_workers(bare), await read_definitions(bare)) == ([], [])
    assert await read_throughput(bare, NOON) == []
    assert (await read_switches(bare)).paused == frozenset()
    assert await read_worker(bare, "w-1") is None
    with pytest.raises(MissingAbility):
        await set_switch(bare, WorkflowSwitch("order", True, "ana", "", NOON))


def test_the_id_of_a_worker_is_readable_and_its_own() -> None:
    """Two workers of one process differ, and so do two containers with the same host and pid."""
    owners = [new_owner(Random(7)) for _ in range(100)]
    ids = {worker_id(owner) for owner in owners}
    host, pid = owners[0].split("/")[0], owners[0].split("/")[3]
    assert len(ids) == 100
    assert all(id.startswith(f"{host}-{pid}-") for id in ids)
    assert worker_id(owners[0]) == worker_id(owners[0])


def test_an_owner_of_another_program_is_shown_as_it_is() -> None:
    assert worker_id("somewhere else") == "somewhere else"


@pytest.mark.parametrize(
    ("milliseconds", "number"),
    [(-1, 0), (0, 0), (1.9, 0), (2, 1), (3.9, 1), (4, 2), (1024, 10), (10**12, CLASSES - 1)],
)
def test_the_class_of_a_duration(milliseconds: float, number: int) -> None:
    assert class_of(milliseconds) == number


@given(st.lists(st.integers(0, 10**9), min_size=1), st.integers(1, 100))
def test_a_percentile_is_within_a_factor_of_two(durations: list[int], percent: int) -> None:
    classes: list[int] = []
    for duration in durations:
        add_duration(classes, duration)
    exact = sorted(durations)[-(-len(durations) * percent // 100) - 1]
    estimate = percentile(classes, percent)
    assert estimate is not None
    if exact < 2 ** (CLASSES - 1):
        # The first class has everything below 2 ms.
        shortest = exact / 2 if exact >= 2 else 0
        assert shortest <= estimate / timedelta(milliseconds=1) <= max(2 * exact, 2)


def test_a_percentile_is_not_the_bound_of_its_class() -> None:
    hundred_of_one_second = [0] * 9 + [100]
    milliseconds = [percentile(hundred_of_one_second, each) for each in (50, 95)]
    assert milliseconds == [timedelta(milliseconds=768), timedelta(milliseconds=998.4)]


def test_a_percentile_of_nothing_is_unknown() -> None:
    assert percentile((), 50) is None


def test_counts_of_different_lengths_are_added() -> None:
    assert total([(1, 2), (), (0, 0, 3), (0,) * 40]) == (1, 2, 3)


@dataclass
class Item:
    name: str


@dataclass
class Order:
    items: list[Item]


@dataclass
class Tree:
    children: "list[Tree]"


def schema_of(payload_type: Any) -> Any:
    async def function(step: Step, payload: Any) -> None: ...

    function.__annotations__["payload"] = payload_type
    return payload_schema(workflow("any")(function))


def test_a_schema_shows_the_fields_of_the_payload_first() -> None:
    schema = schema_of(Order)
    assert (schema["type"], [*schema["properties"]], [*schema["$defs"]]) == (
        "object",
        ["items"],
        ["Item"],
    )
    assert "$defs" not in schema_of(Item)


def test_a_recursive_schema_keeps_its_definition() -> None:
    schema = schema_of(Tree)
    assert ([*schema["properties"]], [*schema["$defs"]]) == (["children"], ["Tree"])


def test_a_schema_without_definitions_stays_as_it_is() -> None:
    assert schema_of(int) == {"type": "integer"}
