"""Named workflows on a store: `Runtime`, `Client`, the `workflow` decorator and `Run`."""

from perdure.runtime.client import Client, RunHandle, Signal, SignalResult
from perdure.runtime.definition import Definition, workflow
from perdure.runtime.run import Run, StepInfo, Wait
from perdure.runtime.runtime import Runtime

__all__ = [
    "Client",
    "Definition",
    "Run",
    "RunHandle",
    "Runtime",
    "Signal",
    "SignalResult",
    "StepInfo",
    "Wait",
    "workflow",
]
