"""The part of the user's handle that starts other runs and waits for them.

receipt = await step.call("pay", pay_invoice, invoice)
ref = await step.start("welcome", send_welcome, user, on_parent_end="abandon")
welcomed = await step.result("welcomed", ref, timeout="1d")
sizes = await step.map_runs("resize", resize, images)
"""

from collections.abc import Coroutine, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Literal, TypedDict, TypeVar, Unpack, get_args, overload

from perdure.clock import Duration, add_duration
from perdure.engine.call import StepCall
from perdure.engine.children import RunRef, await_run, call_run, children_of, start_run
from perdure.engine.execution import Execution
from perdure.engine.host import Host
from perdure.engine.map_runs import OnError, RunMap, map_runs
from perdure.engine.questions import Question, reply, reply_call
from perdure.engine.target import ChildOptions, OnParentEnd, Target
from perdure.errors import InvalidArgument, RunFailed
from perdure.result import Err, Ok
from perdure.validation import check_int, check_text, check_unreserved, check_user_id

P = TypeVar("P")
T = TypeVar("T")


class MapOptions(TypedDict, total=False):
    """The options of all child runs."""

    priority: int | None
    tags: Mapping[str, str] | None
    inherit: Sequence[str]
    deadline: Duration | datetime | None
    on_parent_end: OnParentEnd


class CallOptions(MapOptions, total=False):
    """The options of `step.call`."""

    run_id: str | None


class StartOptions(CallOptions, total=False):
    """The options of `step.start`."""

    at: datetime | None
    delay: Duration | None


