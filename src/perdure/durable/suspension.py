"""The durable waits of a run, and the decision when the run leaves memory.

A wait is kept here, in memory, until its time or event comes, or until the run is suspended. The
watcher suspends the run when all of the following hold:

1. it is live: neither stopped nor over;
2. at least one branch is parked in a wait, and the next wake time is more than `suspend_after`
   away, or the run is being paused;
3. nothing is in flight: no step, no transaction, no record being written. A wait whose time or
   event has come counts as in flight until its record is durable;
4. every other branch waits for branches or for an asyncio primitive. If a branch awaits something
   unknown, the run is suspended once no such branch has run for `suspend_after`, and a warning
   names the place. If such branches keep running, the run stays in memory, and a warning says so
   once.

So a suspension cuts off no step and no write. What else the function was awaiting is cancelled with
it, and awaited again when the run resumes.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from datetime import datetime, timedelta
from heapq import heappop, heappush
from itertools import count
from typing import Literal, TypeAlias

from perdure import codec
from perdure.clock import Clock, parse_iso
from perdure.durable.inbox import Inbox
from perdure.engine.asyncio_internals import awaited_future, awaits_only, place
from perdure.engine.execution import Execution
from perdure.engine.host import Received
from perdure.engine.tasks import Future, Task, detached
from perdure.errors import PerdureError, Suspended
from perdure.snapshot import PendingWait
from perdure.store import Message

logger = logging.getLogger(__name__)

Answer: TypeAlias = Received | None

POLL = timedelta(milliseconds=250)
SLOWEST_POLL = timedelta(seconds=1)
_QUIET_ITERATIONS, _QUIET_ITERATIONS_ALONE = 5, 2
"""For how many iterations of the event loop no branch may run before all of them wait; fewer if the
run has no further branches."""
_MOST_ITERATIONS, _MOST_ITERATIONS_OF_REPLAY = 20, 10_000
"""How many iterations may pass until then; more with `always_replay`, which cannot try later."""
_PATIENCE = 10
"""After how many times `suspend_after` it is logged that a run cannot leave memory."""


class PendingBranch:
    """A branch that is parked in a wait."""

    __slots__ = ("answer", "event", "message", "reads", "task", "wait", "wake_at")

    def __init__(self, task: Task, wait: PendingWait, reads: int) -> None:
        self.task = task
        self.wait = wait
        self.reads = reads
        self.event = wait.get("event")
        self.wake_at = parse_iso(wait["wakeAt"]) if "wakeAt" in wait else None
        self.message: Message | None = None
        self.answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()


class Suspension:
    """The waits of a run. If `suspend_after` is None, the run never leaves memory.

    With `always_replay`, the run is suspended as soon as possible, whatever its branches await.
    """

    def __init__(
        self,
        execution: Execution,
        inbox: Inbox,
        persist: Callable[[], Awaitable[None]],
        *,
        suspend_after: timedelta | None,
        always_replay: bool = False,
    ) -> None:
        self.suspended_waits: list[PendingWait] | None = None
        self._run = execution
        self._branches = execution.branches
        self._clock = execution.clock
        self._inbox = inbox
        self._persist = persist
        self._suspend_after = suspend_after
        self._always_replay = always_replay
        self._pending: dict[str, PendingBranch] = {}
        self._by_time: list[tuple[datetime, int, PendingBranch]] = []
        self._by_event: dict[str, deque[PendingBranch]] = {}
        self._order = count()
        self._unsaved_deadline = False
        self._last_waits: list[tuple[Task, Future | None]] = []
        self._unchanged_since = 0.0
        self._held_since: float | None = None
        self._is_hold_logged = False
        self._change_event: asyncio.Future[None] | None = None
        self._is_stale = False
        self._message_came = False
        self._poll = POLL
        self._watcher: asyncio.Task[None] | None = None

    async def wait(self, wait: PendingWait) -> Answer:
        """Wait for the time or the event; return the message, if one came."""
        task = asyncio.current_task()
        assert task is not None, "a wait is awaited in a task"
        pending = PendingBranch(task, wait, self._inbox.reads)
        if self._resolve_at_once(pending):
            return pending.answer.result()
        return await self._park(pending)

    async def halt(self, id: str) -> None:
        """Stop this branch until the run was suspended and resumed."""
        await self.wait({"id": id, "kind": "event", "event": id})

    def add_message(self, message: Message) -> None:
        """Add a message that is not in the store's inbox."""
        self._inbox.add_local(message)
        self.recheck()

    def look(self) -> None:
        """Check the inbox, where a message may have arrived."""
        self._message_came = True
        self._poll = POLL
        self.recheck()

    def pause(self) -> None:
        """Let no step begin, and suspend the run as soon as nothing is in flight."""
        self._run.pause()
        self.recheck()

    def recheck(self) -> None:
        """Check again, because a branch was parked, a call ended or a message arrived."""
        self._is_stale = True
        if self._change_event is not None and not self._change_event.done():
            self._change_event.set_result(None)

    async def close(self) -> None:
        """Stop watching."""
        if (watcher := self._watcher) is not None:
            watcher.cancel()
            await asyncio.wait([watcher])

    async def _park(self, pending: PendingBranch) -> Answer:
        self._add(pending)
        self._branches.park(pending.task)
        if self._watcher is None:
            self._branches.on_change = self.recheck
            watcher = detached(self._watch())
            # An eager task may already have ended.
            self._watcher = None if watcher.done() else watcher
        self.recheck()
        try:
            return await pending.answer
        except asyncio.CancelledError:
            if self._pending.pop(pending.wait["id"], None) is not None:
                self._branches.unpark(pending.task)
            if pending.message is not None:
                # Cancelled after its message was handed out: the next wait must receive it.
                self._inbox.put_back(pending.message)
            raise

    def _add(self, pending: PendingBranch) -> None:
        self._pending[pending.wait["id"]] = pending
        if pending.event is not None:
            branches = self._by_event.setdefault(pending.event, deque())
            # Without this, a loop of races would leave one cancelled wait behind per iteration.
            while branches and not self._is_pending(branches[0]):
                branches.popleft()
            branches.append(pending)
        if pending.wake_at is not None:
            heappush(self._by_time, (pending.wake_at, next(self._order), pending))
            # Only long waits store their deadline: after a crash, a short wait simply takes a
            # little longer.
            horizon = self._clock.now() + (self._suspend_after or POLL)
            self._unsaved_deadline |= pending.wake_at > horizon

    def _resolve_at_once(self, pending: PendingBranch) -> bool:
        # Messages come before time: an event that was delivered in time wins over a deadline that
        # has passed in the meantime.
        message = next((each for each in self._inbox if each.name == pending.event), None)
        if message is not None:
            self._inbox.hand_out(message)
            pending.answer.set_result(as_received(message))
        elif pending.wake_at is not None and pending.wake_at <= self._known_until(pending):
            pending.answer.set_result(None)
        return pending.answer.done()

    def _known_until(self, pending: PendingBranch) -> datetime:
        """Return the time up to which all events for this wait are known.

        An event may have been delivered before a timeout but not read yet, so the wait times out
        only once the inbox was read after its deadline.
        """
        if pending.event is None:
            return self._clock.now()
        return self._inbox.known_until(pending.reads)

    async def _watch(self) -> None:
        try:
            while self._pending and self._run.live:
                # Cleared before the check, so that a change during the check causes another one.
                self._is_stale = False
                if await self._can_suspend():
                    # The lease may have been lost, or the deadline passed, during the check.
                    if self._run.live:
                        self._suspend()
                    return
                if self._unsaved_deadline:
                    # The run stays in memory for now, but after a crash the wait must not start
                    # over.
                    self._unsaved_deadline = False
                    await self._persist()
                await self._wait_for_change()
                await self._read_inbox()
                self._resolve()
        except Exception as error:  # noqa: BLE001  # the run cannot continue, and raises it
            self._run.stop(error)
        finally:
            self._watcher = None

    def _suspend(self) -> None:
        """Stop the run; its waits are stored with it, and decide when it wakes up."""
        # A branch may be held before a step that sends out a token or, with `always_replay`, after
        # the record of the answer.
        asks, waits = self._run.open_asks, self._run.history.waits
        ask_waits = {id: wait for id, wait in asks.items() if id in waits}
        branch_waits = {each.wait["id"]: each.wait for each in self._pending.values()}
        self.suspended_waits = list({**ask_waits, **branch_waits}.values())
        self._run.stop(Suspended())

    async def _can_suspend(self) -> bool:
        """Return whether the run leaves memory."""
        if self._suspend_after is None:
            return False
        is_quiet = await self._branches_are_quiet()
        # After the await: a branch may have begun a step in the meantime.
        if not self._may_leave(self._suspend_after):
            self._held_since = None
            return False
        at_work = [task for task in self._unparked() if not awaits_only(task, self._branches.tasks)]
        if not at_work or (is_quiet and self._without_progress(at_work, self._suspend_after)):
            return is_quiet
        self._log_hold(at_work, self._suspend_after)
        return False

    def _may_leave(self, suspend_after: timedelta) -> bool:
        """Return whether nothing is in flight and the next wake time is far away."""
        if self._branches.in_flight or not self._pending:
            return False
        wake_at = self._next_wake()
        is_far = wake_at is None or wake_at - self._clock.now() > suspend_after
        return is_far or self._run.pausing

    def _log_hold(self, at_work: list[Task], suspend_after: timedelta) -> None:
        """Log once that branches which never stop working keep a run that waits in memory."""
        now = self._clock.monotonic()
        if self._held_since is None:
            self._held_since = now
        is_long = now - self._held_since >= suspend_after.total_seconds() * _PATIENCE
        if is_long and not self._is_hold_logged:
            self._is_hold_logged = True
            logger.warning(
                "run %r waits, but stays in memory: its own code keeps working beside the wait: "
                "%s. Do that work in a step, or pause it with step.sleep",
                self._run.run_id,
                ", ".join(place(task) for task in at_work),
            )

    async def _branches_are_quiet(self) -> bool:
        """Let ready branches run; return whether all branches wait.

        Between the end of one branch and the wake-up of another that waits for it, asyncio runs
        callbacks, each in an iteration of the event loop. So only a state that stays quiet for
        several iterations is stable. In a run without further branches, only a callback that is
        already scheduled can start one.
        """
        has_branches = self._branches.root.has_children
        needed = _QUIET_ITERATIONS if has_branches else _QUIET_ITERATIONS_ALONE
        remaining = _MOST_ITERATIONS_OF_REPLAY if self._always_replay else _MOST_ITERATIONS
        quiet = 0
        while not self._branches.in_flight:
            busy = [task for task in self._unparked() if awaited_future(task) is None]
            quiet = 0 if busy else quiet + 1
            if quiet >= needed:
                return True
            if remaining == 0 and busy:
                return self._give_up_on(busy[0])
            remaining -= remaining > 0
            await self._clock.sleep(0)
        return False

    def _give_up_on(self, busy: Task) -> Literal[False]:
        if self._always_replay:
            raise PerdureError(f"the run cannot be suspended: {place(busy)} never waits")
        return False

    def _unparked(self) -> Iterator[Task]:
        branches = self._branches
        return (
            task for task in branches.tasks if task not in branches.parked_tasks and not task.done()
        )

    def _without_progress(self, at_work: list[Task], suspend_after: timedelta) -> bool:
        """Return whether these branches have awaited the same futures for `suspend_after`."""
        waits = [(task, awaited_future(task)) for task in at_work]
        if waits != self._last_waits:
            self._last_waits, self._unchanged_since = waits, self._clock.monotonic()
        if self._always_replay:
            return True
        if self._clock.monotonic() - self._unchanged_since < suspend_after.total_seconds():
            return False
        logger.warning(
            "run %r is suspended while its own code awaits something that perdure does not "
            "recognize; that await is cancelled, and repeated when the run resumes: %s. "
            "Await it in a step if it must finish first",
            self._run.run_id,
            ", ".join(place(task) for task in at_work),
        )
        return True

    async def _wait_for_change(self) -> None:
        if self._is_stale:
            return
        self._change_event = asyncio.get_running_loop().create_future()
        timer = detached(_sleep(self._clock, self._pause()))
        try:
            await asyncio.wait([self._change_event, timer], return_when=asyncio.FIRST_COMPLETED)
            # No process announces its messages to this one before the lease is renewed, so the
            # inbox is also polled, less often the longer nothing happens.
            if timer.done():
                self._message_came = bool(self._by_event)
                self._poll = min(self._poll * 2, SLOWEST_POLL)
        finally:
            timer.cancel()
            self._change_event = None

    def _pause(self) -> timedelta:
        wake_at = None if self._inbox.is_stale else self._next_wake()
        pause = self._poll if wake_at is None else min(wake_at - self._clock.now(), self._poll)
        return (
            min(pause, self._suspend_after) if self._last_waits and self._suspend_after else pause
        )

    def _next_wake(self) -> datetime | None:
        while self._by_time and not self._is_pending(self._by_time[0][2]):
            heappop(self._by_time)
        return self._by_time[0][0] if self._by_time else None

    def _is_pending(self, pending: PendingBranch) -> bool:
        # A cancelled wait stays in the table until its task runs.
        is_known = self._pending.get(pending.wait["id"]) is pending
        return is_known and not pending.answer.done()

    async def _read_inbox(self) -> None:
        wake_at = self._next_wake()
        is_overdue = wake_at is not None and wake_at <= self._clock.now() and bool(self._by_event)
        if not self._by_event or not (self._message_came or is_overdue):
            return
        await self._inbox.refresh()
        self._message_came = self._inbox.is_stale

    def _resolve(self) -> None:
        """Hand out messages in the order they were sent, then time out waits."""
        for message in self._inbox:
            if (pending := self._next_for(message.name)) is not None:
                self._inbox.hand_out(message)
                pending.message = message
                self._wake(pending, as_received(message))
        unresolved: list[tuple[datetime, int, PendingBranch]] = []
        while (wake_at := self._next_wake()) is not None and wake_at <= self._clock.now():
            entry = heappop(self._by_time)
            if wake_at <= self._known_until(entry[2]):
                self._wake(entry[2], None)
            else:
                # Its event may have been sent in time, so read the inbox first.
                unresolved.append(entry)
        for entry in unresolved:
            heappush(self._by_time, entry)

    def _next_for(self, event: str) -> PendingBranch | None:
        branches = self._by_event.get(event)
        while branches:
            pending = branches.popleft()
            if self._is_pending(pending):
                return pending
        self._by_event.pop(event, None)
        return None

    def _wake(self, pending: PendingBranch, answer: Answer) -> None:
        # In flight from now on, not only when its task runs: otherwise the run could be suspended
        # in between, with the message handed out but not recorded.
        del self._pending[pending.wait["id"]]
        self._branches.unpark(pending.task)
        pending.answer.set_result(answer)


def as_received(message: Message) -> Received:
    """Convert a message to what a wait receives."""
    return Received(message.id, codec.decode(codec.loads(message.payload)), message.sent_at)


async def _sleep(clock: Clock, pause: timedelta) -> None:
    await clock.sleep(max(pause, timedelta(0)))
