"""Branches of a run: which line of work calls a step, and what each of them is doing.

A branch is an asyncio task that the workflow function started, by whatever means (`gather`,
`TaskGroup`, `create_task`), or a part that `step.race` and its like named. Its path is derived from
creation order, which the program decides, never from completion order, which is not deterministic.
So two branches that call the same step ids and finish in any order are replayed correctly.

The task of a branch is always in one of these states, and a run may leave memory only when no
branch is in the first two:

- in flight: in a step, a transaction or the write of a record (`begin` … `end`);
- at work: in code of the workflow function itself, awaiting something unknown or nothing;
- joining: waiting for other branches, as `tasks.awaits_only` sees it;
- parked: in a durable sleep or wait for an event (`park` … `unpark`);
- done.
"""

import asyncio
from collections.abc import Callable, Coroutine, Generator, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Self

import msgspec

from perdure.engine.asyncio_internals import arguments_of, unwrapped
from perdure.engine.paths import join_path
from perdure.engine.tasks import (
    POSITION,
    SECONDS_IF_BUSY,
    Task,
    cancel_and_wait,
    current_task,
    exception_of,
)
from perdure.errors import InvalidArgument, NestedStep, WrongRun

_ORDERED = "a list of awaitables, in the same order each time"
_ORDER_HINT = (
    "asyncio.as_completed starts them in any order, but a replay must know which is which: pass a "
    "list, or tasks"
)


class Branch:
    """One line of work; numbers its step calls and its child branches."""

    __slots__ = (
        "_siblings",
        "branches",
        "calls",
        "children",
        "has_children",
        "parent",
        "path",
        "task",
    )

    def __init__(
        self, branches: "Branches", path: str = "", parent: "Branch | None" = None
    ) -> None:
        self.branches = branches
        self.path = path
        self.parent = parent
        self.calls: dict[str, int] = {}
        self.children = 0
        self.has_children = False
        self.task: Task | None = None
        self._siblings: dict[Any, Branch] | None = None

    def call(self, id: str) -> str:
        """Return the identity of the next call of `id` in this branch: `id`, `id#2`, `id#3` …"""
        # Counted per id, not overall: adding a step to the code must not renumber the others.
        n = self.calls.get(id, 0) + 1
        self.calls[id] = n
        # An id that itself looks like a repeated call always gets a count, so that the two never
        # collide.
        return id if n == 1 and not ("#" in id and _ends_in_count(id)) else f"{id}#{n}"

    def has_called(self, call: str) -> bool:
        """Return whether `call` has already returned this identity."""
        if call in self.calls and not _ends_in_count(call):
            return True
        id, _, n = call.rpartition("#")
        return n.isdecimal() and self.calls.get(id, 0) >= int(n)

    def child(self, name: str = "") -> "Branch":
        """Return a new branch below this one, identified by a name or by the order of creation."""
        self.has_children = True
        if name:
            return Branch(self.branches, join_path(self.path, name), self)
        # Numbers and names never collide: `join_path` marks a name that looks like a number.
        self.children += 1
        path = f"{self.path}/{self.children}" if self.path else str(self.children)
        return Branch(self.branches, path, self)

    def child_among(self, work: Any, awaitables: Iterable[Any]) -> "Branch":
        """Return a new branch below this one for one of several awaitables that are started now.

        They are numbered in the order in which they were passed, not in that of a set.
        """
        awaitable = unwrapped(work)
        if self._siblings is None or awaitable not in self._siblings:
            if isinstance(arguments_of(work).get("call"), Leaf):
                # A call of a step has its identity already, whichever branch awaits it.
                return self.child()
            if isinstance(awaitables, Iterator | set | frozenset):
                raise InvalidArgument("fs", awaitables, _ORDERED, _ORDER_HINT)
            new = (each for each in awaitables if not asyncio.isfuture(each))
            self._siblings = {each: self.child() for each in dict.fromkeys(new)}
        return self._siblings.pop(awaitable)

    def race_parent(self, call: str, executed_by: "Branch") -> "Branch":
        """Return the parent of the branches of a race that this branch called.

        The path comes from the call, which is unique. But another branch may await the call, and
        execute it; that branch then cancels it.
        """
        executed_by.has_children = True
        return Branch(self.branches, f"{join_path(self.path, call)}>", executed_by)

    def is_below(self, other: "Branch") -> bool:
        """Return whether this branch is a descendant of the other one."""
        above = self.parent
        while above is not None and above is not other:
            above = above.parent
        return above is not None

    def spawn(self, work: Coroutine[Any, Any, Any]) -> Task:
        """Start `work` as this branch."""
        # The task factory sees this position, and makes the new task carry this branch instead of a
        # numbered child of the current one.
        token = POSITION.set(Reserved(self))
        try:
            return asyncio.get_running_loop().create_task(work)
        finally:
            POSITION.reset(token)


