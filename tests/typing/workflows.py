"""The types of workflows: results, dependencies, snapshots, definitions and runs."""

from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, NoReturn, assert_type

from perdure import (
    Err,
    Limits,
    Ok,
    Queue,
    Rate,
    Result,
    ResumeState,
    Run,
    Runtime,
    Snapshot,
    StatePersistence,
    Step,
    Worker,
    Workflow,
    durable,
    is_step_complete,
    parse_state,
    stringify_state,
    workflow,
)
from perdure.caches import FileCache, MemoryCache
from perdure.engine.function import Deps
from perdure.events import StepComplete
from perdure.keyvalue import MemoryKeyValue
from perdure.runtime import SignalResult
from perdure.runtime.definition import Definition
from perdure.store import RunSummary
from perdure.stores import MemoryStore, open_store, sqlite


@dataclass
class Shop:
    currency: str


@dataclass
class Signup:
    email: str


async def alone(step: Step) -> int:
    return await step("one", lambda: 1)


async def with_shop(step: Step, shop: Shop) -> str:
    return shop.currency


async def with_deps(step: Step, deps: Deps) -> str:
    return str(deps.currency)


async def in_this_process(snapshot: Snapshot | None) -> None:
    assert_type(await Workflow("w").run(alone), Ok[int] | Err[Any])
    assert_type(await Workflow("w", Shop("EUR")).run(with_shop), Ok[str] | Err[Any])
    assert_type(await Workflow("w", {"currency": "EUR"}).run(with_deps), Ok[str] | Err[Any])
    assert_type(Workflow("w", Shop("EUR")).deps, Shop)
    resumed = Workflow("w", Shop("EUR"), snapshot=snapshot, on_unknown_steps="error")
    assert_type(resumed.snapshot(include="completed", limit=10), Snapshot)


async def resume_states(state: ResumeState | None) -> None:
    result, collected = await Workflow("w").run_with_state(alone, resume_state=state)
    assert_type(result, Ok[int] | Err[Any])
    assert_type(parse_state(stringify_state(collected, workflow_id="w")), ResumeState)
    persistence = StatePersistence(MemoryKeyValue())
    assert_type(await persistence.load("w"), ResumeState | None)


def caches() -> None:
    Workflow("w", cache={})
    Workflow("w", cache=MemoryCache(max_size=10, ttl="7d"))
    Workflow("w", cache=FileCache("./state"))


def is_complete(event: object) -> None:
    if is_step_complete(event):
        assert_type(event, StepComplete)


async def durable_runs() -> None:
    store = sqlite("workflow.db", prefix="orders:")
    result = await durable.run(Shop("EUR"), with_shop, id="run-1", store=store, version=2)
    assert_type(result, Ok[str] | Err[Any])
    waited = await durable.run({}, alone, id="run-1", store=store, wait="30s", types=[Shop])
    assert_type(waited, Ok[int] | Err[Any])
    assert_type(await durable.list_pending(open_store("memory://")), list[RunSummary])
    assert_type(durable.run_sync({}, alone, id="run-2"), Ok[int] | Err[Any])


@workflow("welcome", version=2)
async def welcome(step: Step, payload: Signup) -> str:
    return await step("greet", lambda: payload.email)


@workflow("nightly")
async def nightly(step: Step) -> Result[int, str]:
    return Ok(1)


@workflow("loop", deadline="1h", types=[Shop])
async def loop(step: Step, payload: Signup) -> str:
    if payload.email:
        return payload.email
    again: Coroutine[Any, Any, NoReturn] = step.continue_as_new(Signup("a@b.c"))
    return await again


async def on_a_runtime() -> None:
    assert_type(loop, Definition[Signup, str])
    assert_type(welcome, Definition[Signup, str])
    assert_type(nightly, Definition[None, int])
    runtime = Runtime(MemoryStore(), workflows=[welcome, nightly])
    run = await runtime.trigger(welcome, Signup("a@b.c"))
    assert_type(run, Run[str])
    assert_type(run.output, str | None)
    assert_type((run.traceback, run.history[0].traceback), tuple[str, str])
    assert_type(await runtime.trigger(nightly, run_id="nightly-1", wait=False), Run[int])
    assert_type(await runtime.trigger("welcome", {"email": "a@b.c"}), Run[Any])
    assert_type(await runtime.trigger("nightly"), Run)
    assert_type(await runtime.signal(run.id, "approved"), SignalResult)
    assert_type(await runtime.get_run(run.id), Run | None)
    assert_type(await runtime.sweep(limit=10), list[Run])
    async with Worker(runtime, concurrency=10) as worker:
        assert_type(worker, Worker)


emails = Queue("emails", concurrency=50, rate=Rate(100, per="1m"), per_key=Limits(concurrency=2))


@workflow("queued", queue=emails, key=lambda signup: signup.email, priority=1)
async def queued(step: Step, payload: Signup) -> str:
    return payload.email


async def a_queue_does_not_change_the_types_of_a_workflow(runtime: Runtime) -> None:
    assert_type(queued, Definition[Signup, str])
    assert_type(await runtime.trigger(queued, Signup("a@b.c"), priority=5), Run[str])
    Worker(runtime, queues=["emails", ""])
