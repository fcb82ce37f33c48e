"""The part of the user's handle that runs several branches at once, with typed values.

user, posts = await step.all(step("user", fetch_user, 1), step("posts", fetch_posts, 1))
pages = await step.map("page", urls, fetch, concurrency=20)
index, event = await step.race("ship", step.wait_for_event("s", "sent"), step.sleep("late", "3d"))
"""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar, overload

from perdure.clock import Duration
from perdure.engine.call import StepCall
from perdure.engine.execution import Execution
from perdure.engine.joins import Name, closed_if_refused, race, run_all, run_each
from perdure.engine.sagas import check_undo
from perdure.errors import InvalidArgument
from perdure.result import Err, Ok
from perdure.retry import Retry, Timeout, as_retry, as_timeout
from perdure.validation import check_int, check_text, check_unreserved

A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")
D = TypeVar("D")
E = TypeVar("E")
F = TypeVar("F")
T = TypeVar("T")
U = TypeVar("U")
Thunks = Mapping[str, Callable[[], Any]]

_AWAITABLE = "an awaitable, such as step(…), or one mapping of names to functions"


class ParallelSteps:
    """A base class of `Step`."""

    __slots__ = ()

    _run: Execution

    @overload
    def all(self, a: Awaitable[A], /) -> Coroutine[object, None, tuple[A]]: ...
    @overload
    def all(self, a: Awaitable[A], b: Awaitable[B], /) -> Coroutine[object, None, tuple[A, B]]: ...
    @overload
    def all(
        self, a: Awaitable[A], b: Awaitable[B], c: Awaitable[C], /
    ) -> Coroutine[object, None, tuple[A, B, C]]: ...
    @overload
    def all(
        self, a: Awaitable[A], b: Awaitable[B], c: Awaitable[C], d: Awaitable[D], /
    ) -> Coroutine[object, None, tuple[A, B, C, D]]: ...
    @overload
    def all(
        self, a: Awaitable[A], b: Awaitable[B], c: Awaitable[C], d: Awaitable[D], e: Awaitable[E], /
    ) -> Coroutine[object, None, tuple[A, B, C, D, E]]: ...
    @overload
    def all(
        self,
        a: Awaitable[A],
        b: Awaitable[B],
        c: Awaitable[C],
        d: Awaitable[D],
        e: Awaitable[E],
        f: Awaitable[F],
        /,
    ) -> Coroutine[object, None, tuple[A, B, C, D, E, F]]: ...
    @overload
    def all(self, *work: Awaitable[T]) -> Coroutine[object, None, tuple[T, ...]]: ...
    @overload
    def all(self, thunks: Thunks, /) -> Coroutine[object, None, dict[str, Any]]: ...
    def all(self, *work: Any) -> Coroutine[object, None, Any]:
        """Await all arguments at once, each in its own branch; return a tuple of their values.

        ```python
        receipt, parcel = await step.all(step("charge", charge, 4200), step("pack", pack, "pen"))
        ```

        All of them are awaited to the end, so that finished work is recorded; then the first
        failure, in order, is raised. They are calls of steps, waits, or coroutines that call
        several steps. A mapping of names to functions runs a step for each name, and returns the
        values by name.
        """
        run = self._run
        with closed_if_refused(work):
            run.check_live("step.all")
            branch = run.branches.current(run.run_id, "step.all")
            if len(work) == 1 and isinstance(work[0], Mapping):
                thunks = _thunks(work[0])
                calls = [run.call(name, thunk, branch=branch) for name, thunk in thunks.items()]
                return _by_name(run, list(thunks), [run.perform(call) for call in calls])
            return run_all(run, [""] * len(work), [_coroutine(*each) for each in enumerate(work)])

    @overload
    def map(
        self,
        id: str,
        items: Iterable[T],
        fn: Callable[[T], Coroutine[Any, Any, Ok[U] | Err[Any]]],
        /,
        *,
        concurrency: int = ...,
        retry: Retry | int | None = ...,
        timeout: Timeout | Duration | None = ...,
        key: Callable[[T], str] | None = ...,
        undo: Callable[[U], object] | None = ...,
        on_error: Literal["raise"] = ...,
    ) -> Coroutine[object, None, list[U]]: ...
    @overload
    def map(
        self,
        id: str,
        items: Iterable[T],
        fn: Callable[[T], Awaitable[U]],
        /,
        *,
        concurrency: int = ...,
        retry: Retry | int | None = ...,
        timeout: Timeout | Duration | None = ...,
        key: Callable[[T], str] | None = ...,
        undo: Callable[[U], object] | None = ...,
        on_error: Literal["raise"] = ...,
    ) -> Coroutine[object, None, list[U]]: ...
    @overload
    def map(
        self,
        id: str,
        items: Iterable[T],
        fn: Callable[[T], Ok[U] | Err[Any]],
        /,
        *,
        concurrency: int = ...,
        retry: Retry | int | None = ...,
        timeout: Timeout | Duration | None = ...,
        key: Callable[[T], str] | None = ...,
        undo: Callable[[U], object] | None = ...,
        on_error: Literal["raise"] = ...,
    ) -> Coroutine[object, None, list[U]]: ...
    @overload
    def map(
        self,
        id: str,
        items: Iterable[T],
        fn: Callable[[T], U],
        /,
        *,
        concurrency: int = ...,
        retry: Retry | int | None = ...,
        timeout: Timeout | Duration | None = ...,
        key: Callable[[T], str] | None = ...,
        undo: Callable[[U], object] | None = ...,
        on_error: Literal["raise"] = ...,
    ) -> Coroutine[object, None, list[U]]: ...
    @overload
    def map(
        self,
        id: str,
        items: Iterable[T],
        fn: Callable[[T], Coroutine[Any, Any, Ok[U] | Err[Any]]],
        /,
        *,
        concurrency: int = ...,
        retry: Retry | int | None = ...,
        timeout: Timeout | Duration | None = ...,
        key: Callable[[T], str] | None = ...,
        undo: Callable[[U], object] | None = ...,
        on_error: Literal["collect"],
    ) -> Coroutine[object, None, list[Ok[U] | Err[Any]]]: ...
    @overload
    def map(
        self,
        id: str,
        items: Iterable[T],
        fn: Callable[[T], Awaitable[U]],
        /,
        *,
        concurrency: int = ...,
        retry: Retry | int | None = ...,
        timeout: Timeout | Duration | None = ...,
        key: Callable[[T], str] | None = ...,
        undo: Callable[[U], object] | None = ...,
        on_error: Literal["collect"],
    ) -> Coroutine[object, None, list[Ok[U] | Err[Any]]]: ...
    @overload
    def map(
        self,
        id: str,
        items: Iterable[T],
        fn: Callable[[T], Ok[U] | Err[Any]],
        /,
        *,
        concurrency: int = ...,
        retry: Retry | int | None = ...,
        timeout: Timeout | Duration | None = ...,
        key: Callable[[T], str] | None = ...,
        undo: Callable[[U], object] | None = ...,
        on_error: Literal["collect"],
    ) -> Coroutine[object, None, list[Ok[U] | Err[Any]]]: ...
    @overload
    def map(
        self,
        id: str,
        items: Iterable[T],
        fn: Callable[[T], U],
        /,
        *,
        concurrency: int = ...,
        retry: Retry | int | None = ...,
        timeout: Timeout | Duration | None = ...,
        key: Callable[[T], str] | None = ...,
        undo: Callable[[U], object] | None = ...,
        on_error: Literal["collect"],
    ) -> Coroutine[object, None, list[Ok[U] | Err[Any]]]: ...
    def map(
        self,
        id: str,
        items: Iterable[Any],
        fn: Callable[[Any], Any],
        /,
        *,
        concurrency: int = 10,
        retry: Retry | int | None = None,
        timeout: Timeout | Duration | None = None,
        key: Callable[[Any], str] | None = None,
        undo: Callable[[Any], object] | None = None,
        on_error: Literal["raise", "collect"] = "raise",
    ) -> Coroutine[object, None, list[Any]]:
        """Run a step for each item, up to `concurrency` at once; return the values in order.

        ```python
        parcels = await step.map("pack", ["pen", "ink", "paper"], pack, concurrency=2)
        ```

        `retry`, `timeout` and `undo` apply to each step. A record is named after the item's index,
        or after `key(item)`, so that items may be added or reordered. After a failure, no other
        step is started; running steps finish, and the first failure, in the order of the items, is
        raised. With `on_error="collect"` everything runs, and `Ok` or `Err` is returned for each
        item.
        """
        check_int(concurrency, "concurrency")
        if not isinstance(items, Iterable):
            hint = f"The items come before the function: step.map({id!r}, items, function)"
            raise InvalidArgument("items", items, "an iterable", hint)
        if on_error not in ("raise", "collect"):
            raise InvalidArgument("on_error", on_error, "'raise' or 'collect'")
        if key is not None and not callable(key):
            raise InvalidArgument("key", key, "a function of an item that returns a string")
        options: dict[str, Any] = {}
        if undo is not None:
            options["undo"] = check_undo(undo)
        if retry is not None:
            options["retries"] = as_retry(retry)
        if timeout is not None:
            options["timeout"] = as_timeout(timeout)
        run = self._run
        # The map itself has no record; its call only names the branch of the items.
        call = run.call(id, fn)
        branch = call.branch.child(call.call)
        calls = [
            _with_options(run.call(f"{id}[{name}]", fn, (item,), branch=branch), options)
            for name, item in _named_items(items, key)
        ]
        return run_each(run, branch, calls, concurrency, collect=on_error == "collect")

    @overload
    def race(
        self, id: str, a: Awaitable[A], b: Awaitable[B], /
    ) -> Coroutine[object, None, tuple[int, A | B]]: ...
    @overload
    def race(
        self, id: str, a: Awaitable[A], b: Awaitable[B], c: Awaitable[C], /
    ) -> Coroutine[object, None, tuple[int, A | B | C]]: ...
    @overload
    def race(
        self, id: str, a: Awaitable[A], b: Awaitable[B], c: Awaitable[C], d: Awaitable[D], /
    ) -> Coroutine[object, None, tuple[int, A | B | C | D]]: ...
    @overload
    def race(
        self,
        id: str,
        a: Awaitable[A],
        b: Awaitable[B],
        c: Awaitable[C],
        d: Awaitable[D],
        e: Awaitable[E],
        /,
    ) -> Coroutine[object, None, tuple[int, A | B | C | D | E]]: ...
    @overload
    def race(self, id: str, /, *work: Awaitable[T]) -> Coroutine[object, None, tuple[int, T]]: ...
    @overload
    def race(self, id: str, thunks: Thunks, /) -> Coroutine[object, None, tuple[str, Any]]: ...
    def race(self, id: str, /, *work: Any) -> Coroutine[object, None, Any]:
        """Run all arguments at once; return the index and the value of the first to finish.

        ```python
        index, parcel = await step.race("pack", step("a", pack, "pen"), step("b", pack, "ink"))
        ```

        The others are cancelled. The winner is recorded, and a replay starts only the winner. The
        arguments are calls of steps, waits, or coroutines that call several steps. With a mapping
        of names to functions, each function is called in its own branch, and the winner's name is
        returned.
        """
        with closed_if_refused((id, *work)):
            names, branches = _racers(work)
            call = self._run.call(id, self.race)
            call.kind = "race"
            return race(self._run, call, names, branches)


