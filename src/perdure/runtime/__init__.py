"""Named workflows on a store: `Runtime`, the `workflow` decorator and `Run`."""

from perdure.runtime.definition import Definition, workflow
from perdure.runtime.run import Run, StepInfo, Wait
from perdure.runtime.runtime import Runtime, Signalled

__all__ = ["Definition", "Run", "Runtime", "Signalled", "StepInfo", "Wait", "workflow"]