class ChildSteps:
    """A base class of `Step`."""

    __slots__ = ()

    _run: Execution

    @overload
    def call(
        self,
        id: str,
        workflow: Target[None, T],
        payload: None = ...,
        /,
        **options: Unpack[CallOptions],
    ) -> Coroutine[object, None, T]: ...
    @overload
    def call(
        self,
        id: str,
        workflow: Target[P, T],
        payload: P,
        /,
        **options: Unpack[CallOptions],
    ) -> Coroutine[object, None, T]: ...
    @overload
    def call(
        self,
        id: str,
        workflow: str,
        payload: Any = ...,
        /,
        **options: Unpack[CallOptions],
    ) -> Coroutine[object, None, Any]: ...
    def call(
        self,
        id: str,
        workflow: Target[Any, Any] | str,
        payload: Any = None,
        /,
        **options: Unpack[CallOptions],
    ) -> Coroutine[object, None, Any]:
        """Start a run of another workflow, wait for its end, and return its output.

        ```python
        receipt = await step.call("pay", order, 4200)
        ```

        A worker executes the child; while this run waits, it can leave memory. If the child fails
        or is cancelled, `RunFailed` is raised, with the child's exception as its cause. Its id
        consists of this run's id, generation and call, unless `run_id` is passed. It has the tags
        in `tags` and those of this run's tags that `inherit` names, and it must end by this run's
        deadline. If this run ends, or the branch that waits loses a race, the child is cancelled,
        unless `on_parent_end="abandon"`.
        """
        child_options = self._child_options(options, CallOptions)
        host, target, call = self._prepare("step.call", id, workflow, payload)
        call.kind = "call"
        return call_run(self._run, call, host, target, child_options)

    @overload
    def start(
        self,
        id: str,
        workflow: Target[None, T],
        payload: None = ...,
        /,
        **options: Unpack[StartOptions],
    ) -> Coroutine[object, None, RunRef[T]]: ...
    @overload
    def start(
        self,
        id: str,
        workflow: Target[P, T],
        payload: P,
        /,
        **options: Unpack[StartOptions],
    ) -> Coroutine[object, None, RunRef[T]]: ...
    @overload
    def start(
        self,
        id: str,
        workflow: str,
        payload: Any = ...,
        /,
        **options: Unpack[StartOptions],
    ) -> Coroutine[object, None, RunRef[Any]]: ...
    def start(
        self,
        id: str,
        workflow: Target[Any, Any] | str,
        payload: Any = None,
        /,
        **options: Unpack[StartOptions],
    ) -> Coroutine[object, None, RunRef[Any]]:
        """Start a run of another workflow, and return a reference to it at once.

        `step.result` waits for it. The options are the same as in `step.call`; the run is due at
        once, `at` a time or after a `delay`.
        """
        child_options = self._child_options(options, StartOptions)
        _, target, call = self._prepare("step.start", id, workflow, payload)
        call.kind = "start"
        call.returns = RunRef[Any]
        return start_run(self._run, call, target, child_options)

    @overload
    def result(
        self, id: str, run: RunRef[T], /, *, timeout: Duration | None = ...
    ) -> Coroutine[object, None, T]: ...
    @overload
    def result(
        self, id: str, run: str, /, *, timeout: Duration | None = ..., returns: type[T]
    ) -> Coroutine[object, None, T]: ...
    @overload
    def result(
        self, id: str, run: str, /, *, timeout: Duration | None = ...
    ) -> Coroutine[object, None, Any]: ...
    def result(
        self,
        id: str,
        run: RunRef[Any] | str,
        /,
        *,
        timeout: Duration | None = None,
        returns: type[Any] | None = None,
    ) -> Coroutine[object, None, Any]:
        """Wait for the end of any run of this store, and return its output.

        If the run fails or is cancelled, `RunFailed` is raised, with its exception as the cause; if
        the run does not exist, with `RunNotFound` as the cause. After the `timeout`, `StepTimeout`
        is raised, and the run continues. `returns` is the type of the output if the run is given by
        its id.
        """
        children = children_of(self._run, "step.result")
        ref: RunRef[Any] = run if isinstance(run, RunRef) else RunRef(run)
        check_user_id(ref.id, "run")
        if ref.id == self._run.run_id:
            raise InvalidArgument("run", run, _ANOTHER)
        # Checked by the call, not only when it is awaited.
        if timeout is not None:
            add_duration(self._run.clock.now(), timeout, "timeout")
        target = children.find(ref.workflow)
        call = self._run.call(id, self.result if target is None else target.fn, (ref.id,))
        call.kind = "result"
        call.returns = returns
        host = self._run.host
        assert host is not None, "a run with children has a host"
        return await_run(self._run, call, host, ref, timeout)

    @overload
    def map_runs(
        self,
        id: str,
        workflow: Target[P, T],
        items: Iterable[P],
        /,
        *,
        on_error: Literal["raise"] = ...,
        **options: Unpack[MapOptions],
    ) -> Coroutine[object, None, list[T]]: ...
    @overload
    def map_runs(
        self,
        id: str,
        workflow: Target[P, T],
        items: Iterable[P],
        /,
        *,
        on_error: Literal["collect"],
        tolerate: int | None = ...,
        **options: Unpack[MapOptions],
    ) -> Coroutine[object, None, list[Ok[T] | Err[RunFailed]]]: ...
    @overload
    def map_runs(
        self,
        id: str,
        workflow: str,
        items: Iterable[Any],
        /,
        *,
        on_error: OnError = ...,
        tolerate: int | None = ...,
        **options: Unpack[MapOptions],
    ) -> Coroutine[object, None, list[Any]]: ...
    def map_runs(
        self,
        id: str,
        workflow: Target[Any, Any] | str,
        items: Iterable[Any],
        /,
        *,
        on_error: OnError = "raise",
        tolerate: int | None = None,
        **options: Unpack[MapOptions],
    ) -> Coroutine[object, None, list[Any]]:
        """Start a run for each item, wait for all of them, and return their outputs in order.

        ```python
        receipts = await step.map_runs("pay", order, [4200, 999])
        ```

        This run wakes once, when the last of them has ended, however many there are. If some have
        failed, the `RunFailed` of the first, in the order of the items, is then raised. With
        `on_error="collect"`, `Ok` or `Err` is returned for each item; if more than `tolerate` have
        failed, `RunFailed` is raised. The other options are the same as in `step.call`.
        """
        child_options = self._child_options(options, MapOptions)
        if not isinstance(items, Iterable) or isinstance(items, str | bytes):
            hint = f"The workflow comes before the items: step.map_runs({id!r}, workflow, items)"
            raise InvalidArgument("items", items, "an iterable of payloads", hint)
        if on_error not in get_args(OnError):
            raise InvalidArgument("on_error", on_error, "'raise' or 'collect'")
        if tolerate is not None and on_error == "raise":
            hint = "With on_error='raise' the first failure is raised"
            raise InvalidArgument("tolerate", tolerate, "None beside on_error='raise'", hint)
        if tolerate is not None:
            check_int(tolerate, "tolerate", minimum=0)
        host, target, call = self._prepare("step.map_runs", id, workflow, None)
        call.kind = "map"
        run_map = RunMap(self._run, call, host, target, list(items), child_options)
        return map_runs(run_map, call, on_error, tolerate)

    def reply(self, question: Question[Any], value: object, /) -> Coroutine[object, None, None]:
        """Answer a question that a program asked this run with `ask`.

        The program receives the first answer to its question, even if this process dies. An answer
        that is not fetched expires after an hour.
        """
        return reply(self._run, reply_call(self._run, question, value), question)

    def _child_options(
        self, options: Mapping[str, Any], allowed: type[MapOptions] | type[StartOptions]
    ) -> ChildOptions:
        child_options = _check_options(options, [*allowed.__annotations__])
        if child_options.run_id is not None and child_options.run_id == self._run.run_id:
            raise InvalidArgument("run_id", child_options.run_id, _ANOTHER)
        return child_options

    def _prepare(
        self, caller: str, id: str, workflow: object, payload: object
    ) -> tuple[Host, Target[Any, Any], StepCall]:
        run = self._run
        target = children_of(run, caller).target(workflow)
        assert run.host is not None, "a run with children has a host"
        args = () if payload is None else (payload,)
        return run.host, target, run.call(id, target.fn, args)


_ANOTHER = "another run: this one cannot wait for its own end"


def _check_options(options: Mapping[str, Any], allowed: Sequence[str]) -> ChildOptions:
    if unknown := [name for name in options if name not in allowed]:
        raise InvalidArgument(unknown[0], options[unknown[0]], f"one of {', '.join(allowed)}")
    child_options = ChildOptions(**options)
    if child_options.run_id is not None:
        check_user_id(child_options.run_id, "run_id")
    if child_options.on_parent_end not in get_args(OnParentEnd):
        raise InvalidArgument("on_parent_end", child_options.on_parent_end, "'cancel' or 'abandon'")
    names = child_options.inherit
    if not isinstance(names, Sequence) or isinstance(names, str):
        raise InvalidArgument("inherit", names, "a list of names of tags")
    for name in names:
        check_unreserved(check_text(name, "inherit", "a list of names of tags"), "inherit")
    return child_options
