"""The user's handle on a run: each call of a method is recorded.

user = await step("fetch-user", fetch_user, "123")
order = await step("create-order", lambda: create_order(user), key="order:1")
await step.sleep("settle", "1d")
"""

from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar, TypeVarTuple, overload

from perdure.clock import Duration, parse_duration
from perdure.engine.approval_steps import ApprovalSteps
from perdure.engine.branches import Branch, Leaf
from perdure.engine.call import StepCall, idempotency_key
from perdure.engine.child_steps import ChildSteps
from perdure.engine.gates import Gate, gate_of
from perdure.engine.parallel import ParallelSteps
from perdure.engine.sagas import Saga, check_undo
from perdure.engine.tasks import POSITION
from perdure.engine.transactions import transact
from perdure.engine.values import RunValues
from perdure.engine.wait_steps import WaitSteps
from perdure.engine.waiting import continue_as_new
from perdure.errors import InvalidArgument, PerdureError
from perdure.limits import Cost, Limit, as_cost
from perdure.result import Err, Ok
from perdure.retry import Retry, Timeout, as_retry, as_timeout
from perdure.validation import check_errors, check_text, check_unreserved

if TYPE_CHECKING:
    # Type checkers include this module; Python itself supports TypeVar defaults only since 3.13.
    from typing_extensions import TypeVar as TypeVarWithDefault

    D_co = TypeVarWithDefault("D_co", default=Any, covariant=True)
else:
    D_co = TypeVar("D_co", covariant=True)

T = TypeVar("T")
U = TypeVar("U")
Args = TypeVarTuple("Args")
Errors = Sequence[type[BaseException]]


