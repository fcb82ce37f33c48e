"""Invalid arguments for every public parameter: the error names it and what was expected.

The table lists each public callable with valid arguments, and invalid ones for each parameter. A
parameter that accepts any value is marked as such; `test_every_parameter_is_in_the_table` fails for
one that is missing in the table.
"""

import inspect
import re
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from random import Random
from typing import Any

import pytest

import perdure
from perdure import (
    Client,
    Cron,
    Keep,
    Limit,
    Limits,
    Middleware,
    Queue,
    Rate,
    ResumeState,
    ResumeStateCollector,
    Retry,
    Runtime,
    Schedule,
    Signal,
    StatePersistence,
    Step,
    Timeout,
    Worker,
    Workflow,
    assert_valid_snapshot,
    durable,
    is_step_complete,
    merge_snapshots,
    parse_state,
    stringify_state,
    sync,
    workflow,
)
from perdure.caches import FileCache, KeyValueCache, MemoryCache
from perdure.clock import parse_duration
from perdure.errors import InvalidArgument, PerdureError, RunNotFound, ScheduleNotFound
from perdure.keyvalue import MemoryKeyValue
from perdure.result import Err, Ok
from perdure.resume import ResumeEntry
from perdure.snapshot import new_snapshot
from perdure.stores import FileStore, MemoryStore, keyvalue, open_store, sqlite
from perdure.testing import TestClock

NOW = datetime(2030, 1, 1, tzinfo=UTC)
SNAPSHOT = new_snapshot("w", now=NOW)

ANYTHING: tuple[Any, ...] = ()
"""For parameters that accept any value."""

NO_TEXT = (5, None, b"x", ["x"])
NO_NAME = (*NO_TEXT, "")
RESERVED = ("~", "~log:x")
NO_COUNT = ("3", 1.5, True, None, -1)
NO_DURATION: tuple[Any, ...] = ("soon", -1, float("nan"), None, [], True, 10**400)
NO_FLAG = ("yes", None, 1)
NO_CLOCK = (5, None, "now", TestClock)
NO_LISTENER: tuple[Any, ...] = (5, "print", [])
NO_ERRORS = (5, [5], "ValueError", [int], ValueError)
NO_TYPES = (5, None, "x", int, [5], ["User"], [ValueError], [list[int]], [int])
NO_STORE = (5, "sqlite:///x.db", MemoryStore)
NO_STORE_OR_URL = (5, "x.db", "carrier-pigeon://x", MemoryStore)


async def body(step: Step) -> int:
    return await step("x", lambda: 1)


async def of_nothing() -> None: ...


async def of_three(step: Step, payload: int, more: int) -> None: ...


@workflow("known")
async def known_workflow(step: Step, payload: int = 0) -> int:
    return payload


@dataclass(frozen=True)
class Case:
    """A public callable with valid arguments, and invalid ones by parameter."""

    make: Callable[[], Callable[..., Any]]
    bad: dict[str, tuple[Any, ...]]
    good: dict[str, Any] = field(default_factory=dict)


def of(thing: Callable[..., Any]) -> Callable[[], Callable[..., Any]]:
    return lambda: thing


async def no_context_manager() -> None: ...


def opens_with(url: str) -> None: ...


async def async_generator() -> AsyncGenerator[None]:
    yield


def runtime() -> Runtime:
    return Runtime(MemoryStore(), workflows=[known_workflow])


def client() -> Client:
    return Client(MemoryStore(), workflows=[known_workflow])


OPTIONS: dict[str, tuple[Any, ...]] = {
    "snapshot": (5, "{}", {}, {"formatVersion": 2}, ResumeState()),
    "resume_state": (5, "{}", {}, SNAPSHOT),
    "cache": (5, "x", [], MemoryCache),
    "on_event": NO_LISTENER,
    "errors": NO_ERRORS,
    "types": NO_TYPES,
    "on_unknown_steps": ("raise", None, True),
    "on_definition_change": ("raise", None, True),
    "clock": NO_CLOCK,
    "random": (5, None, "x", Random),
}

