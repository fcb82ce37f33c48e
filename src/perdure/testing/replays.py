"""Replay a stored run with the current code, and compare the two.

replay = await replay_snapshot(order, snapshot)
assert replay.fits, replay.problem
"""

from collections.abc import Sequence
from typing import Any, cast

import msgspec

from perdure.clock import parse_iso
from perdure.durable.host import REPLAY, RunHost
from perdure.durable.lifecycle import Program, open_host, run_to_rest
from perdure.durable.outcome import describe_outcome
from perdure.engine.history import History
from perdure.engine.step import Step
from perdure.errors import ContinuedAsNew, PerdureError, RunNotFound
from perdure.result import Result
from perdure.runtime.children import Children
from perdure.runtime.definition import Definition
from perdure.runtime.runtime import Runtime
from perdure.snapshot import (
    ExecutionBlock,
    Snapshot,
    assert_valid_snapshot,
    is_over,
    open_waits,
    rest_status,
)
from perdure.store import Refusal
from perdure.stores.memory import MemoryStore
from perdure.testing.clock import TestClock

_RUN = "replayed"


class Replay(msgspec.Struct, frozen=True):
    """How the current code continues a stored run.

    `problem` is why it cannot, or how it differs; an empty string if the run fits. `unused` are the
    keys of records that were not used: steps that the code no longer calls. `next` are the steps
    and waits at which the run would continue; empty if the function has ended.
    """

    problem: str = ""
    unused: tuple[str, ...] = ()
    next: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether the code continues the run from its records."""
        return not self.problem


async def replay_snapshot(
    workflow: Definition[Any, Any],
    snapshot: Snapshot,
    *,
    run_id: str = _RUN,
    deps: object = None,
    workflows: Sequence[Definition[Any, Any]] = (),
) -> Replay:
    """Replay a run up to the first steps that are not recorded; no step runs and nothing is stored.

    Records must fit the calls and types of the function, and a run that has ended must end in the
    same way. Pass the `run_id` of the stored run if the function uses it. `workflows` are other
    versions of the workflow, and the workflows that it starts.
    """
    all_workflows = [workflow, *(each for each in workflows if each is not workflow)]
    store = MemoryStore(clock=TestClock(parse_iso(snapshot["execution"]["lastUpdated"])))
    runtime = Runtime(store, workflows=all_workflows, deps=deps)
    try:
        definition, live = runtime.registry.for_run(run_id, _reopen(snapshot))
        payload = definition.receive(live)
    except PerdureError as error:
        return Replay(str(error))
    await store.save(run_id, live)
    async with runtime.driver.deps, runtime.session() as session:
        grant = await session.acquire(runtime.driver.request(run_id))
        if isinstance(grant, Refusal):
            raise RunNotFound(run_id)
        host = open_host(session, run_id, History(definition.name, live), grant)
        with runtime.driver.deps.in_use() as in_use:
            program = _program(runtime, host, definition, payload, in_use)
            result = await run_to_rest(host, program)
        replay = _judge(host, definition, snapshot, result)
        await host.release()
    return replay


def _reopen(snapshot: Snapshot) -> Snapshot:
    """Return a run as it was before it ended, without its actions on other runs."""
    stored_snapshot = assert_valid_snapshot(snapshot)
    block: Any = {"status": "running", "lastUpdated": stored_snapshot["execution"]["lastUpdated"]}
    if waits := open_waits(stored_snapshot):
        block["pending"] = waits
    metadata = {**(stored_snapshot.get("metadata") or {})}
    metadata.pop("replyTo", None)
    open_snapshot = {
        **stored_snapshot,
        "execution": cast(ExecutionBlock, block),
        "metadata": metadata,
    }
    open_snapshot.update(outbox={}, waits={})
    return cast(Snapshot, open_snapshot)


def _program(
    runtime: Runtime, host: RunHost, definition: Definition[Any, Any], payload: object, deps: Any
) -> Program:
    async def body(step: Step) -> Any:
        # Pause at once, so that recorded calls are answered, but nothing new begins.
        host.pause()
        return await definition(step, payload)

    return Program(
        body=body,
        random=runtime.random,
        errors=definition.scope,
        types=definition.types,
        payload=payload,
        deps=deps,
        encode_input=definition.encode_payload,
        children=Children(
            host.id, host.history, runtime.store, runtime.registry, runtime.random, host.clock
        ),
        suspend_after=runtime.driver.suspend_after,
    )


def _judge(
    host: RunHost,
    definition: Definition[Any, Any],
    stored: Snapshot,
    result: Result[Any, Any] | None,
) -> Replay:
    unused = tuple(host.history.unused_keys())
    stop_reason, suspended = host.execution.stopped_by, host.suspended_waits
    if suspended is not None:
        ids = [wait["id"].removeprefix(REPLAY) for wait in suspended]
        return Replay("", unused, tuple(dict.fromkeys(ids)))
    if stop_reason is not None or result is None:
        return Replay("" if isinstance(stop_reason, ContinuedAsNew) else str(stop_reason), unused)
    outcome = describe_outcome(host, result, definition.fn, definition.types)
    return Replay(_difference(stored, outcome.block, outcome.status), unused)


def _difference(stored: Snapshot, block: ExecutionBlock, status: str) -> str:
    """Describe how the outcome of a run differs from the stored one."""
    if not is_over(was := rest_status(stored)) or was == "cancelled":
        return ""
    if was != status:
        return f"the run ended as {was}, and now ends as {status}: {_end_of(block)}"
    if _end_of(stored["execution"]) == _end_of(block):
        return ""
    return f"the run ended with {_end_of(stored['execution'])}, and now with {_end_of(block)}"


def _end_of(block: Any) -> str:
    if block["status"] == "completed":
        return repr(block.get("output"))
    error = block.get("error") or {}
    error = error if isinstance(error, dict) else {"error": getattr(error, "error", error)}
    return repr(error.get("error"))