async def _by_name(
    run: Execution, names: list[str], work: list[Coroutine[Any, Any, Any]]
) -> dict[str, Any]:
    return dict(zip(names, await run_all(run, names, work), strict=True))


def _racers(work: Sequence[Any]) -> tuple[Sequence[Name], list[Any]]:
    if len(work) == 1 and isinstance(work[0], Mapping):
        thunks = _thunks(work[0])
        names, branches = list(thunks), list(thunks.values())
        if not names:
            raise InvalidArgument("thunks", work[0], "at least one branch")
        return names, branches
    if not work:
        raise InvalidArgument("work", work, "at least one branch")
    for index, each in enumerate(work):
        if asyncio.isfuture(each):
            raise InvalidArgument(
                f"work[{index}]",
                each,
                "an awaitable that has not started",
                "A replay starts only the winner: pass the coroutine itself, not a task",
            )
    return range(len(work)), [_coroutine(*each) for each in enumerate(work)]


def _coroutine(index: int, work: Any) -> Coroutine[object, None, Any]:
    if inspect.iscoroutine(work):
        return work
    if not inspect.isawaitable(work):
        hint = "Pass the members of a list one by one: *calls" if isinstance(work, list) else ""
        raise InvalidArgument(f"work[{index}]", work, _AWAITABLE, hint)
    return _as_coroutine(work)


async def _as_coroutine(work: Awaitable[T]) -> T:
    return await work


def _named_items(
    items: Iterable[Any], key: Callable[[Any], object] | None
) -> Iterator[tuple[Name, Any]]:
    for index, item in enumerate(items):
        if key is None:
            yield index, item
        else:
            yield check_text(key(item), "key", "a function that returns a non-empty string"), item


def _with_options(call: StepCall, options: Mapping[str, Any]) -> StepCall:
    for option, value in options.items():
        setattr(call, option, value)
    return call


def _thunks(thunks: object) -> dict[str, Callable[[], Any]]:
    expected = "a mapping of names to functions without arguments"
    if not isinstance(thunks, Mapping):
        raise InvalidArgument("thunks", thunks, expected)
    for name, thunk in thunks.items():
        if not isinstance(name, str) or not name or not callable(thunk):
            raise InvalidArgument(f"thunks[{name!r}]", thunk, expected)
        check_unreserved(name, "thunks")
    return dict(thunks)