DURABLE: dict[str, tuple[Any, ...]] = {
    "deps": ANYTHING,
    "fn": (5, None, "x", lambda step: 1, print),
    "id": (*NO_NAME, "x" * 513, "a\0b", "\ud800", *RESERVED),
    "store": NO_STORE,
    "version": NO_COUNT,
    "keep": NO_FLAG,
    "input": ANYTHING,
    "metadata": (5, "x", [1], {"generation": 2}),
    "on_event": NO_LISTENER,
    "errors": NO_ERRORS,
    "types": NO_TYPES,
    "lease_ttl": (*NO_DURATION, 0),
    "allow_concurrent": NO_FLAG,
    "on_version_mismatch": ("retry", None, 5),
    "replay_errors": NO_FLAG,
    "idempotency_key": ("", 5, "x" * 513, *RESERVED),
    "wait": NO_DURATION,
    "clock": NO_CLOCK,
}

NO_MIDDLEWARE = (5, "x", [5], [Middleware], Middleware())

STORE: dict[str, tuple[Any, ...]] = {
    "prefix": (5, None, "a\0b", "x" * 513),
    "clock": NO_CLOCK,
    "max_value_size": (*NO_COUNT, 0),
}

OVER = ("completed", "failed", "cancelled")
NO_KEEP = (5, "all", timedelta(days=7), Keep)

START: dict[str, tuple[Any, ...]] = {
    "at": (5, "now", datetime(2030, 1, 1)),
    "delay": ("soon", -1, float("nan"), [], True),
    "priority": (*filter(None, NO_COUNT), 1001),
    "tags": (5, ["a=b"], {"a": 1}, {1: "a"}, {"": "a"}, {"a=b": "c"}, {"a": "b" * 256},
             {"a": "\0"}, {"a": "\ud800"}, {str(n): "" for n in range(17)}),
    "deadline": (datetime(2030, 1, 1), "soon", 0, -1, []),
    "metadata": (5, "x", ["a"], {"a": object()}, {1: "a"}, {"": 1}, {"a": "x" * 9000}),
    "if_exists": ("restart", True, 5),
}  # fmt: skip

QUEUE_LIMITS: dict[str, tuple[Any, ...]] = {
    "concurrency": (*filter(None, NO_COUNT), 0),
    "rate": (5, "1/s", Rate),
}

NO_QUEUE_NAME = (*NO_NAME, "a/b", "a~b", "x" * 101, "\ud800", *RESERVED)

SCHEDULE: dict[str, tuple[Any, ...]] = {
    "every": (*NO_DURATION, 0, 0.5, "0 9 * * *"),
    "jitter": NO_DURATION,
    "overlap": ("queue", None, 5),
    "catch_up": NO_DURATION,
    "start_at": (5, "now", datetime(2030, 1, 1)),
    "end_at": (5, "now", datetime(2030, 1, 1)),
    "on_failure": ("stop", None, 5),
}