class Leaf(msgspec.Struct, eq=False):
    """A step that is being executed, with what its function may ask about it.

    `call` is its identity in the branch `path` that the record belongs to; the path is empty for an
    explicit key, which is unique in the whole run. `refusal` is set if its function has called a
    step or a wait.
    """

    id: str
    branch: Branch
    call: str
    path: str
    attempt: int
    refusal: NestedStep | None


class Reserved:
    """The position of code that is about to create the task of a named branch."""

    __slots__ = ("branch",)

    def __init__(self, branch: Branch) -> None:
        self.branch = branch


def _ends_in_count(id: str) -> bool:
    head, mark, tail = id.rpartition("#")
    return bool(mark) and tail.isdecimal() and bool(head)


class Branches:
    """The branches of one run, and what each of them is doing.

    As a context manager it makes the current task the root branch, and registers the tasks that are
    created below it. `on_change` is called when a branch may have stopped working, `when_idle` once
    nothing is in flight any longer, `on_first_branch` once there is a second branch. `calls` are
    the calls that are in flight or parked. The run `is_cancelled` once every branch has been told
    to stop: whatever still runs is unwinding. `handle` is the `step` object of the workflow
    function, while it runs. `task_class`, if set, is the class of the tasks of its branches;
    otherwise the event loop chooses.
    """

    __slots__ = (
        "_cancellations",
        "_position",
        "_root",
        "_unwinding",
        "calls",
        "handle",
        "is_cancelled",
        "loop",
        "on_change",
        "on_first_branch",
        "parked_tasks",
        "task_class",
        "tasks",
        "when_idle",
    )

    def __init__(self) -> None:
        self._root: Branch | None = None
        self.tasks: dict[Task, Branch] = {}
        # A dict is smaller than a set as long as no branch waits, which is true of most runs.
        self.parked_tasks: dict[Task, None] = {}
        self.calls: set[Leaf] = set()
        self.handle: Any = None
        self.on_change: Callable[[], None] | None = None
        self.when_idle: Callable[[], None] | None = None
        self.on_first_branch: Callable[[], None] | None = None
        self.is_cancelled = False
        self.task_class: type[Task] | None = None
        self._unwinding: asyncio.TimerHandle | None = None
        self._cancellations = 0

    def __enter__(self) -> Self:
        self.loop = asyncio.get_running_loop()
        task = asyncio.current_task(self.loop)
        assert task is not None, "a run needs a task"
        root = self._root = Branch(self)
        root.task = task
        self.tasks[task] = root
        self._position = POSITION.set(root)
        return self

    def __exit__(self, *_: object) -> None:
        if self._unwinding is not None:
            self._unwinding.cancel()
        POSITION.reset(self._position)
        self.tasks.clear()
        # What refers to the run's records: tasks that were left behind must not keep them alive.
        # And what refers back to this object: without it, the run is freed at once.
        self.handle = self.on_change = self.when_idle = self.on_first_branch = self._root = None

    @property
    def root(self) -> Branch:
        """The branch of the workflow function itself."""
        # Code that a run left behind may ask for it after the end, to be told that it is too late.
        if self._root is None:
            self._root = Branch(self)
        return self._root

    def current(self, run_id: str, id: str) -> Branch:
        """Return the branch in which the running code calls the step `id` of this run."""
        position = POSITION.get()
        if type(position) is Branch and position.branches is self:
            if position.task is asyncio.current_task(self.loop):
                return position
            return self._branch_of(current_task(), position)
        if type(position) is Reserved and position.branch.branches is self:
            # The loop's task factory was replaced during the run, so the new task was not
            # registered.
            return self._branch_of(current_task(), position.branch)
        if isinstance(position, Leaf) and position.branch.branches is self:
            position.refusal = NestedStep(id, position.id)
            raise position.refusal
        if position is not None:
            raise WrongRun(run_id, id)
        return self._branch_of(current_task(), self.root)

    def _branch_of(self, task: Task | None, position: Branch) -> Branch:
        if task is None:
            return position
        if position.task is None:
            # An eager task: it runs before its factory has returned it.
            self.add(position, task)
            return position
        branch = self.tasks.get(task)
        if branch is None:
            # We did not see this task being created: it becomes a branch in the order of its first
            # step.
            branch = position.child()
            self.add(branch, task)
        return branch

    def add(self, branch: Branch, task: Task) -> None:
        """Make `task` carry `branch` until it is done."""
        if task in self.tasks:
            return
        # The task of a `wait_for` before Python 3.12 carries the branch of its caller, which
        # already has a task.
        if branch.task is None:
            branch.task = task
        self.tasks[task] = branch
        task.add_done_callback(self._remove)
        if self.on_first_branch is not None:
            on_first_branch, self.on_first_branch = self.on_first_branch, None
            on_first_branch()

    def _remove(self, task: Task) -> None:
        self.tasks.pop(task, None)
        if self.is_cancelled and task.cancelled():
            # The run is leaving memory, and the traceback of this task must not keep it there.
            exception_of(task)
        self.notify_change()

    def is_in_current_loop(self) -> bool:
        """Return whether a running function is in the event loop of the current task."""
        task = current_task()
        return task is not None and task.get_loop() is self.loop

    @property
    def in_flight(self) -> int:
        """How many calls are in flight, not counting durable waits."""
        # A task that is parked is in exactly one call.
        return len(self.calls) - len(self.parked_tasks)

    def begin(self, call: Leaf) -> None:
        """Note that a step, transaction or write begins; the run stays in memory until it ends."""
        self.calls.add(call)

    def end(self, call: Leaf) -> None:
        """Note that a step, transaction or write has ended."""
        self.calls.discard(call)
        # This runs for each step, and usually there is no listener.
        if self.on_change is not None or self.when_idle is not None:
            self._stopped_working()

    @contextmanager
    def busy(self, call: Leaf) -> Generator[None]:
        """Keep a call in flight, and with it the run in memory, until the block ends."""
        self.begin(call)
        try:
            yield
        finally:
            self.end(call)

    def park(self, task: Task) -> None:
        """Note that a call enters a durable wait."""
        self.parked_tasks[task] = None
        self._stopped_working()

    def unpark(self, task: Task) -> None:
        """Note that a durable wait is over; its call continues by writing its record."""
        self.parked_tasks.pop(task, None)

    def _stopped_working(self) -> None:
        if self.on_change is not None:
            self.on_change()
        if self.when_idle is not None and not self.in_flight:
            # Once only: the calls of the branches that it cancels end here too.
            when_idle, self.when_idle = self.when_idle, None
            when_idle()

    def notify_change(self) -> None:
        """Check again whether the run may leave memory."""
        if self.on_change is not None:
            self.on_change()

    def tasks_below(self, branches: Iterable[Branch]) -> list[Task]:
        """Return the tasks that these branches created, directly or indirectly."""
        parents = [branch for branch in branches if branch.has_children]
        if not parents:
            return []
        return [
            task
            for task, branch in self.tasks.items()
            if any(branch.is_below(parent) for parent in parents)
        ]

    def cancel(self) -> None:
        """Cancel every branch, repeatedly: a branch may swallow a cancellation.

        For example, a `TaskGroup` that is already aborting does not pass a cancellation on to its
        tasks. While a step is in flight, it has more time, to clean up.
        """
        if self.tasks:
            if self._cancellations % SECONDS_IF_BUSY == 0 or not self.in_flight:
                for task in self.tasks:
                    # Not immediately: the caller may be one of these tasks, in the middle of a
                    # write.
                    self.loop.call_soon(task.cancel)
            self._cancellations += 1
            # After the cancellations, in the same order: only then is a call of a step made by code
            # that is being unwound, and worth a warning.
            self.loop.call_soon(self._mark_cancelled)
            self._unwinding = self.loop.call_later(1, self.cancel)

    def _mark_cancelled(self) -> None:
        self.is_cancelled = True

    async def unwind(self) -> None:
        """Cancel every branch but the current task, and wait until all have ended."""
        tasks = [task for task in self.tasks if task is not current_task()]
        await self.cancel_and_wait(tasks)

    async def cancel_and_wait(self, tasks: Iterable[Task]) -> None:
        """Cancel tasks of branches, and wait until they have ended; a step may clean up."""
        await cancel_and_wait(tasks, is_busy=lambda: self.in_flight)


def branches_of(position: object) -> Branches | None:
    """Return the branches of the run that code at this `POSITION` belongs to."""
    if isinstance(position, Leaf | Reserved):
        return position.branch.branches
    return position.branches if isinstance(position, Branch) else None
