"""Ordinary async functions that survive crashes.

Each step's result is recorded in a store of your choice; after a crash, a deploy or a week of
waiting the function runs again, and every finished step answers from its record.
"""

from perdure import durable, sync
from perdure.clock import Clock, Cron, SystemClock
from perdure.engine.step import Step
from perdure.errors import PerdureError, RunConflict, StepError, StepFailed, StepTimeout
from perdure.result import Err, Ok, Result
from perdure.resume import (
    ResumeState,
    ResumeStateCollector,
    StatePersistence,
    is_step_complete,
    parse_state,
    stringify_state,
)
from perdure.retry import Retry, Timeout
from perdure.runtime.client import Client, RunHandle, Signal
from perdure.runtime.definition import workflow
from perdure.runtime.run import Run
from perdure.runtime.runtime import Runtime
from perdure.snapshot import Snapshot, assert_valid_snapshot, merge_snapshots, validate_snapshot
from perdure.worker import Worker
from perdure.workflow import Workflow

__all__ = [
    "Client",
    "Clock",
    "Cron",
    "Err",
    "Ok",
    "PerdureError",
    "Result",
    "ResumeState",
    "ResumeStateCollector",
    "Retry",
    "Run",
    "RunConflict",
    "RunHandle",
    "Runtime",
    "Signal",
    "Snapshot",
    "StatePersistence",
    "Step",
    "StepError",
    "StepFailed",
    "StepTimeout",
    "SystemClock",
    "Timeout",
    "Worker",
    "Workflow",
    "assert_valid_snapshot",
    "durable",
    "is_step_complete",
    "merge_snapshots",
    "parse_state",
    "stringify_state",
    "sync",
    "validate_snapshot",
    "workflow",
]


def __dir__() -> list[str]:
    return __all__
