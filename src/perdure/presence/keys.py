"""The keys of presence documents: distinct for any two workflows, workers and hours.

Only the hour of a throughput document is read from its key; names are in the documents.
"""

import hashlib
from datetime import UTC, datetime

from perdure.durable.owners import process_of

WORKER, THROUGHPUT, DEFINITION = "worker:", "throughput:", "definition:"
WORKFLOW_SWITCH, WORKER_SWITCH = "switch:workflow:", "switch:worker:"
QUEUE_SWITCH, LIMIT_SWITCH = "switch:queue:", "switch:limit:"

_MAX_PART = 200
_HOUR = "%Y-%m-%dT%H"


def worker_id(owner: str) -> str:
    """Return the readable id of the worker with this owner id: `host-pid-digits`.

    An owner id in another format is returned as it is. The digits are needed because a restarted
    container often has the same host name and pid.
    """
    process = process_of(owner)
    if process is None:
        return owner
    digits = hashlib.sha256(owner.encode()).hexdigest()[:6]
    return f"{process.host}-{process.pid}-{digits}"


def worker_key(worker: str) -> str:
    """Return the key of a worker's heartbeat."""
    return WORKER + _part(worker)


def throughput_key(hour: datetime, worker: str) -> str:
    """Return the key of the throughput of a worker in the hour that contains a time."""
    return f"{hour_prefix(hour)}{_part(worker)}"


def hour_prefix(at: datetime) -> str:
    """Return the prefix of the keys of all throughput documents of an hour."""
    return f"{THROUGHPUT}{at.astimezone(UTC).strftime(_HOUR)}:"


def worker_part(key: str) -> str:
    """Return the part of a throughput document's key that identifies the worker."""
    return key.rpartition(":")[2]


def definition_key(workflow: str, version: int) -> str:
    """Return the key of the description of one version of a workflow."""
    return f"{DEFINITION}{_part(workflow)}:{version}"


def workflow_switch_key(workflow: str) -> str:
    """Return the key of the switch that pauses a workflow."""
    return WORKFLOW_SWITCH + _part(workflow)


def worker_switch_key(worker: str) -> str:
    """Return the key of the switch that drains a worker."""
    return WORKER_SWITCH + _part(worker)


def queue_switch_key(queue: str) -> str:
    """Return the key of the switch that pauses a queue."""
    return QUEUE_SWITCH + _part(queue)


def limit_switch_key(limit: str) -> str:
    """Return the key of the switch that changes a limit."""
    return LIMIT_SWITCH + _part(limit)


def _part(name: str) -> str:
    """Return a name as part of a key: unique, and without a colon.

    A name that would make the key too long for a store is hashed.
    """
    part = name.replace("%", "%25").replace(":", "%3A").replace("~", "%7E")
    if len(part) <= _MAX_PART:
        return part
    return f"~{hashlib.sha256(name.encode()).hexdigest()}"
