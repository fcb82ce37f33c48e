"""The run `~maintenance`, which removes finished runs by the policies of their workflows.

Its input contains the policies, so that every process applies the same ones: each worker that
starts sends the policies of its workflows, if they differ. The policy of the highest version
counts, and among workers of one version that of the most recently started worker. The run wakes up
once an hour and works for some seconds at a time. Nothing is recorded in between: removed runs are
gone, and after a crash the next owner simply looks again.
"""

import logging
from collections.abc import Mapping
from datetime import datetime, timedelta
from random import Random
from typing import Any

import msgspec
from msgspec.structs import replace

from perdure import codec
from perdure.durable.host import RunHost
from perdure.durable.session import messages_of, wake_workers
from perdure.engine.current import current_execution
from perdure.engine.execution import Execution
from perdure.engine.step import Step
from perdure.errors import StoreError
from perdure.retention import Over
from perdure.runtime.definition import Definition
from perdure.runtime.pruning import Policies, Pruner
from perdure.runtime.requests import OPERATOR
from perdure.runtime.schedule_workflow import queued_run
from perdure.runtime.system_workflow import SystemWorkflow
from perdure.snapshot import ExecutionBlock, Snapshot
from perdure.store import (
    NewMessage,
    Rest,
    Store,
    require_inbox,
    require_maintenance,
    require_schedule,
)

logger = logging.getLogger(__name__)

MAINTENANCE = "~maintenance"
"""The name of the workflow, and the id of its only run."""

POLICIES = "~policies"
"""The message with which a worker declares the policies of its workflows."""

INTERVAL = timedelta(hours=1)
"""How often the run looks for runs to remove."""

AT_A_TIME = 5.0
"""How many seconds the run works before it is settled; it then continues at once."""


class DeclaredPolicy(msgspec.Struct, frozen=True):
    """How many seconds a version of a workflow keeps its runs, by status; the rest forever."""

    version: int
    spans: dict[Over, float] = {}


class MaintenanceInput(msgspec.Struct, frozen=True):
    """The state of the run.

    `since` is when the current pass began, if it is not done yet; `looked_at` is when the last pass
    was done. `removed` is how many runs were removed in total.
    """

    policies: dict[str, DeclaredPolicy] = {}
    since: datetime | None = None
    looked_at: datetime | None = None
    removed: int = 0


def read_input(snapshot: Snapshot | None) -> MaintenanceInput:
    """Return the input of the run from its snapshot."""
    data = None if snapshot is None else (snapshot.get("metadata") or {}).get("input")
    return msgspec.convert(data or {}, MaintenanceInput)


def spans_of(policies: Mapping[str, DeclaredPolicy]) -> Policies:
    """Return how long runs are kept."""
    return {
        name: {status: timedelta(seconds=span) for status, span in each.spans.items()}
        for name, each in policies.items()
    }


def merge_policies(
    policies: Mapping[str, DeclaredPolicy], declared_policies: Mapping[str, DeclaredPolicy]
) -> dict[str, DeclaredPolicy]:
    """Return the policies after a worker has declared its own; a lower version changes nothing."""
    newer = {
        name: each
        for name, each in declared_policies.items()
        if (each.version >= policies[name].version if name in policies else bool(each.spans))
    }
    return {**policies, **newer}


async def declare(
    store: Store, own: Mapping[str, DeclaredPolicy], now: datetime, random: Random
) -> None:
    """Send the policies of a worker's workflows to `~maintenance`, creating it if necessary."""
    snapshot = await store.load(MAINTENANCE)
    policies = merge_policies(read_input(snapshot).policies, own)
    if snapshot is None and policies:
        await _create(require_maintenance_of(store), policies, now, random)
        snapshot = await store.load(MAINTENANCE)
    if merge_policies(read_input(snapshot).policies, own) == read_input(snapshot).policies:
        return
    logger.info("the policies of %s are declared", ", ".join(sorted(own)))
    payload = codec.dumps(msgspec.to_builtins(dict(own)))
    require_inbox(store, "keep=")
    await messages_of(store).send([NewMessage(MAINTENANCE, POLICIES, payload)])


