"""Branches of a run: which line of the function's work calls a step.

A branch is an asyncio task that the workflow function started, by whatever means (`gather`,
`TaskGroup`, `create_task`), or a part that `step.all` and its like named. Its path is made of
creation order, which the program fixes, and never of finishing order, which the weather fixes: two
branches that call the same step ids and finish in any order replay right.

To see tasks at their creation, a task factory is wrapped around the loop's own while at least one
run is active on that loop. Tasks that have nothing to do with a run pass through it untouched.
"""

import asyncio
import sys
from collections.abc import Callable, Coroutine, Mapping
from contextvars import ContextVar
from types import FrameType
from typing import Any, Self, TypeAlias
from weakref import WeakKeyDictionary

Task: TypeAlias = "asyncio.Task[Any]"


class Branch:
    """One line of work; hands out identities of step calls, each once."""

    __slots__ = ("calls", "children", "lineage", "parked", "path")

    def __init__(self, lineage: "Lineage", path: str = "") -> None:
        self.lineage = lineage
        self.path = path
        self.calls: dict[str, int] = {}
        self.children = 0
        self.parked = False

    def call(self, id: str) -> str:
        """Give the identity of the next call of `id` in this branch: `id`, `id#2`, `id#3` …"""
        n = self.calls.get(id, 0) + 1
        self.calls[id] = n
        # An id that looks like another's repeat always carries its count, so the two never meet.
        return id if n == 1 and not ("#" in id and _ends_in_count(id)) else f"{id}#{n}"

    def child(self, name: str = "") -> "Branch":
        """Give a new branch below this one, by its name or by the order of creation."""
        if name:
            part = _part(name)
        else:
            self.children += 1
            part = str(self.children)
        return Branch(self.lineage, f"{self.path}/{part}" if self.path else part)


class Call:
    """A step that is being executed: what its function may ask about itself.

    `path` is the branch its record belongs to: an explicit key is one identity in the whole run.
    """

    __slots__ = ("attempt", "branch", "call", "inner", "path")

    def __init__(self, branch: Branch, call: str, path: str) -> None:
        self.branch = branch
        self.call = call
        self.path = path
        self.attempt = 1
        self.inner: Branch | None = None

    def retry(self) -> None:
        """Begin another attempt: steps called within it count from the start again."""
        self.attempt += 1
        self.inner = None

    def within(self) -> Branch:
        """Give the branch of steps that this step's own function calls."""
        if self.inner is None:
            self.inner = Branch(self.branch.lineage, inner_path(self.path, self.call))
        return self.inner


def inner_path(path: str, call: str) -> str:
    """Give the path of steps that the function of this call of this branch calls."""
    part = f"{_part(call)}>"
    return f"{path}/{part}" if path else part


def _part(name: str) -> str:
    """Give a name as one part of a path, unlike any other part: no slash, and no bare number."""
    if "/" in name or "%" in name:
        name = name.replace("%", "%25").replace("/", "%2F")
    return f"%{name}" if name.isdecimal() else name


CURRENT: ContextVar[Call | None] = ContextVar("perdure_current_step", default=None)
_OUTSIDE: ContextVar[bool] = ContextVar("perdure_outside", default=False)

_branches: dict[Task, Branch] = {}
_asides: WeakKeyDictionary[Task, tuple[Call, Branch]] = WeakKeyDictionary()


class Lineage:
    """The branches of one run, and how many of them are in a step just now.

    As a context manager it makes the current task the run's root branch, and sees to it that tasks
    created meanwhile are enrolled.
    """

    __slots__ = ("_before", "_call", "_factory", "_loop", "_task", "busy", "root", "tasks")

    def __init__(self) -> None:
        self.root = Branch(self)
        self.busy = 0
        self.tasks: dict[Task, Branch] = {}

    def __enter__(self) -> Self:
        task = asyncio.current_task()
        assert task is not None, "a run needs a task"
        self._task = task
        self._loop = task.get_loop()
        self._before = _branches.get(task)
        self.tasks[task] = _branches[task] = self.root
        self._call = CURRENT.set(None)
        self._factory = _watch(self._loop)
        return self

    def __exit__(self, *_: object) -> None:
        _unwatch(self._loop, self._factory)
        CURRENT.reset(self._call)
        del self.tasks[self._task]
        if self._before is None:
            del _branches[self._task]
        else:
            _branches[self._task] = self._before

    def branch(self) -> Branch:
        """Give the branch in which the running code calls a step of this run."""
        call = CURRENT.get()
        if call is not None and call.branch.lineage is self:
            return _inside(call)
        return self.carrier()

    def carrier(self) -> Branch:
        """Give the branch that the running task carries."""
        task = asyncio.current_task()
        assert task is not None, "a step is called inside a task"
        branch = self.tasks.get(task)
        if branch is None:
            # A task that was made out of our sight (in a callback, by a foreign factory): it is a
            # branch of the root in order of its first step.
            branch = self.root.child()
            enrol(task, branch)
        return branch


class outside:  # noqa: N801  # reads as an adverb: with outside()
    """Makes tasks that are started in here no branches of the run.

    For what the engine calls beside the function: listeners, caches, stores. How many tasks they
    start differs from one time to the next, and must not move the branches' numbers.
    """

    __slots__ = ("_token",)

    def __enter__(self) -> None:
        self._token = _OUTSIDE.set(True)

    def __exit__(self, *_: object) -> None:
        _OUTSIDE.reset(self._token)


