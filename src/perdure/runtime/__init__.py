"""Named workflows on a store: `Runtime`, the `workflow` decorator and `Run`."""

from perdure.runtime.definition import Definition, workflow
from perdure.runtime.run import Run, StepInfo, Wait
from perdure.runtime.runtime import Runtime, SignalResult

__all__ = ["Definition", "Run", "Runtime", "SignalResult", "StepInfo", "Wait", "workflow"]