def require_maintenance_of(store: Store) -> Store:
    """Return a store that can remove runs by policy, or raise `MissingAbility`."""
    require_maintenance(store, "keep=")
    require_schedule(store, "keep=")
    return store


async def _create(
    store: Store, policies: dict[str, DeclaredPolicy], now: datetime, random: Random
) -> None:
    first_input = msgspec.to_builtins(MaintenanceInput(policies))
    metadata = {"input": first_input, **MAINTENANCE_WORKFLOW.identity}
    new = queued_run(MAINTENANCE, MAINTENANCE, metadata, now, random)
    await require_schedule(store, "keep=").enqueue([new])
    wake_workers(store)


async def maintain(step: Step, state: MaintenanceInput) -> MaintenanceInput:
    """Remove runs for some seconds, and return the new state."""
    run = current_execution()
    assert run is not None, "a workflow function is called in a run"
    host = run.host
    assert isinstance(host, RunHost), "it is executed by a runtime"
    try:
        state = await _with_messages(host, state)
        return await _remove(run, host, state)
    except StoreError as error:
        # The run has not failed: it is tried again.
        raise run.stop(error) from error.__cause__
    except Exception:
        logger.exception("removing old runs failed; it is tried again in an hour")
        return replace(state, since=None)


async def _with_messages(host: RunHost, state: MaintenanceInput) -> MaintenanceInput:
    """Return the input with the policies that were declared; the rest consumes the messages."""
    messages = [each for each in await host.read_inbox() if each.name == POLICIES]
    # Even an unreadable message is consumed: it would make the run due again at once.
    host.leftovers = (*host.leftovers, *(message.id for message in messages))
    policies: Mapping[str, DeclaredPolicy] = state.policies
    for message in messages:
        declared_policies = msgspec.convert(codec.loads(message.payload), dict[str, DeclaredPolicy])
        policies = merge_policies(policies, declared_policies)
    if policies == state.policies:
        return state
    # Start a new pass: more runs may be old enough now, and their logs were not examined.
    return replace(state, policies=dict(policies), since=None)


async def _remove(run: Execution, host: RunHost, state: MaintenanceInput) -> MaintenanceInput:
    now = run.clock.now()
    store = require_maintenance(host.session.store, "keep=")
    pruner = Pruner(store, run.clock, spans_of(state.policies), state.since or now)
    if state.since is None:
        await pruner.remove_logs()
    deadline, count = run.clock.monotonic() + AT_A_TIME, state.removed
    async for batch in pruner.remove():
        count += batch.runs
        if run.clock.monotonic() >= deadline:
            return replace(state, since=state.since or now, removed=count)
    return replace(state, since=None, looked_at=now, removed=count)


class MaintenanceWorkflow(SystemWorkflow):
    """The definition of `~maintenance`, which every runtime knows."""

    def decode_payload(self, data: Any) -> MaintenanceInput:
        """Return the input as the function receives it."""
        return msgspec.convert(data or {}, MaintenanceInput)

    def rest(self, host: RunHost, outcome: Any) -> tuple[ExecutionBlock, Rest]:
        """Return the execution block and the rest until the next pass."""
        next_state: MaintenanceInput = outcome
        host.history = host.history.next_generation(msgspec.to_builtins(next_state))
        # It would be stored with every generation, but nothing uses it.
        del host.history.metadata["firstInput"]
        now = host.clock.now()
        wake_at = now + INTERVAL if next_state.since is None else now
        if not any(each.spans for each in next_state.policies.values()):
            return host.block(state="waiting"), Rest("waiting", None, (OPERATOR, POLICIES))
        return host.block(state="queued"), Rest("queued", wake_at, (OPERATOR, POLICIES))


MAINTENANCE_WORKFLOW: Definition[Any, Any] = MaintenanceWorkflow(MAINTENANCE, maintain)
