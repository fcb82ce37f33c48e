"""Switches: instructions of operators to workers, which read them with each heartbeat.

These are the only documents that affect decisions of the engine. A missing switch is off.
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
"""Worker ids are unique, so a worker's switch is useless once the worker has stopped."""


class WorkflowSwitch(msgspec.Struct, frozen=True):
    """Whether a workflow is paused, and by which operator."""

    workflow: str
    paused: bool
    by: str
    why: str
    at: Time


class WorkerSwitch(msgspec.Struct, frozen=True):
    """Whether a worker should stop as on SIGTERM, and which operator decided that."""

    worker: str
    drain: bool
    by: str
    why: str
    at: Time


class QueueSwitch(msgspec.Struct, frozen=True):
    """Whether a queue is paused, and by which operator."""

    queue: str
    paused: bool
    by: str
    why: str
    at: Time


class LimitSwitch(msgspec.Struct, frozen=True):
    """A number that overrides the declared one of a limit; `None` restores it.

    `limit` is a name from `perdure.limits.limit_name`.
    """

    limit: str
    n: int | None
    by: str
    why: str
    at: Time


Switch: TypeAlias = WorkflowSwitch | WorkerSwitch | QueueSwitch | LimitSwitch


class Switches(msgspec.Struct, frozen=True):
    """All switches, by workflow, worker, queue and limit, on or off."""

    workflows: dict[str, WorkflowSwitch] = {}
    workers: dict[str, WorkerSwitch] = {}
    queues: dict[str, QueueSwitch] = {}
    limits: dict[str, LimitSwitch] = {}

    @property
    def paused(self) -> frozenset[str]:
        """The names of the paused workflows."""
        return frozenset(name for name, switch in self.workflows.items() if switch.paused)

    @property
    def paused_queues(self) -> frozenset[str]:
        """The names of the paused queues."""
        return frozenset(name for name, switch in self.queues.items() if switch.paused)

    @property
    def numbers(self) -> dict[str, int]:
        """The numbers of limits that operators have changed."""
        return {name: each.n for name, each in self.limits.items() if each.n is not None}

    def drains(self, worker: str) -> bool:
        """Return whether a worker should stop."""
        return worker in self.workers and self.workers[worker].drain


async def set_switch(store: Store, switch: Switch) -> None:
    """Set a switch; workers act on it within ten seconds."""
    documents = require_search(store, "a switch").documents
    ttl = WORKER_SWITCH_TTL if isinstance(switch, WorkerSwitch) else None
    await documents.set(_key_of(switch), msgspec.json.encode(switch).decode(), ttl=ttl)


def _key_of(switch: Switch) -> str:
    match switch:
        case WorkflowSwitch():
            return keys.workflow_switch_key(check_id(switch.workflow, "workflow"))
        case WorkerSwitch():
            return keys.worker_switch_key(check_id(switch.worker, "worker"))
        case QueueSwitch():
            return keys.queue_switch_key(check_id(switch.queue, "queue"))
        case LimitSwitch():
            return keys.limit_switch_key(check_id(switch.limit, "limit"))


async def read_switches(store: Store) -> Switches:
    """Return all switches; a store without documents has none."""
    if not can_search(store):
        return Switches()
    return await _read_documents(store, await store.documents.keys("switch:*"))


async def read_switches_of(
    store: SearchStore,
    worker: str,
    workflows: Iterable[str],
    queues: Iterable[str] = (),
    limits: Iterable[str] = (),
) -> Switches:
    """Return the switches that concern a worker, in one read."""
    switch_keys = [keys.worker_switch_key(worker), *map(keys.workflow_switch_key, workflows)]
    switch_keys += map(keys.queue_switch_key, queues)
    switch_keys += map(keys.limit_switch_key, limits)
    return await _read_documents(store, switch_keys)


async def _read_documents(store: SearchStore, switch_keys: list[str]) -> Switches:
    switches = Switches()
    for key, value in zip(switch_keys, await store.documents.get_many(switch_keys), strict=True):
        _add(switches, key, value)
    return switches


def _add(switches: Switches, key: str, value: str | None) -> None:
    """Add the switch in a document; an unreadable switch is off."""
    if key.startswith(keys.WORKFLOW_SWITCH):
        if (workflow := decode(value, WorkflowSwitch)) is not None:
            switches.workflows[workflow.workflow] = workflow
    elif key.startswith(keys.QUEUE_SWITCH):
        if (queue := decode(value, QueueSwitch)) is not None:
            switches.queues[queue.queue] = queue
    elif key.startswith(keys.LIMIT_SWITCH):
        if (limit := decode(value, LimitSwitch)) is not None:
            switches.limits[limit.limit] = limit
    elif (worker := decode(value, WorkerSwitch)) is not None:
        switches.workers[worker.worker] = worker
