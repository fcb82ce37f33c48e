"""The runs that a worker is executing."""

import asyncio
import logging
from collections.abc import Callable
from contextvars import copy_context

from perdure.durable.leases import LeasedRun
from perdure.durable.lifecycle import log_failure
from perdure.durable.permits import Hold
from perdure.durable.session import Session
from perdure.engine.tasks import Task
from perdure.errors import PerdureError
from perdure.runtime.rounds import Turn
from perdure.runtime.runtime import Runtime
from perdure.runtime.settlement import SettledRun
from perdure.runtime.transitions import pause
from perdure.snapshot import created_at_of, workflow_of
from perdure.store import Grant, require_lease
from perdure.worker.counters import Counters

logger = logging.getLogger("perdure.worker")

SUSPECT = 2
"""A run is a suspect if this many owners in a row died before it wrote an entry."""


class WorkerRuns:
    """The runs that a worker executes, each in a task of `tasks`.

    One suspect is executed at a time, until it has written an entry. `on_rest` is called for each
    run that was settled, with its workflow and when it was created; `on_end` when its task has
    ended, with whether it has returned permits.
    """

    def __init__(
        self,
        runtime: Runtime,
        session: Session,
        tasks: asyncio.TaskGroup,
        counters: Counters,
        max_crashes: int,
        on_rest: Callable[[str, str, SettledRun], None] | None,
        on_end: Callable[[bool], None],
    ) -> None:
        self.session = session
        self._runtime = runtime
        self._group = tasks
        self._context = copy_context()
        self._counters = counters
        self._max_crashes = max_crashes
        self._on_rest = on_rest
        self._on_end = on_end
        self._tasks: dict[Task, str] = {}
        self._holds: dict[Task, Hold] = {}
        self._suspect: tuple[Task, str] | None = None

    def __len__(self) -> int:
        return len(self._tasks)

    def active_runs(self) -> list[LeasedRun]:
        """Return the active runs, whose leases are renewed."""
        return self.session.leases.active_runs(self._tasks.values())

    async def accept(self, turn: Turn) -> None:
        """Execute a claimed run, or leave it for later."""
        if turn.grant.takeovers < SUSPECT or not self._executes_suspect():
            self._start(turn)
        else:
            turn.end()
            await self._delay(turn.grant)

    def _start(self, turn: Turn) -> None:
        grant = turn.grant
        # In a context of the worker: a run that came with a message is started by its sender, whose
        # context may be that of a request, or of another run.
        context = self._context.copy()
        task = self._group.create_task(self._execute(grant), context=context)
        if turn.hold is not None:
            # A cancelled run releases its lease, so that it can wait for its turn again.
            turn.hold.on_lost = task.cancel
            self._holds[task] = turn.hold
        self._counters.claimed += 1
        self._counters.taken_over += grant.takeovers > 0
        self._tasks[task] = grant.lease.id
        if grant.takeovers >= SUSPECT:
            self._suspect = task, grant.lease.id
        task.add_done_callback(self._end)

    def _end(self, task: Task) -> None:
        del self._tasks[task]
        hold = self._holds.pop(task, None)
        if hold is not None:
            hold.end()
        self._on_end(hold is not None)

    def _executes_suspect(self) -> bool:
        """Return whether a suspect without progress is being executed."""
        if self._suspect is None:
            return False
        task, run_id = self._suspect
        return not task.done() and not self.session.leases.entries_of(run_id)

    async def _delay(self, grant: Grant) -> None:
        """Release a suspect while another one is executed: it must not be blamed for a crash."""
        self._counters.delayed += 1
        wake_at = grant.now + self._runtime.lease_ttl / 3
        store = require_lease(self._runtime.store)
        await log_failure(store.release([grant.lease], wake_at=wake_at))

    async def _execute(self, grant: Grant) -> None:
        run_id = grant.lease.id
        try:
            if grant.takeovers >= self._max_crashes:
                return await self._pause(grant)
            grant = await self.session.with_inbox(grant)
            workflow = workflow_of(grant.snapshot) or ""
            created_at = created_at_of(grant.snapshot.get("metadata"))
            execution = self._runtime.driver.continue_run(self.session, grant)
            # Its snapshot may be large, and must not stay in memory as long as the run is active.
            del grant
            self._count(workflow, created_at, await execution)
        except PerdureError as error:
            self._counters.failed_to_continue += 1
            logger.warning("run %r could not be continued: %s", run_id, error)
        except Exception:
            self._counters.failed_to_continue += 1
            logger.exception("run %r could not be continued", run_id)

    def _count(self, workflow: str, created_at: str, settled_run: SettledRun | None) -> None:
        self._counters.finished += 1
        if settled_run is not None:
            self._counters.failed += settled_run.status == "failed"
            self._counters.cancelled += settled_run.status == "cancelled"
            self._counters.retried += settled_run.retries
            if self._on_rest is not None:
                self._on_rest(workflow, created_at, settled_run)

    async def _pause(self, grant: Grant) -> None:
        self._counters.paused += 1
        reason = (
            f"{grant.takeovers} crashes without progress; the cause may be this run "
            "or one that ran beside it. runtime.resume continues it"
        )
        logger.error("run %r is paused: %s", grant.lease.id, reason)
        await pause(self.session, grant, reason)

    async def wait_for_next(self) -> None:
        """Wait until one of the runs has ended."""
        await asyncio.wait(tuple(self._tasks), return_when=asyncio.FIRST_COMPLETED)

    def release(self) -> None:
        """Cancel all runs, which keep their records."""
        self._counters.released += len(self._tasks)
        for task in self._tasks:
            # A cancelled run releases its lease, so that another worker continues it.
            task.cancel()
