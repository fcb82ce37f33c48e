"""Small documents about workers: which exist, what they do, and what operators told them.

Workers write them beside the runs, and `perdure.insights` reads them. They expire, and losing them
harms no run.
"""

from perdure.presence.documents import (
    DeclaredLimit,
    DefinitionDocument,
    Minute,
    Throughput,
    WorkerPresence,
    WorkflowThroughput,
    read_definitions,
    read_last_throughput,
    read_throughput,
    read_worker,
    read_workers,
)
from perdure.presence.keys import worker_id
from perdure.presence.switches import (
    LimitSwitch,
    QueueSwitch,
    Switch,
    Switches,
    WorkerSwitch,
    WorkflowSwitch,
    read_switches,
    set_switch,
)

__all__ = [
    "DeclaredLimit",
    "DefinitionDocument",
    "LimitSwitch",
    "Minute",
    "QueueSwitch",
    "Switch",
    "Switches",
    "Throughput",
    "WorkerPresence",
    "WorkerSwitch",
    "WorkflowSwitch",
    "WorkflowThroughput",
    "read_definitions",
    "read_last_throughput",
    "read_switches",
    "read_throughput",
    "read_worker",
    "read_workers",
    "set_switch",
    "worker_id",
]