class Step(WaitSteps, ParallelSteps, ChildSteps, ApprovalSteps, RunValues, Generic[D_co]):
    """Runs the steps of one run; passed to the workflow function as its first argument.

    `Step[Shop]` says that `step.deps` is a `Shop`.
    """

    __slots__ = ()

    @property
    def run_id(self) -> str:
        """The run's id."""
        return self._run.run_id

    @property
    def workflow(self) -> str:
        """The name of the run's workflow."""
        return self._run.workflow

    @property
    def executing(self) -> str | None:
        """The id of the step whose function is running, or `None` in the workflow function."""
        call = POSITION.get()
        return call.id if isinstance(call, Leaf) else None

    @property
    def replaying(self) -> bool:
        """Whether this branch repeats what it did in an earlier activation of the run.

        It is `True` while stored calls are still ahead, and `False` in a step's function.
        """
        run, position = self._run, POSITION.get()
        is_branch = type(position) is Branch and position.branches is run.branches
        return is_branch and run.history.is_ahead_of(position)

    @property
    def payload(self) -> Any:
        """The payload with which the run was triggered."""
        return self._run.payload

    @property
    def deps(self) -> D_co:
        """The dependencies provided by the runtime or the caller, such as clients and settings."""
        deps: D_co = self._run.deps
        return deps

    @property
    def attempt(self) -> int:
        """The number of the step's attempt, from 1; for use inside a step's function."""
        call = POSITION.get()
        return call.attempt if isinstance(call, Leaf) else 1

    @property
    def idempotency_key(self) -> str:
        """A string that is the same for every attempt of this step in this run, even after a crash.

        Pass it to services that accept one, inside a step's function. It is 32 hexadecimal digits,
        different for each run, step and generation; in `notify=` and `start=` it is the token.
        """
        call = POSITION.get()
        if not isinstance(call, Leaf):
            raise PerdureError(
                "step.idempotency_key belongs to a step: ask for it inside the step's function, "
                "for example step('pay', lambda: pay(amount, step.idempotency_key))"
            )
        run, token = self._run, getattr(call, "token", "")
        key = idempotency_key(run.run_id, run.history.generation, call.path, call.call)
        return token or key

    # A Result is a value too; the first matching overload unwraps it. The coroutine's type contains
    # no `Any`: with one in an argument, mypy gives up on the overloads of `gather` and `step.all`.
    @overload
    def __call__(
        self,
        id: str,
        fn: Callable[[*Args], Coroutine[Any, Any, Ok[T] | Err[Any]]],
        /,
        *args: *Args,
        key: str | None = ...,
        ttl: Duration | None = ...,
        retry: Retry | int | None = ...,
        timeout: Timeout | Duration | None = ...,
        limit: Limit | Cost | None = ...,
        approve: str | Gate | None = ...,
        returns: type[Any] | None = ...,
        errors: Errors = ...,
        undo: Callable[[T], object] | None = ...,
    ) -> Coroutine[object, None, T]: ...
    @overload
    def __call__(
        self,
        id: str,
        fn: Callable[[*Args], Awaitable[T]],
        /,
        *args: *Args,
        key: str | None = ...,
        ttl: Duration | None = ...,
        retry: Retry | int | None = ...,
        timeout: Timeout | Duration | None = ...,
        limit: Limit | Cost | None = ...,
        approve: str | Gate | None = ...,
        returns: type[Any] | None = ...,
        errors: Errors = ...,
        undo: Callable[[T], object] | None = ...,
    ) -> Coroutine[object, None, T]: ...
    @overload
    def __call__(
        self,
        id: str,
        fn: Callable[[*Args], Ok[T] | Err[Any]],
        /,
        *args: *Args,
        key: str | None = ...,
        ttl: Duration | None = ...,
        retry: Retry | int | None = ...,
        timeout: Timeout | Duration | None = ...,
        limit: Limit | Cost | None = ...,
        approve: str | Gate | None = ...,
        returns: type[Any] | None = ...,
        errors: Errors = ...,
        undo: Callable[[T], object] | None = ...,
    ) -> Coroutine[object, None, T]: ...
    @overload
    def __call__(
        self,
        id: str,
        fn: Callable[[*Args], T],
        /,
        *args: *Args,
        key: str | None = ...,
        ttl: Duration | None = ...,
        retry: Retry | int | None = ...,
        timeout: Timeout | Duration | None = ...,
        limit: Limit | Cost | None = ...,
        approve: str | Gate | None = ...,
        returns: type[Any] | None = ...,
        errors: Errors = ...,
        undo: Callable[[T], object] | None = ...,
    ) -> Coroutine[object, None, T]: ...
    def __call__(  # type: ignore[misc]  # mypy loses `*args: *Args` in an implementation
        self,
        id: str,
        fn: Callable[..., Any],
        /,
        *args: Any,
        **options: Any,
    ) -> Coroutine[object, None, Any]:
        """Return the value of `fn(*args)`, from its record if the step was already executed.

        ```python
        receipt = await step("charge", charge, 4200, retry=5, timeout="30s")
        ```

        `key` identifies the step in the whole run: a second call with it returns the recorded
        value. Each attempt waits until `limit` permits it, over all workers of the store. With
        `approve`, a person has to approve the call first; otherwise it raises `Rejected`. `returns`
        is the type of the value if `fn` is not annotated; `errors` are exception classes that keep
        their type when they are read from a record. A returned `Err` raises `StepFailed`; if the
        function does not catch that, the run ends with that `Err`. `undo` is called with the value
        if the run, or the `step.saga` around the step, does not succeed. Keyword arguments of `fn`
        are passed with `functools.partial`.
        """
        run = self._run
        if options:
            return run.perform(self._with_options(id, fn, args, **options))
        # Most steps have no options, and should not pay for the nine that they omit.
        return run.execute(run.call(id, fn, args))

    def _with_options(
        self,
        id: str,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        /,
        *,
        key: str | None = None,
        ttl: Duration | None = None,
        retry: Retry | int | None = None,
        timeout: Timeout | Duration | None = None,
        limit: Limit | Cost | None = None,
        approve: str | Gate | None = None,
        returns: type[Any] | None = None,
        errors: Errors = (),
        undo: Callable[[Any], object] | None = None,
        **unknown: Any,
    ) -> StepCall:
        if unknown:
            raise _unknown_option(fn, unknown)
        call = self._run.call(id, fn, args, key)
        if retry is not None:
            call.retries = as_retry(retry)
        if timeout is not None:
            call.timeout = as_timeout(timeout)
        if limit is not None:
            call.limit = as_cost(limit)
        if approve is not None:
            call.gate = gate_of(approve)
        if ttl is not None:
            call.ttl = parse_duration(ttl, "ttl")
        if errors:
            call.errors = check_errors(errors)
        if returns is not None:
            call.returns = returns
        if undo is not None:
            call.undo = check_undo(undo)
        return call

    def continue_as_new(self, payload: object = None, /) -> Coroutine[Any, Any, NoReturn]:
        """End this generation of the run and begin the next one with another payload.

        Nothing after this call runs. The next generation calls the function from its first line,
        without records, so a loop that runs for a year stays small. The run keeps its id, its tags,
        its deadline, and the events that it has not received. Running steps of other branches end
        first, and no more begin.
        """
        self._run.branches.current(self._run.run_id, "step.continue_as_new")
        return continue_as_new(self._run, payload)

    @overload
    def transaction(
        self,
        id: str,
        fn: Callable[[Any, *Args], Coroutine[Any, Any, Ok[T] | Err[Any]]],
        /,
        *args: *Args,
        retry: Retry | int | None = ...,
        returns: type[Any] | None = ...,
        undo: Callable[[T], object] | None = ...,
    ) -> Coroutine[object, None, T]: ...
    @overload
    def transaction(
        self,
        id: str,
        fn: Callable[[Any, *Args], Awaitable[T]],
        /,
        *args: *Args,
        retry: Retry | int | None = ...,
        returns: type[Any] | None = ...,
        undo: Callable[[T], object] | None = ...,
    ) -> Coroutine[object, None, T]: ...
    def transaction(  # type: ignore[misc]  # mypy loses `*args: *Args` in an implementation
        self,
        id: str,
        fn: Callable[..., Any],
        /,
        *args: Any,
        retry: Retry | int | None = None,
        returns: type[Any] | None = None,
        undo: Callable[[Any], object] | None = None,
    ) -> Coroutine[Any, Any, Any]:
        """Return the value of `fn(connection, *args)`; its writes commit with the step's record.

        The connection is the store's own: either both are committed or neither, exactly once. Each
        attempt of a `retry` has its own transaction. `undo` works as in a step; it is a separate
        step, without the connection.
        """
        call = self._run.call(id, fn, args)
        call.kind = "transaction"
        call.retries = as_retry(retry)
        call.returns = returns
        if undo is not None:
            call.undo = check_undo(undo)
        return transact(self._run, call)

    def saga(self, id: str, /, *, undo_retry: Retry | int | None = None) -> Saga:
        """Return a context manager whose steps are undone if its block raises.

            async with step.saga("booking", undo_retry=Retry(5)):
                room = await step("room", book_room, trip, undo=cancel_room)
                seat = await step("seat", book_seat, trip, undo=cancel_seat)

        The undos of its steps are called one by one, in reverse order of recording; then the
        exception propagates. If an undo fails permanently, the others are still called, and the
        block raises `RollbackFailed`.
        """
        id = check_unreserved(check_text(id, "id", "the saga's name, a non-empty string"), "id")
        return Saga(self._run, id, as_retry(undo_retry))


def _unknown_option(fn: object, unknown: dict[str, Any]) -> InvalidArgument:
    name, value = next(iter(unknown.items()))
    fn_name = getattr(fn, "__name__", "fn")
    arguments = ", ".join(f"{each}=…" for each in unknown)
    hint = (
        "Pass keyword arguments of the step's function with functools.partial: "
        f"step(…, partial({fn_name}, {arguments}), …)"
    )
    names = "key, ttl, retry, timeout, limit, approve, returns, errors and undo"
    return InvalidArgument(name, value, f"one of the options {names}", hint)