CASES: dict[str, Case] = {
    "Workflow": Case(
        of(Workflow),
        {"name": (*NO_NAME, *RESERVED), "deps": ANYTHING, **OPTIONS},
        {"name": "w"},
    ),
    "Workflow.run": Case(
        lambda: Workflow("w").run,
        {"fn": (5, None, "x", lambda step: 1), "deps": ANYTHING, **OPTIONS},
        {"fn": body},
    ),
    "Workflow.run_with_state": Case(
        lambda: Workflow("w").run_with_state,
        {"fn": (5, None, "x", lambda step: 1), "deps": ANYTHING, **OPTIONS},
        {"fn": body},
    ),
    "Workflow.snapshot": Case(
        lambda: Workflow("w").snapshot,
        {
            "include": ("some", None, 5),
            "metadata": (5, "x", [1], {1: 2}, {"generation": 2}),
            "limit": ("3", 1.5, True, -1),
            "since": (5, ["a"]),
        },
    ),
    "Workflow.subscribe": Case(
        lambda: Workflow("w").subscribe,
        {"listener": NO_LISTENER, "mode": ("later", None), "coalesce": ("all", None, "latest")},
        {"listener": print},
    ),
    "Cron": Case(
        of(Cron),
        {"expr": (5, None, "", "* *", "99 * * * *"), "tz": (5, None, "Nowhere/City")},
        {"expr": "0 9 * * *"},
    ),
    "Retry": Case(
        of(Retry),
        {
            "attempts": (*NO_COUNT, 0),
            "backoff": ("quadratic", None, 5),
            "delay": NO_DURATION,
            "max_delay": NO_DURATION,
            "jitter": ("some", None, -0.1, 1.1, float("nan")),
            "retry_if": ("always", 5),
        },
    ),
    "Timeout": Case(
        of(Timeout),
        {"after": (*NO_DURATION, 0), "on_timeout": ("raise", None, 5)},
        {"after": 5},
    ),
    "Rate": Case(
        of(Rate), {"n": (*NO_COUNT, 0), "per": (*NO_DURATION, 0)}, {"n": 1, "per": "1m"}
    ),
    "Limits": Case(of(Limits), QUEUE_LIMITS),
    "Queue": Case(
        of(Queue),
        {
            "name": NO_QUEUE_NAME,
            **QUEUE_LIMITS,
            "per_key": (5, None, Rate(1, per=1), Limits),
            "fair": NO_FLAG,
        },
        {"name": "emails"},
    ),
    "Limit": Case(
        of(Limit),
        {
            "name": NO_QUEUE_NAME,
            "n": (*NO_COUNT, 0),
            "per": (*filter(None, NO_DURATION), 0),
        },
        {"name": "tokens", "n": 5},
    ),
    "Limit.cost": Case(lambda: Limit("tokens", 5).cost, {"units": (*NO_COUNT, 0, 6)}, {"units": 1}),
    "parse_duration": Case(
        of(parse_duration), {"value": NO_DURATION, "parameter": ANYTHING}, {"value": 1}
    ),
    "ResumeState": Case(
        of(ResumeState), {"steps": (5, "x", None, {"a": 1}, {1: ResumeEntry(Ok(1))})}
    ),
    "ResumeStateCollector.handle_event": Case(
        lambda: ResumeStateCollector().handle_event, {"event": ANYTHING}, {"event": 5}
    ),
    "stringify_state": Case(
        of(stringify_state), {"state": (5, None, "{}", {}, SNAPSHOT)}, {"state": ResumeState()}
    ),
    "parse_state": Case(
        of(parse_state),
        {"text": (5, None, {}, "", "nonsense", "[]", "{}")},
        {"text": stringify_state(ResumeState())},
    ),
    "is_step_complete": Case(
        of(is_step_complete),
        {"subject": (5, "{}", SNAPSHOT), "key": (5, b"x")},
        {"subject": ResumeState(), "key": "a"},
    ),
    "StatePersistence": Case(
        of(StatePersistence),
        {"kv": (5, None, "x", {}, MemoryKeyValue), "prefix": NO_TEXT},
        {"kv": MemoryKeyValue()},
    ),
    "StatePersistence.save": Case(
        lambda: StatePersistence(MemoryKeyValue()).save,
        {"run_id": NO_NAME, "state": (5, None, "{}", SNAPSHOT)},
        {"run_id": "r", "state": ResumeState()},
    ),
    "StatePersistence.load": Case(
        lambda: StatePersistence(MemoryKeyValue()).load, {"run_id": NO_NAME}, {"run_id": "r"}
    ),
    "assert_valid_snapshot": Case(
        of(assert_valid_snapshot),
        {"candidate": (5, None, "{}", {}, {"formatVersion": 1})},
        {"candidate": SNAPSHOT},
    ),
    "merge_snapshots": Case(
        of(merge_snapshots), {"base": (5, None, "{}", [])}, {"base": SNAPSHOT}
    ),
    "durable.run": Case(
        of(durable.run), DURABLE, {"deps": {}, "fn": body, "id": "r", "store": MemoryStore()}
    ),
    "durable.has_state": Case(
        of(durable.has_state),
        {"store": NO_STORE, "id": NO_NAME},
        {"store": MemoryStore(), "id": "r"},
    ),
    "durable.delete_state": Case(
        of(durable.delete_state),
        {"store": NO_STORE, "id": NO_NAME},
        {"store": MemoryStore(), "id": "r"},
    ),
    "durable.delete_states": Case(
        of(durable.delete_states),
        {"store": NO_STORE, "ids": (5, None, "r"), "concurrency": (*NO_COUNT, 0)},
        {"store": MemoryStore(), "ids": ["r"]},
    ),
    "durable.list_pending": Case(
        of(durable.list_pending),
        {"store": NO_STORE, "prefix": (5, None, "a\0b"), "limit": NO_COUNT},
        {"store": MemoryStore()},
    ),
    "durable.clear_state": Case(
        of(durable.clear_state), {"store": NO_STORE}, {"store": MemoryStore()}
    ),
    "workflow": Case(
        of(workflow),
        {
            "name": (*NO_NAME, "x" * 513, body, *RESERVED),
            "version": NO_COUNT,
            "errors": NO_ERRORS,
            "types": NO_TYPES,
            "migrate": (5, "x"),
            "deadline": (*filter(None, NO_DURATION), 0),
            "schedule": (5, "1h", Cron("0 9 * * *"), Schedule),
            "queue": (5, "emails", Queue),
            "key": (5, "tenant", str),
            "priority": (*NO_COUNT, 1001),
            "keep": NO_KEEP,
        },
        {"name": "w"},
    ),
    "@workflow": Case(
        lambda: workflow("w"),
        {"fn": (5, None, "x", lambda step: 1, print, of_nothing, of_three)},
        {"fn": body},
    ),
    "Client": Case(
        of(Client),
        {
            "store": (*NO_STORE_OR_URL, None),
            "workflows": (5, [5], [body], known_workflow),
            "around": NO_MIDDLEWARE,
            "clock": NO_CLOCK,
            "random": (5, "x", Random),
        },
        {"store": MemoryStore()},
    ),
    "Client.trigger": Case(
        lambda: client().trigger,
        {
            "workflow": (5, None, body, "", *RESERVED),
            "payload": ("x", [], {"a": 1}),
            "run_id": ("", 5, "x" * 513, *RESERVED),
            "connection": ANYTHING,  # no connection fits a memory store: see tests/stores
            **START,
        },
        {"workflow": known_workflow, "payload": 1},
    ),
    "Client.trigger_many": Case(
        lambda: client().trigger_many,
        {
            "workflow": (5, None, body, "", *RESERVED),
            "payloads": (5, "text", ["x"]),
            "run_ids": ([], ["a", "b"], "a", [5], ["~"]),
            **START,
        },
        {"workflow": known_workflow, "payloads": [1]},
    ),
    "Keep": Case(
        of(Keep),
        {
            **dict.fromkeys(OVER, (*filter(None, NO_DURATION), "1h")),
            "what": ("steps", None, True),
            "unknown": ANYTHING,
        },
        {"completed": "7d"},
    ),
    "Schedule": Case(of(Schedule), SCHEDULE, {"every": "1h"}),
    "Client.schedule": Case(
        lambda: client().schedule,
        {
            "name": (*NO_NAME, "x" * 201, *RESERVED),
            "workflow": (5, None, body, "", *RESERVED),
            "payload": ("x", [], {"a": 1}),
            "tags": START["tags"],
            **SCHEDULE,
        },
        {"name": "daily", "workflow": known_workflow, "payload": 1, "every": "1h"},
    ),
    "Client.get_schedule": Case(
        lambda: client().get_schedule, {"name": (*NO_NAME, *RESERVED)}, {"name": "daily"}
    ),
    "Client.signal_many": Case(
        lambda: client().signal_many,
        {"signals": (5, [5], ["run"], [("run", "event")])},
        {"signals": [Signal("run", "event")]},
    ),
    "Client.broadcast": Case(
        lambda: client().broadcast,
        {
            "event": (*NO_NAME, "\ud800", *RESERVED),
            "payload": (object(), lambda: 1),
            "workflow": (5, b"x", ["x"], ""),
            "tags": (None, {}, *START["tags"]),
            "dedup_id": ("", 5, "x" * 513, *RESERVED),
        },
        {"event": "price", "tags": {"sku": "7"}},
    ),
    "Client.signal_or_start": Case(
        lambda: client().signal_or_start,
        {
            "workflow": (5, None, body, "", *RESERVED),
            "run_id": (*NO_NAME, *RESERVED),
            "event": (*NO_NAME, "\ud800", *RESERVED),
            "payload": (object(), lambda: 1),
            "start": ("x", [], {"a": 1}),
            "dedup_id": ("", 5, "x" * 513, *RESERVED),
        },
        {"workflow": known_workflow, "run_id": "r", "event": "add", "start": 1},
    ),
    "Client.ask": Case(
        lambda: client().ask,
        {
            "run_id": (*NO_NAME, *RESERVED),
            "event": (*NO_NAME, "\ud800", *RESERVED),
            "payload": (object(), lambda: 1),
            "timeout": ("soon", -1, []),
        },
        {"run_id": "r", "event": "quote"},
    ),
    "Client.result": Case(
        lambda: client().result, {"run": NO_NAME, "timeout": ("soon", -1, [])}, {"run": "r"}
    ),
    "Client.watch": Case(lambda: client().watch, {"run": NO_NAME}, {"run": "r"}),
    "Client.handle": Case(
        lambda: client().handle,
        {"run_id": (*NO_NAME, *RESERVED), "workflow": (5, "known", body)},
        {"run_id": "r"},
    ),
    "sync.Client": Case(
        of(sync.Client),
        {
            "store": (*NO_STORE_OR_URL, None),
            "workflows": (5, [5], [body], known_workflow),
            "around": NO_MIDDLEWARE,
        },
        {"store": MemoryStore()},
    ),
    "Runtime": Case(
        of(Runtime),
        {
            "deps": (no_context_manager, opens_with, async_generator),
            "store": NO_STORE_OR_URL,
            "workflows": (5, [5], [body], known_workflow),
            "around": NO_MIDDLEWARE,
            "lease_ttl": (*NO_DURATION, 0),
            "suspend_after": NO_DURATION,
            "on_event": NO_LISTENER,
            "on_definition_change": ("raise", None, True),
            "record_arguments": ("all", None, True),
            "callback_url": (5, None, "x", "ftp://host/"),
            "keep": NO_KEEP,
            "clock": NO_CLOCK,
            "random": (5, "x", Random),
            "always_replay": NO_FLAG,
        },
    ),
    "Runtime.register": Case(
        lambda: runtime().register, {"definition": (5, None, body)}, {"definition": known_workflow}
    ),
    "Runtime.add_middleware": Case(
        lambda: runtime().add_middleware,
        {"middleware": (5, None, Middleware, [Middleware()])},
        {"middleware": Middleware()},
    ),
    "Runtime.trigger": Case(
        lambda: runtime().trigger,
        {
            "workflow": (5, None, body),
            "payload": ("x", [], {"a": 1}),
            "run_id": ("", 5, "x" * 513, *RESERVED),
            "wait": NO_FLAG,
            "connection": ANYTHING,  # no connection fits a memory store: see tests/stores
            **START,
        },
        {"workflow": known_workflow, "payload": 1},
    ),
    "Runtime.resume": Case(
        lambda: runtime().resume, {"run_id": NO_NAME, "wait": NO_FLAG}, {"run_id": "r"}
    ),
    "Runtime.signal": Case(
        lambda: runtime().signal,
        {
            "run_id": (*NO_NAME, *RESERVED),
            "event": (*NO_NAME, "\ud800", "~cancel", *RESERVED),
            "payload": (object(), lambda: 1),
            "dedup_id": ("", 5, "x" * 513, *RESERVED),
            "wait": NO_FLAG,
        },
        {"run_id": "r", "event": "e"},
    ),
    "Runtime.sweep": Case(
        lambda: runtime().sweep,
        {"now": (5, "now", datetime(2030, 1, 1)), "limit": (*NO_COUNT, 0)},
    ),
    "Runtime.get_run": Case(lambda: runtime().get_run, {"run_id": NO_NAME}, {"run_id": "r"}),
    "Runtime.list_runs": Case(
        lambda: runtime().list_runs,
        {
            "workflow": (5, ""),
            "status": ("done", 5),
            "tags": (5, ["a=b"], {"a": 1}),
            "prefix": (5, None, "a\0b"),
            "limit": NO_COUNT,
            "after": (5, "nonsense"),
        },
    ),
    "Runtime.cancel": Case(
        lambda: runtime().cancel,
        {"run_id": NO_NAME, "reason": (5, None), "undo": NO_FLAG, "wait": NO_FLAG},
        {"run_id": "r"},
    ),
    "Runtime.retry": Case(
        lambda: runtime().retry, {"run_id": NO_NAME, "wait": NO_FLAG}, {"run_id": "r"}
    ),
    "Runtime.delete": Case(lambda: runtime().delete, {"run_id": NO_NAME}, {"run_id": "r"}),
    "Worker": Case(
        of(Worker),
        {
            "runtime": (5, None, MemoryStore(), Runtime),
            "concurrency": (*NO_COUNT, 0),
            "poll": (*NO_DURATION, 0),
            "grace": NO_DURATION,
            "max_crashes": (*NO_COUNT, 0),
            "queues": (5, "emails", [5], ["a/b"], RESERVED),
        },
        {"runtime": runtime()},
    ),
    "MemoryStore": Case(of(MemoryStore), {**STORE, "shares": (5, "x", MemoryStore)}),
    "FileStore": Case(
        of(FileStore),
        {"directory": (5, None, b"x"), "durability": ("some", None), **STORE},
        {"directory": "never-made"},
    ),
    "sqlite": Case(
        of(sqlite),
        {
            "path": (5, None, b"x"),
            "table": (*NO_NAME, "a b", 'a"b', "1a"),
            "durability": ("some", None),
            "busy_timeout": NO_DURATION,
            **STORE,
        },
        {"path": "never-made.db"},
    ),
    "keyvalue": Case(
        of(keyvalue),
        {"store": (5, None, "x", {}, MemoryKeyValue), "survives": ("much", 5), **STORE},
        {"store": MemoryKeyValue()},
    ),
    "open_store": Case(
        of(open_store),
        {"url": (5, None, "", "x.db", "ftp://x", "sqlite:///x.db?a=1")},
        {"url": "memory://"},
    ),
    "MemoryCache": Case(
        of(MemoryCache),
        {"max_size": ("3", 1.5, True, -1, 0), "ttl": ("soon", -1, [], True), "clock": NO_CLOCK},
    ),
    "FileCache": Case(
        of(FileCache),
        {"directory": (5, None, b"x"), "ttl": ("soon", -1, [], True), "clock": NO_CLOCK},
        {"directory": "never-made"},
    ),
    "KeyValueCache": Case(
        of(KeyValueCache),
        {"kv": (5, None, "x", {}), "prefix": NO_TEXT, "ttl": ("soon", -1, [], True)},
        {"kv": MemoryKeyValue()},
    ),
}  # fmt: skip

