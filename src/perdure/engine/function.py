"""The workflow function: its dependencies, and one execution of it over a run's history."""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from types import CoroutineType, FunctionType
from typing import Any, TypeAlias, TypeGuard, TypeVar

from perdure.engine.asyncio_internals import arguments_of
from perdure.engine.call import StepCall
from perdure.engine.execution import Execution
from perdure.engine.sagas import finish_rollbacks
from perdure.engine.step import Step
from perdure.engine.task_factory import task_factory
from perdure.engine.unawaited import warn_of_unfinished
from perdure.errors import InvalidArgument, NotAwaited, Suspended
from perdure.events import (
    WorkflowCancelled,
    WorkflowError,
    WorkflowStart,
    WorkflowSuccess,
    WorkflowSuspended,
)
from perdure.result import Err, Ok, Result
from perdure.snapshot.record import outcome_of

D = TypeVar("D")
T = TypeVar("T")
WorkflowFunction: TypeAlias = Callable[[Step], Awaitable[T]] | Callable[[Step, D], Awaitable[T]]


class Deps(Mapping[str, Any]):
    """The functions and objects that a workflow uses, by attribute or by name; read-only."""

    __slots__ = ("_items",)

    def __init__(self, items: Mapping[str, Any]) -> None:
        object.__setattr__(self, "_items", dict(items))

    def __getattr__(self, name: str) -> Any:
        try:
            return self._items[name]
        except KeyError:
            names = ", ".join(sorted(self._items)) or "nothing"
            raise AttributeError(f"deps has no {name!r}; it has {names}") from None

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"deps is read-only; {name!r} cannot be set")

    def __getitem__(self, name: str) -> Any:
        return self._items[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


def run_function(
    run: Execution, body: Callable[[Step], Awaitable[Any]], *, announce: bool = True
) -> Coroutine[Any, Any, Result[Any, Any]]:
    """Call the function once over the run's history and return how it ended.

    Branches that the function left running are cancelled, after their writes in progress. Only
    exceptions that are not an `Exception` are raised, above all cancellation.
    """
    # Most runs have no listeners, and then need no coroutine for them.
    has_listeners = announce and run.has_listeners
    return _run_and_announce(run, body) if has_listeners else _run_to_end(run, body)


async def _run_and_announce(
    run: Execution, body: Callable[[Step], Awaitable[Any]]
) -> Result[Any, Any]:
    started_at = run.clock.monotonic()
    run.announce(WorkflowStart)
    try:
        outcome = await _run_to_end(run, body)
    except asyncio.CancelledError as error:
        if isinstance(run.stopped_by, Suspended):
            run.announce(WorkflowSuspended, started_at)
        else:
            reason = str(error.args[0]) if error.args else ""
            run.announce(
                WorkflowCancelled, started_at, reason=reason, last_step=run.history.last_key
            )
        raise
    if isinstance(outcome, Ok):
        run.announce(WorkflowSuccess, started_at)
    else:
        run.announce(WorkflowError, started_at, error=outcome.error)
    return outcome


async def _run_to_end(run: Execution, body: Callable[[Step], Awaitable[Any]]) -> Result[Any, Any]:
    with run.branches, task_factory(run.branches.loop):
        if run.stopped_by is not None:
            # The run was stopped before its task started.
            run.branches.cancel()
        step = run.branches.handle = Step(run)
        try:
            value = await body(step)
            if isinstance(value, CoroutineType):
                raise _forgotten_await(value)
            if run.history.undoable_steps and not run.replays_only:
                await finish_rollbacks(run)
        except Exception as error:  # noqa: BLE001  # the user's function
            run.ended_by = run.stopped_by or error
            return outcome_of(run.ended_by)
        else:
            if len(run.branches.tasks) > 1 and run.live:
                warn_of_unfinished(run)
            return _outcome(run, value)
        finally:
            # First of all: branches that are about to be cancelled must not begin another step.
            run.end()
            if len(run.branches.tasks) > 1:
                await run.branches.unwind()


def _outcome(run: Execution, value: object) -> Result[Any, Any]:
    """Return the result of a function that returned this value."""
    if run.stopped_by is not None:
        # The function caught the error that stopped the run, and continued; its return value is not
        # based on durable records.
        return outcome_of(run.stopped_by)
    if isinstance(value, Err):
        run.ended_by = value
    return value if isinstance(value, Ok | Err) else Ok(value)


def _forgotten_await(value: "CoroutineType[Any, Any, Any]") -> NotAwaited:
    call = arguments_of(value).get("call")
    # Closed, so that Python does not complain a second time.
    value.close()
    return NotAwaited(call.id if isinstance(call, StepCall) else value.__qualname__)


def body_of(fn: object, deps: object) -> Callable[[Step], Awaitable[Any]]:
    """Return the workflow function as a function that takes only the step."""
    expected = "an async function of (step) or (step, deps)"
    if not _is_async(fn):
        raise InvalidArgument("fn", fn, expected)
    parameters = _count_parameters(fn)
    if parameters == 1:
        return fn
    if parameters == 2 or parameters is None:
        return lambda step: fn(step, deps)
    raise InvalidArgument("fn", fn, expected)


def _is_async(fn: object) -> TypeGuard[Callable[..., Any]]:
    if type(fn) is FunctionType and fn.__code__.co_flags & inspect.CO_COROUTINE:
        # The usual case, without the five calls of `inspect`.
        return True
    return inspect.iscoroutinefunction(fn)


def _count_parameters(fn: Callable[..., Any]) -> int | None:
    """Return how many positional arguments a function takes; `None` for any number."""
    code = getattr(fn, "__code__", None)
    if code is not None and not hasattr(fn, "__wrapped__") and not hasattr(fn, "__signature__"):
        # Read from the code object, because `inspect.signature` takes longer than a step.
        is_bound = getattr(fn, "__self__", None) is not None
        return None if code.co_flags & inspect.CO_VARARGS else code.co_argcount - is_bound
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(fn).parameters.values()
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
        return None
    return sum(parameter.kind in kinds for parameter in parameters)


def as_deps(deps: object) -> Any:
    """Return a mapping as `Deps`, and any other object unchanged."""
    if type(deps) is dict:
        # The usual case, without the checks for abstract classes, which take as long as `Deps`.
        return Deps(deps)
    return Deps(deps) if isinstance(deps, Mapping) and not isinstance(deps, Deps) else deps
