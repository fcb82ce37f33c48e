"""Steps as plain calls: `@durable.step` makes each call of a function inside a run a step.

@durable.step(retry=3)
async def charge(card: str, *, cents: int) -> Receipt: ...

receipt = await charge("4242", cents=999)
"""

import inspect
from collections.abc import Callable, Coroutine, Sequence
from functools import cache, partial, wraps
from typing import Any, ParamSpec, TypeAlias, TypeVar, overload

from perdure import codec
from perdure.clock import Duration
from perdure.engine.asyncio_internals import mark_as_async
from perdure.engine.call import Decoration, StepCall
from perdure.engine.current import current_execution
from perdure.engine.execution import Execution
from perdure.engine.gates import Gate, gate_of
from perdure.engine.sagas import check_undo
from perdure.engine.unawaited import call_named
from perdure.errors import InvalidArgument, StepFailed
from perdure.result import Err, Ok, Result
from perdure.retry import Retry, Timeout, as_retry, as_timeout
from perdure.validation import check_errors, check_text, check_unreserved

P = ParamSpec("P")
T = TypeVar("T")
AsyncFunction: TypeAlias = Callable[P, Coroutine[Any, Any, T]]


@overload
def step(fn: AsyncFunction[P, T], /) -> AsyncFunction[P, T]: ...
@overload
def step(
    *,
    name: str | None = ...,
    retry: Retry | int | None = ...,
    timeout: Timeout | Duration | None = ...,
    approve: str | Gate | None = ...,
    errors: Sequence[type[BaseException]] = ...,
    undo: None = ...,
) -> Callable[[AsyncFunction[P, T]], AsyncFunction[P, T]]: ...
@overload
def step(
    *,
    name: str | None = ...,
    retry: Retry | int | None = ...,
    timeout: Timeout | Duration | None = ...,
    approve: str | Gate | None = ...,
    errors: Sequence[type[BaseException]] = ...,
    undo: Callable[[T], object],
) -> Callable[[AsyncFunction[P, T]], AsyncFunction[P, T]]: ...
def step(
    fn: Any = None,
    /,
    *,
    name: str | None = None,
    retry: Retry | int | None = None,
    timeout: Timeout | Duration | None = None,
    approve: str | Gate | None = None,
    errors: Sequence[type[BaseException]] = (),
    undo: Callable[[Any], object] | None = None,
) -> Any:
    """Make each call of an async function inside a run a recorded step.

    The step has the name of the function, or `name`. Outside a run, a call just calls the function.
    Inside the function of another step it raises `NestedStep`. `retry`, `timeout`, `approve`,
    `errors` and `undo` are the options of a step, and also apply where the function is passed to
    `step(…)` or `step.map`; `approve` also in `step.transaction`.
    """
    if name is not None:
        name = check_unreserved(check_text(name, "name", "a non-empty string, or None"), "name")
    retries = None if retry is None else as_retry(retry)
    limit = None if timeout is None else as_timeout(timeout)
    gate = None if approve is None else gate_of(approve)
    error_classes = check_errors(errors)
    if undo is not None:
        check_undo(undo)

    def decorate(fn: Callable[..., Any]) -> Callable[..., Any]:
        id = _check_function(fn, name)
        return _decorated(fn, id, Decoration(fn, retries, limit, error_classes, gate, undo))

    return decorate if fn is None else decorate(fn)


def _check_function(fn: Any, name: str | None) -> str:
    """Return the name of the step that a function becomes."""
    if not inspect.iscoroutinefunction(fn) or hasattr(fn, "durable_step"):
        hint = (
            "A call of a plain function would have to be awaited only inside a run: make it "
            "async, or call it with step(…)"
        )
        raise InvalidArgument("fn", fn, "an async function that is not a step yet", hint)
    id: str | None = name or getattr(fn, "__name__", None)
    if id is None:
        raise InvalidArgument("name", name, "a name for the step: the function has none")
    return id


def _decorated(
    fn: Callable[..., Any], id: str, decoration: Decoration
) -> Callable[..., Coroutine[Any, Any, Any]]:
    # Computed on first use: annotations may refer to names that are defined later.
    signature = cache(lambda: inspect.signature(fn))
    returns_result = cache(lambda: codec.returns_result(fn))
    has_options = decoration != Decoration(fn)

    # Not async: the call must get its number when it is made, not when it is awaited.
    @wraps(fn)
    def call_step(*args: Any, **kwargs: Any) -> Coroutine[Any, Any, Any]:
        run = current_execution()
        if run is None:
            coroutine: Coroutine[Any, Any, Any] = fn(*args, **kwargs)
            return coroutine
        call = (
            _bind_call(run, id, signature(), fn, args, kwargs) if kwargs else run.call(id, fn, args)
        )
        if has_options:
            decoration.apply(call)
        return _as_result(run, call) if returns_result() else run.perform(call)

    mark_as_async(call_step)
    call_step.durable_step = decoration  # type: ignore[attr-defined]  # `undecorated` reads it
    return call_step


def _bind_call(
    run: Execution,
    id: str,
    signature: inspect.Signature,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> StepCall:
    """Return a call with its arguments bound.

    `charge(5)` and `charge(amount=5)` are the same call, with the same fingerprint.
    """
    arguments = signature.bind(*args, **kwargs)
    if not arguments.kwargs:
        return run.call(id, fn, arguments.args)
    call = run.call(id, partial(fn, **arguments.kwargs), arguments.args)
    call.fingerprint = codec.fingerprint((*arguments.args, arguments.kwargs))
    return call


@call_named("step")
async def _as_result(run: Execution, call: StepCall) -> Result[Any, Any]:
    """Perform a call of a function that returns `Ok` or `Err`, and return that result."""
    try:
        return Ok(await run.perform(call))
    except StepFailed as failure:
        return Err(failure.error, failure.cause)