# What a message may begin with instead of the parameter's name.
ALSO_CALLED = {
    "store": "url",
    "payloads": "payload of workflow",
    "run_ids": "run_id",
    "signals": "signal",
    "middleware": "around",
    "start": "payload of workflow",
    "candidate": "Invalid snapshot format",
    "base": "Invalid snapshot format",
    "snapshot": "Invalid snapshot format",
    "after": "timeout",
    "text": "not a resume state",
    "subject": "state",
    "payload": "payload",
    "definition": "workflows",
    "value": "duration",
    "event": "event",
}


async def call(case: Case, **changed: Any) -> None:
    """Call with valid arguments except for those that are changed."""
    target = case.make()
    arguments = {**case.good, **changed}
    positional = []
    parameters: list[inspect.Parameter] = []
    with suppress(ValueError):
        parameters += inspect.signature(target).parameters.values()
    for parameter in parameters:
        if parameter.kind is parameter.POSITIONAL_ONLY and parameter.name in arguments:
            positional.append(arguments.pop(parameter.name))
        elif parameter.kind is parameter.POSITIONAL_ONLY and arguments:
            positional.append(parameter.default)
    result = target(*positional, **arguments)
    if inspect.isawaitable(result):
        await result


def short_repr(value: Any) -> str:
    return re.sub(r"[^ -~]| at 0x\w+", "", repr(value))[:30]


