"""Switches: what operators tell workers, which read them with each heartbeat.

The only documents on which decisions of the engine depend. A missing one is off.
"""

from collections.abc import Iterable
from datetime import timedelta
from typing import TypeAlias

import msgspec

from perdure.durable.in_flight import Time
from perdure.presence import keys
from perdure.presence.documents import decode
from perdure.store import SearchStore, Store, can_search, require_search
from perdure.validation import check_id

WORKER_SWITCH_TTL = timedelta(days=2)
"""Each worker has an id of its own, so that its switch is of no use when it has stopped."""


class WorkflowSwitch(msgspec.Struct, frozen=True):
    """Whether workers leave the runs of a workflow alone, and the operator who decided that."""

    workflow: str
    paused: bool
    by: str
    why: str
    at: Time


class WorkerSwitch(msgspec.Struct, frozen=True):
    """Whether a worker is to stop as on SIGTERM, and the operator who decided that."""

    worker: str
    drain: bool
    by: str
    why: str
    at: Time


Switch: TypeAlias = WorkflowSwitch | WorkerSwitch


class Switches(msgspec.Struct, frozen=True):
    """All switches, by workflow and by worker, on or off."""

    workflows: dict[str, WorkflowSwitch] = {}
    workers: dict[str, WorkerSwitch] = {}

    @property
    def paused(self) -> frozenset[str]:
        """The names of the paused workflows."""
        return frozenset(name for name, switch in self.workflows.items() if switch.paused)

    def drains(self, worker: str) -> bool:
        """Return whether a worker is to stop."""
        return worker in self.workers and self.workers[worker].drain


async def set_switch(store: Store, switch: Switch) -> None:
    """Set a switch; workers act on it within ten seconds."""
    documents = require_search(store, "a switch").documents
    if isinstance(switch, WorkflowSwitch):
        key, ttl = keys.workflow_switch_key(check_id(switch.workflow, "workflow")), None
    else:
        key, ttl = keys.worker_switch_key(check_id(switch.worker, "worker")), WORKER_SWITCH_TTL
    await documents.set(key, msgspec.json.encode(switch).decode(), ttl=ttl)


async def read_switches(store: Store) -> Switches:
    """Return all switches; there are none on a store without documents."""
    if not can_search(store):
        return Switches()
    return await _read(store, await store.documents.keys("switch:*"))


async def read_switches_of(store: SearchStore, worker: str, workflows: Iterable[str]) -> Switches:
    """Return the switches that a worker obeys, in one read."""
    wanted = [keys.worker_switch_key(worker), *map(keys.workflow_switch_key, workflows)]
    return await _read(store, wanted)


async def _read(store: SearchStore, wanted: list[str]) -> Switches:
    workflows: dict[str, WorkflowSwitch] = {}
    workers: dict[str, WorkerSwitch] = {}
    for key, value in zip(wanted, await store.documents.get_many(wanted), strict=True):
        if key.startswith(keys.WORKFLOW_SWITCH):
            if (paused := decode(value, WorkflowSwitch)) is not None:
                workflows[paused.workflow] = paused
        elif (drained := decode(value, WorkerSwitch)) is not None:
            workers[drained.worker] = drained
    return Switches(workflows, workers)
