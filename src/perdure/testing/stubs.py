"""Stand-ins for steps: what a step returns or raises in a test, without its function."""

from collections.abc import Callable, Mapping
from inspect import isawaitable
from typing import Any, cast

from perdure.engine.contexts import StepContext
from perdure.engine.middleware import Call, Middleware
from perdure.errors import InvalidArgument


class Stubs(Middleware):
    """Middleware that stands in for steps, by their ids.

    A stub is a value, an exception that is raised, or a function that is called with the arguments
    of the step. It replaces all attempts of the step, so it is not retried. What it returns or
    raises is recorded as the outcome of the step.

        Runtime(store, around=[Stubs({"charge": "receipt 1", "ship": ShippingDown()})])

    `unused` has the ids of stubs whose steps have not run so far, `executed` the ids of steps that
    ran without a stub.
    """

    def __init__(self, steps: Mapping[str, Any]) -> None:
        if not isinstance(steps, Mapping) or not all(isinstance(step, str) for step in steps):
            raise InvalidArgument("steps", steps, 'a mapping of step ids: {"charge": "receipt 1"}')
        self._steps = dict(steps)
        self.unused = set(self._steps)
        self.executed = set[str]()

    async def around_step(self, step: StepContext, call: Call) -> Any:
        """Return or raise the stub's outcome, or execute the step if it has no stub."""
        if step.id not in self._steps:
            self.executed.add(step.id)
            return await call()
        self.unused.discard(step.id)
        stub = self._steps[step.id]
        if isinstance(stub, BaseException) or _is_exception_class(stub):
            raise stub
        if not callable(stub):
            return stub
        value = cast(Callable[..., Any], stub)(*step.args)
        return await value if isawaitable(value) else value


def _is_exception_class(stub: object) -> bool:
    return isinstance(stub, type) and issubclass(stub, BaseException)