ROWS = [
    pytest.param(case, parameter, value, id=f"{name}({parameter}={short_repr(value)})")
    for name, case in CASES.items()
    for parameter, values in case.bad.items()
    for value in values
]  # fmt: skip


@pytest.mark.parametrize(("case", "parameter", "value"), ROWS)
async def test_an_invalid_argument_is_named(case: Case, parameter: str, value: Any) -> None:
    """The error is a `PerdureError` that names the parameter, what was expected and the value."""
    with pytest.raises(PerdureError) as raised:
        await call(case, **{parameter: value})
    message = str(raised.value)
    assert message.startswith((parameter, ALSO_CALLED.get(parameter, parameter))), message
    if isinstance(raised.value, InvalidArgument):
        assert type(value).__name__ in message or repr(raised.value.got)[:20] in message
        assert "expected" in message


@pytest.mark.parametrize("name", CASES)
async def test_the_valid_arguments_are_valid(name: str) -> None:
    """The call succeeds, or at least passes the checks."""
    with suppress(RunNotFound, ScheduleNotFound):
        await call(CASES[name])


@pytest.mark.parametrize("name", CASES)
def test_every_parameter_is_in_the_table(name: str) -> None:
    """This includes parameters that are added later."""
    case = CASES[name]
    parameters = inspect.signature(case.make()).parameters.values()
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    missing = {p.name for p in parameters if p.kind not in variadic} - case.bad.keys()
    assert not missing


def test_every_public_callable_is_in_the_table() -> None:
    """Except for classes that only store their arguments."""
    holders = {
        "Clock", "Err", "Middleware", "Ok", "PerdureError", "Question", "Result",
        "ResumeStateCollector", "Run", "RunContext", "StepContext", "WorkerContext", "current",
        "RunConflict", "RunFailed", "RunHandle", "RunRef", "ScheduleHandle",
        "ScheduleInfo", "Signal", "Snapshot",
        "Step", "StepError", "StepFailed", "StepTimeout", "SystemClock", "validate_snapshot",
        "AlreadyAnswered", "Approval", "ApprovalPage", "ApprovalRequest", "Callback", "Gate",
        "InvalidToken", "OpenApproval", "Rejected", "RollbackFailed", "TooLate",
        "durable", "sync",
    }  # fmt: skip
    assert set(perdure.__all__) - holders <= CASES.keys()


@pytest.mark.parametrize("value", [5, None, "x", object(), [], Ok(1), Err(1), timedelta(1)])
def test_validate_snapshot_accepts_any_object(value: object) -> None:
    """It reports what is wrong and never raises."""
    assert not perdure.validate_snapshot(value).valid