def about_to_run(task: Task) -> bool:
    """Tell whether the event loop will run this task without anything else happening first."""
    waiter = getattr(task, "_fut_waiter", None)
    return waiter is None or waiter.done()


def awaits_branches(task: Task, branches: Mapping[Task, Branch]) -> bool:
    """Tell whether a task can go on only when branches of its run do.

    asyncio keeps to itself what a task waits for, so this looks under its covers, and knows `await
    task`, `gather`, `TaskGroup`, `wait` and `wait_for`. What it does not know counts as work of the
    task's own: such a run stays in memory, and nothing worse.
    """
    waiter = getattr(task, "_fut_waiter", None)
    if waiter is None or waiter.done():
        return False
    if isinstance(waiter, asyncio.Task):
        return waiter in branches
    if (children := getattr(waiter, "_children", None)) is not None:
        return all(child.done() or child in branches for child in children)
    return _innermost(task.get_coro()) in _JOINS


_WAIT_FOR = asyncio.wait_for.__code__  # noqa: TID251  # recognised, not called
_STARTS = frozenset(
    {
        asyncio.BaseEventLoop.create_task.__code__,
        asyncio.ensure_future.__code__,
        getattr(asyncio.tasks, "_ensure_future", asyncio.ensure_future).__code__,
    }
)
_JOINS = frozenset(
    {
        asyncio.TaskGroup.__aexit__.__code__,
        _WAIT_FOR,
        getattr(asyncio.tasks, "_wait", asyncio.wait).__code__,
    }
)


def _innermost(coroutine: object) -> object:
    inner = coroutine
    while (awaited := getattr(inner, "cr_await", None)) is not None and hasattr(awaited, "cr_code"):
        inner = awaited
    return getattr(inner, "cr_code", None)


def _inside(call: Call) -> Branch:
    """Give the branch of the running code, which belongs to a step's own function."""
    try:
        task = asyncio.current_task()
    except RuntimeError:  # in a thread
        return call.within()
    aside = _asides.get(task) if task is not None else None
    return aside[1] if aside is not None and aside[0] is call else call.within()


def enrol(task: Task, branch: Branch) -> None:
    """Make `task` the carrier of `branch` until it is done."""
    _branches[task] = branch.lineage.tasks[task] = branch
    task.add_done_callback(_forget)


def spawn(branch: Branch, work: Coroutine[Any, Any, Any]) -> Task:
    """Start `work` as the given branch."""
    task: Task = asyncio.Task(work, loop=asyncio.get_running_loop())
    enrol(task, branch)
    if (call := CURRENT.get()) is not None:
        _asides[task] = (call, branch)
    return task


def _forget(task: Task) -> None:
    branch = _branches.pop(task, None)
    if branch is not None:
        branch.lineage.tasks.pop(task, None)


def _ends_in_count(id: str) -> bool:
    head, mark, tail = id.rpartition("#")
    return bool(mark) and tail.isdecimal() and bool(head)


class _Factory:
    """A task factory that enrols the tasks a run's branches create, and passes on all others."""

    __slots__ = ("before", "guests")

    def __init__(self, before: Callable[..., Any] | None) -> None:
        self.before = before
        self.guests = 0

    def __call__(self, loop: asyncio.AbstractEventLoop, coro: Any, **options: Any) -> Any:
        call, branch = CURRENT.get(), _branch_for_new_task(loop)
        if self.before is None:
            task = asyncio.Task(coro, loop=loop, **options)
        else:
            task = self.before(loop, coro, **options)
        if branch is not None:
            if call is None:
                enrol(task, branch)
            else:
                # What a step's own function starts is that step's business, and no branch of the
                # run; only the steps it calls are told apart by it.
                _asides[task] = (call, branch)
        return task


def _branch_for_new_task(loop: asyncio.AbstractEventLoop) -> Branch | None:
    creator = asyncio.current_task(loop)
    if _OUTSIDE.get() or creator is None:
        return None
    call = CURRENT.get()
    parent = _branches.get(creator) if call is None else _inside(call)
    if parent is None:
        return None
    # From Python 3.12 on `wait_for` starts no task: a run that outlives an upgrade must not notice.
    return parent if _starts_for_wait_for() else parent.child()


def _starts_for_wait_for() -> bool:
    frame: FrameType | None = sys._getframe(3)
    while frame is not None and frame.f_code in _STARTS:
        frame = frame.f_back
    return frame is not None and frame.f_code is _WAIT_FOR


def _watch(loop: asyncio.AbstractEventLoop) -> _Factory:
    factory = loop.get_task_factory()
    if not isinstance(factory, _Factory):
        factory = _Factory(factory)
        loop.set_task_factory(factory)
    factory.guests += 1
    return factory


def _unwatch(loop: asyncio.AbstractEventLoop, factory: _Factory) -> None:
    factory.guests -= 1
    # One that somebody has put in its place meanwhile is theirs to mind.
    if not factory.guests and loop.get_task_factory() is factory:
        loop.set_task_factory(factory.before)
