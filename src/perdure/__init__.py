"""Ordinary async functions that survive crashes.

Each step's result is recorded in a store of your choice; after a crash, a deploy or a week of
waiting the function runs again, and every finished step answers from its record.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from perdure import durable, sync
    from perdure.clock import Clock, Cron, SystemClock
    from perdure.engine.approvals import Approval, ApprovalRequest, Callback
    from perdure.engine.children import RunRef
    from perdure.engine.contexts import RunContext, StepContext, WorkerContext
    from perdure.engine.current import current
    from perdure.engine.gates import Gate
    from perdure.engine.middleware import Middleware
    from perdure.engine.questions import Question
    from perdure.engine.step import Step
    from perdure.errors import (
        AlreadyAnswered,
        InvalidToken,
        PerdureError,
        Rejected,
        RollbackFailed,
        RunConflict,
        RunFailed,
        StepError,
        StepFailed,
        StepTimeout,
        TooLate,
    )
    from perdure.limits import Limit, Limits, Queue, Rate
    from perdure.result import Err, Ok, Result
    from perdure.resume import (
        ResumeState,
        ResumeStateCollector,
        StatePersistence,
        is_step_complete,
        parse_state,
        stringify_state,
    )
    from perdure.retention import Keep
    from perdure.retry import Retry, Timeout
    from perdure.runtime.answers import ApprovalPage, OpenApproval
    from perdure.runtime.client import Client, RunHandle, Signal
    from perdure.runtime.definition import workflow
    from perdure.runtime.run import Run
    from perdure.runtime.runtime import Runtime
    from perdure.runtime.schedule_info import ScheduleInfo
    from perdure.runtime.schedules import ScheduleHandle
    from perdure.schedules import Schedule
    from perdure.snapshot import Snapshot, assert_valid_snapshot, merge_snapshots, validate_snapshot
    from perdure.version import __version__ as __version__
    from perdure.worker import Worker
    from perdure.workflow import Workflow

__all__ = [
    "AlreadyAnswered",
    "Approval",
    "ApprovalPage",
    "ApprovalRequest",
    "Callback",
    "Client",
    "Clock",
    "Cron",
    "Err",
    "Gate",
    "InvalidToken",
    "Keep",
    "Limit",
    "Limits",
    "Middleware",
    "Ok",
    "OpenApproval",
    "PerdureError",
    "Question",
    "Queue",
    "Rate",
    "Rejected",
    "Result",
    "ResumeState",
    "ResumeStateCollector",
    "Retry",
    "RollbackFailed",
    "Run",
    "RunConflict",
    "RunContext",
    "RunFailed",
    "RunHandle",
    "RunRef",
    "Runtime",
    "Schedule",
    "ScheduleHandle",
    "ScheduleInfo",
    "Signal",
    "Snapshot",
    "StatePersistence",
    "Step",
    "StepContext",
    "StepError",
    "StepFailed",
    "StepTimeout",
    "SystemClock",
    "Timeout",
    "TooLate",
    "Worker",
    "WorkerContext",
    "Workflow",
    "assert_valid_snapshot",
    "current",
    "durable",
    "is_step_complete",
    "merge_snapshots",
    "parse_state",
    "stringify_state",
    "sync",
    "validate_snapshot",
    "workflow",
]

_MODULES = {
    "clock": ("Clock", "Cron", "SystemClock"),
    "durable": ("durable",),
    "engine.approvals": ("Approval", "ApprovalRequest", "Callback"),
    "engine.children": ("RunRef",),
    "engine.contexts": ("RunContext", "StepContext", "WorkerContext"),
    "engine.current": ("current",),
    "engine.gates": ("Gate",),
    "engine.questions": ("Question",),
    "engine.middleware": ("Middleware",),
    "engine.step": ("Step",),
    "errors": (
        *("AlreadyAnswered", "InvalidToken", "PerdureError", "Rejected", "RollbackFailed"),
        *("RunConflict", "RunFailed", "StepError", "StepFailed", "StepTimeout", "TooLate"),
    ),
    "limits": ("Limit", "Limits", "Queue", "Rate"),
    "result": ("Err", "Ok", "Result"),
    "resume": (
        *("ResumeState", "ResumeStateCollector", "StatePersistence"),
        *("is_step_complete", "parse_state", "stringify_state"),
    ),
    "retention": ("Keep",),
    "retry": ("Retry", "Timeout"),
    "runtime.answers": ("ApprovalPage", "OpenApproval"),
    "runtime.client": ("Client", "RunHandle", "Signal"),
    "runtime.definition": ("workflow",),
    "runtime.run": ("Run",),
    "runtime.runtime": ("Runtime",),
    "runtime.schedule_info": ("ScheduleInfo",),
    "runtime.schedules": ("ScheduleHandle",),
    "schedules": ("Schedule",),
    "snapshot": ("Snapshot", "assert_valid_snapshot", "merge_snapshots", "validate_snapshot"),
    "sync": ("sync",),
    "version": ("__version__",),
    "worker": ("Worker",),
    "workflow": ("Workflow",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


class _Names(ModuleType):
    """Imports a name's module when the name is first used.

    The `perdure` command prints its help without the engine, in a third of the time.
    """

    def __getattr__(self, name: str) -> Any:
        if name not in _MODULE_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module = import_module(f"{__name__}.{_MODULE_OF[name]}")
        value = module if name == _MODULE_OF[name] else getattr(module, name)
        self.__dict__[name] = value
        return value

    def __setattr__(self, name: str, value: object) -> None:
        # Importing the module `perdure.workflow` would hide the decorator of this name.
        if not (name == "workflow" and isinstance(value, ModuleType)):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return __all__


sys.modules[__name__].__class__ = _Names
