"""The task factory, through which the tasks that a branch creates become branches themselves.

It is wrapped around the loop's own while at least one run is active on that loop. Tasks that do not
belong to a run are not affected.
"""

import asyncio
from collections.abc import Callable
from typing import Any

from perdure.engine.asyncio_internals import creator_of_task, is_wait_for, started_together
from perdure.engine.branches import Branch, Reserved
from perdure.engine.tasks import POSITION


class TaskFactory:
    """A task factory that registers the tasks created by branches, as long as it is entered."""

    __slots__ = ("_loop", "_previous", "_users")

    def __init__(
        self, loop: asyncio.AbstractEventLoop, previous: Callable[..., Any] | None
    ) -> None:
        self._loop = loop
        self._previous = previous
        self._users = 0

    def __enter__(self) -> None:
        self._users += 1

    def __exit__(self, *_: object) -> None:
        self._users -= 1
        # A factory that was set in the meantime stays: its owner will remove it.
        if not self._users and self._loop.get_task_factory() is self:
            self._loop.set_task_factory(self._previous)

    def __call__(self, loop: asyncio.AbstractEventLoop, coro: Any, **options: Any) -> Any:
        branch = _branch_for_new_task(coro)
        if branch is None:
            return self._create(loop, coro, options)
        # The task copies this context. An eager task runs before `_create` returns it.
        token = POSITION.set(branch)
        try:
            if (context := options.get("context")) is not None:
                context.run(POSITION.set, branch)
            if branch.branches.task_class is not None:
                task = branch.branches.task_class(coro, loop=loop, **options)
            else:
                task = self._create(loop, coro, options)
        finally:
            POSITION.reset(token)
        branch.branches.add(branch, task)
        return task

    def _create(self, loop: asyncio.AbstractEventLoop, coro: Any, options: dict[str, Any]) -> Any:
        if self._previous is None:
            return asyncio.Task(coro, loop=loop, **options)
        return self._previous(loop, coro, **options)


def _branch_for_new_task(work: object) -> Branch | None:
    position = POSITION.get()
    if type(position) is Reserved:
        return position.branch
    if type(position) is not Branch:
        return None
    creator = creator_of_task()
    if is_wait_for(creator):
        # Since Python 3.12, `wait_for` starts no task. The numbers of branches must not depend on
        # that, because a run may outlive an upgrade.
        return position
    awaitables = started_together(creator)
    return position.child() if awaitables is None else position.child_among(work, awaitables)


def task_factory(loop: asyncio.AbstractEventLoop) -> TaskFactory:
    """Return the task factory of an event loop; enter it to register tasks of branches."""
    factory = loop.get_task_factory()
    # One factory for all runs of the loop: a chain of one per run could not be removed in any
    # order, and would cost each new task one call per run.
    if not isinstance(factory, TaskFactory):
        factory = TaskFactory(loop, factory)
        loop.set_task_factory(factory)
    return factory
