"""Mistakes that newcomers make: the error says what is wrong, where, and what to write instead."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from threading import Lock
from typing import Any

import pytest

from perdure import Runtime, Step, Worker, durable, workflow
from perdure.errors import InvalidArgument, InvalidPayload, StoreNotOpened
from perdure.stores import MemoryStore, open_store
from tests.servers.process import free_port


@workflow("greet")
async def greet(step: Step, name: str) -> str:
    return await step("greet", lambda: f"hello {name}")


# Type checkers find most of these mistakes, too.
ORDER: Any = workflow("order")


async def fetch(number: int) -> int:
    return number


async def error_of(fn: Any) -> str:
    """Return the message of the error that ended a run of a function."""
    run = await Runtime(MemoryStore()).trigger(workflow("mistake")(fn))
    assert run.status == "failed"
    return str(run.error)


def test_a_workflow_that_is_not_async() -> None:
    with pytest.raises(InvalidArgument, match="Define it with `async def`"):
        ORDER(lambda step: 1)


def test_a_workflow_without_a_step() -> None:
    async def order() -> None: ...

    with pytest.raises(InvalidArgument, match="Let its first parameter be the step"):
        ORDER(order)


def test_a_workflow_with_several_payloads() -> None:
    async def order(step: Step, item: str, price: int) -> None: ...

    with pytest.raises(InvalidArgument, match="Put several values into one payload"):
        ORDER(order)


async def test_two_workflows_with_one_name() -> None:
    @workflow("greet")
    async def other(step: Step) -> None: ...

    with pytest.raises(InvalidArgument, match="another name, or another version="):
        Runtime(MemoryStore(), workflows=[greet, other])


async def test_a_plain_function_that_is_triggered() -> None:
    async def order(step: Step) -> None: ...

    runtime: Any = Runtime(MemoryStore())
    with pytest.raises(InvalidArgument, match=r"^workflow: expected a function decorated with"):
        await runtime.trigger(order)


async def test_a_payload_that_was_forgotten() -> None:
    runtime: Any = Runtime(MemoryStore())
    with pytest.raises(InvalidPayload, match="'greet' is not valid: none was passed; Expected"):
        await runtime.trigger(greet)


async def test_a_payload_with_a_wrong_field() -> None:
    @dataclass
    class Address:
        zip: str

    @dataclass
    class Customer:
        name: str
        address: Address

    @workflow("register")
    async def register(step: Step, customer: Customer) -> None: ...

    payload: Any = {"name": 7, "address": {"zip": 1010}}
    with pytest.raises(InvalidPayload) as raised:
        await Runtime(MemoryStore()).trigger(register, payload)
    assert raised.value.errors == (
        "name: Expected `str`, got `int`",
        "address.zip: Expected `str`, got `int`",
    )


async def test_a_payload_that_cannot_be_stored() -> None:
    payload: Any = {"lock": Lock()}
    with pytest.raises(InvalidPayload, match="valid: lock: a value of class lock cannot be stored"):
        await Runtime(MemoryStore()).trigger(workflow("anything")(anything), payload)


async def anything(step: Step, payload: Any) -> Any:
    return payload["lock"]


async def test_a_value_that_cannot_be_stored(caplog: pytest.LogCaptureFixture) -> None:
    """The function sees at once what it would see after a crash."""

    async def order(step: Step) -> bool:
        return await step("lock", Lock) is None

    run = await Runtime(MemoryStore()).trigger(workflow("order")(order))
    assert run.output is True
    assert "step 'lock': value (lock) cannot be restored exactly" in caplog.text
    assert "so the function sees None" in caplog.text


async def test_an_output_that_cannot_be_stored(caplog: pytest.LogCaptureFixture) -> None:
    async def locked(step: Step) -> Any:
        return Lock()

    await Runtime(MemoryStore()).trigger(workflow("locked")(locked), run_id="locked-1")
    assert "run 'locked-1': its output (lock) cannot be restored exactly" in caplog.text
    assert "Return plain data, or annotate the function" in caplog.text


async def test_a_time_without_a_time_zone() -> None:
    async def order(step: Step) -> None:
        await step.sleep_until("new year", datetime(2030, 1, 1))

    assert "datetime(2030, 1, 1, tzinfo=UTC)" in await error_of(order)


async def test_a_run_instead_of_its_id() -> None:
    runtime: Any = Runtime(MemoryStore())
    run = await runtime.trigger(greet, "ana")
    with pytest.raises(InvalidArgument, match="Pass its id"):
        await runtime.signal(run, "paid")


async def test_an_await_that_was_forgotten_in_a_durable_run() -> None:
    async def order(step: Step) -> Any:
        return step("fetch", fetch, 1)

    result = await durable.run({}, order, id="1", store=MemoryStore())
    assert "'fetch' was called without `await`" in str(result)


async def test_a_value_instead_of_a_function() -> None:
    async def order(step: Any) -> Any:
        return await step("total", sum([1, 2]))

    assert "expected a function, got 3 (int). Write step('total', function" in await error_of(order)


async def test_a_workflow_that_is_called_like_a_function() -> None:
    call: Any = greet
    with pytest.raises(InvalidArgument, match=r"Start a run with runtime\.trigger\(greet, payload"):
        await call("ana")


async def test_a_payload_that_is_not_an_object() -> None:
    @dataclass
    class Customer:
        name: str

    @workflow("register")
    async def register(step: Step, customer: Customer) -> None: ...

    payload: Any = "ana"
    with pytest.raises(InvalidPayload, match="Expected an object with the fields of Customer, got"):
        await Runtime(MemoryStore()).trigger(register, payload)


async def test_a_worker_without_workflows(caplog: pytest.LogCaptureFixture) -> None:
    await Worker(Runtime(MemoryStore())).run_until_idle()
    assert "executes nothing: pass workflows=[…] to its Runtime" in caplog.text


async def test_a_generator_as_a_step(caplog: pytest.LogCaptureFixture) -> None:
    """It is logged once, as the failure of the step."""

    def pages() -> Iterator[int]:
        yield 1

    async def order(step: Any) -> Any:
        return await step("pages", pages)

    assert "pages is a generator: a step records one value" in await error_of(order)
    assert len(caplog.records) == 1


async def test_braces_in_the_question_of_an_approval() -> None:
    async def order(step: Any) -> Any:
        return await step("fetch", fetch, 1, approve=f"Use { {'a': 1} }?")

    error = await error_of(order)
    assert "({number})" in error
    assert "Write a brace that is part of the text twice, {{ or }}" in error


async def test_a_step_without_a_name() -> None:
    async def order(step: Any) -> Any:
        return await step(fetch, 1)

    assert "id: expected the step's name, a non-empty string, as the first" in await error_of(order)


async def test_a_race_without_a_name() -> None:
    async def order(step: Any) -> None:
        await step.race(step("a", fetch, 1), step("b", fetch, 2))

    assert "the step's name, a non-empty string, as the first argument" in await error_of(order)


async def test_items_and_function_in_the_wrong_order() -> None:
    async def order(step: Any) -> Any:
        return await step.map("fetch", fetch, [1])

    assert "step.map('fetch', items, function)" in await error_of(order)


async def test_items_and_workflow_in_the_wrong_order() -> None:
    async def order(step: Any) -> Any:
        return await step.map_runs("greet", ["ana"], greet)

    assert "step.map_runs('greet', workflow, items)" in await error_of(order)


def test_a_path_instead_of_a_url() -> None:
    for path in ("runs.db", "sqlite:runs.db"):
        with pytest.raises(InvalidArgument, match=r"A SQLite file is sqlite:///runs\.db"):
            open_store(path)


def test_a_url_without_slashes() -> None:
    with pytest.raises(InvalidArgument, match=r"A SQLite file is sqlite:////tmp/runs\.db"):
        open_store("sqlite:/tmp/runs.db")
    with pytest.raises(InvalidArgument, match="Write redis://"):
        open_store("redis:localhost")


async def test_a_folder_that_does_not_exist(tmp_path: Path) -> None:
    async with Runtime(f"sqlite:///{tmp_path}/no/runs.db", workflows=[greet]) as runtime:
        with pytest.raises(StoreNotOpened, match="there is no folder"):
            await runtime.trigger(greet, "ana")


@pytest.mark.parametrize("scheme", ["postgresql", "mysql", "redis"])
async def test_a_wrong_port(scheme: str) -> None:
    """The store retries for its connect timeout, but the write is not repeated."""
    store = open_store(f"{scheme}://shop@127.0.0.1:{free_port()}/1", connect_timeout="200ms")
    async with store, Runtime(store, workflows=[greet]) as runtime:
        with pytest.raises(
            StoreNotOpened, match=r"127\.0\.0\.1.* is unavailable.*tried for 0\.\ds"
        ):
            await runtime.trigger(greet, "ana")


async def test_a_port_that_is_not_a_number() -> None:
    async with Runtime("postgresql://shop@db:port/shop", workflows=[greet]) as runtime:
        with pytest.raises(InvalidArgument, match="expected a PostgreSQL URL"):
            await runtime.trigger(greet, "ana")
