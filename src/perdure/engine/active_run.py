"""A run in memory: whether it can continue, where its branches are held, what it publishes.

A run is *live* until it is stopped or over. An error that keeps a step from being recorded stops
the run: every later step raises the same error, whatever the function catches. A suspension stops
the run too: its function is unwound, and called again later.
"""

import asyncio
from collections.abc import Callable
from datetime import timedelta
from random import Random
from typing import Any, ClassVar

from perdure.clock import Clock, SyncedClock, parse_iso
from perdure.engine.branches import Branches
from perdure.engine.call import SCOPE, StepCall
from perdure.engine.history import History
from perdure.engine.host import NO_STORE, Host, Received
from perdure.engine.middleware import Around
from perdure.engine.tasks import outside_runs
from perdure.engine.unwinding import is_unwinding, warn_of_late_call
from perdure.errors import ContinuedAsNew, MissingAbility, RunOver
from perdure.events import Event
from perdure.snapshot import PendingWait


class ActiveRun:
    """A run that is being executed, with its history and, if it is stored, its host.

    `gated` says that a call without a record has to pass `gate` before it begins. The run is
    `pausing` if none may begin, and `replays_only` if the function is called only to find
    out how its steps are undone, as in `Replay`. `undos` are the calls whose undos are known, by
    the keys of their records; `replay_stopped_by` is the error that ended a replay early.
    `around` is set if there is middleware for steps. `retries` counts attempts after the first.
    """

    replays_only: ClassVar[bool] = False

    __slots__ = (
        "_emit",
        "_over",
        "_stopped_by",
        "_warned",
        "around",
        "branches",
        "clock",
        "gated",
        "history",
        "host",
        "pausing",
        "random",
        "replay_stopped_by",
        "retries",
        "run_id",
        "undos",
        "workflow",
    )

    def __init__(
        self,
        workflow: str,
        run_id: str,
        history: History,
        clock: Clock,
        random: Random,
        emit: Callable[[Event], None] | None,
        host: Host | None,
    ) -> None:
        self.workflow, self.run_id = workflow, run_id
        self.history, self.host = history, host
        # All times of the run derive from one reading of the clock and the time elapsed since.
        self.clock = clock if isinstance(clock, SyncedClock) else SyncedClock(clock, clock.now())
        self.random = random
        self.branches = Branches()
        self.around: Around | None = None
        self.retries = 0
        self.gated = self.pausing = False
        self.undos: dict[str, StepCall] = {}
        self.replay_stopped_by: Exception | None = None
        self._emit = emit
        self._stopped_by: BaseException | None = None
        self._over = self._warned = False

    @property
    def has_listeners(self) -> bool:
        """Whether events of the run are published."""
        return self._emit is not None

    @property
    def live(self) -> bool:
        """Whether steps can still be recorded."""
        return self._stopped_by is None and not self._over

    @property
    def stopped_by(self) -> BaseException | None:
        """The error that stopped the run, or `None`."""
        return self._stopped_by

    def check_live(self, id: str) -> None:
        """Raise if nothing can be recorded any longer: the run was stopped, or is over."""
        if self._stopped_by is not None:
            raise self._stopped_by
        if self._over:
            raise RunOver(f"step {id!r} cannot be recorded: run {self.run_id!r} has ended")

    def refuse(self, id: str) -> None:
        """Raise for a call that comes too late; log the first one while a run is unwound."""
        is_unwound = self.branches.is_cancelled and not self._over
        if is_unwound and not self._warned and is_unwinding(self._stopped_by):
            self._warned = True
            warn_of_late_call(self.run_id, id, self._stopped_by)
        self.check_live(id)

    def end(self) -> None:
        """Refuse steps from now on."""
        # A thread or task that a step's function left running may still call a step.
        self._over = True

    def stop(self, error: BaseException) -> BaseException:
        """Make every step raise `error` from now on, and return it for the caller to raise."""
        # The first error wins: later errors are usually its consequences.
        if self._stopped_by is None:
            self._stopped_by = error
            # Without a host, the function runs in the caller's task, which is not ours to cancel.
            if self.host is not None:
                self.branches.cancel()
        return self._stopped_by

    def stop_unsure(self, error: BaseException) -> BaseException:
        """Stop the run because a write may have succeeded, whatever stopped it before.

        It is left as it is stored. If a cancelled run were stored from memory, a committed
        transaction could lose its record.
        """
        self._stopped_by = None
        return self.stop(error)

    def begin_again(self, data: object) -> None:
        """Stop the run to continue as new with this input, once nothing is in flight.

        Its records will be dropped, but an interrupted step could leave half of its effect behind.
        """
        if self._stopped_by is None:
            self._stopped_by = ContinuedAsNew(data)
            if self.branches.in_flight:
                self.branches.when_idle = self.branches.cancel
            else:
                self.branches.cancel()

    def pause(self) -> None:
        """Let no call without a record begin."""
        self.gated = self.pausing = True

    @property
    def may_only_replay(self) -> bool:
        """Whether the calling branch must not go beyond its records."""
        scope = SCOPE.get()
        return self.replays_only or (scope is not None and scope.is_closed)

    async def gate(self, call: StepCall, *, is_wait: bool = False) -> None:
        """Stop a call without a record if it may not begin; waits may begin during a pause."""
        # A scope is closed while its undos run, but these must pass.
        if (scope := SCOPE.get()) is not None and call.kind != "undo":
            await scope.stop(call)
        if self.pausing and not is_wait:
            await self.hold(call)

    async def admit(self, call: StepCall) -> None:
        """Wait until a step without a record may begin, including any approval it needs."""
        if call.gate is not None:
            # Checked before the question is asked, and again after the answer, which may take days.
            if self.gated:
                await self.gate(call)
            await call.gate(self, call)
        if self.gated:
            await self.gate(call)

    async def hold(self, call: StepCall) -> None:
        """Stop the calling branch before a step that must not begin while the run is paused."""
        if self._stopped_by is not None or self._over:
            self.refuse(call.id)
        assert self.host is not None, "only a host pauses a run"
        with self.branches.busy(call):
            await self.host.halt(call.wait_id())

    def add_undo(self, call: StepCall, key: str) -> None:
        """Remember how a recorded step is undone."""
        self.undos[key] = call
        if (scope := SCOPE.get()) is not None:
            call.undo_retry = scope.retry

    def find_undo(self, call: StepCall) -> None:
        """Remember how a step is undone, even if its record is not used."""
        key = self.history.find(call.path, call.call)
        if key is not None and call.undo is not None:
            self.add_undo(call, key)

    def open_wait(self, call: StepCall, wait: PendingWait) -> PendingWait:
        """Begin the wait of a call, or return the one that it began in an earlier activation."""
        stored = self.history.open_wait(wait)
        if stored is not wait:
            self.check_wait(call, stored, wait)
        return stored

    def check_wait(self, call: StepCall, stored: PendingWait, new: PendingWait) -> None:
        """Stop the run if an open wait belongs to a different call, as with a record."""
        if (drift := call.drift_from_wait(stored, new)) is not None:
            raise self.stop(drift)

    async def perform_wait(self, wait: PendingWait) -> Received | None:
        """Perform a durable wait and close it; return the message, if one came."""
        try:
            answer = await self._wait(wait)
        except asyncio.CancelledError:
            if self.live:
                # The function itself cancelled the wait; a suspension would have stopped the run
                # first.
                self.history.close_wait(wait["id"])
            raise
        except Exception as error:  # noqa: BLE001  # the wait is impossible
            raise self.stop(error) from error.__cause__
        # This is not durable yet: one write will contain both the record of the call and the end of
        # its wait.
        self.history.close_wait(wait["id"])
        return answer

    async def _wait(self, wait: PendingWait) -> Received | None:
        if self.host is not None:
            return await self.host.wait(wait)
        if wait["kind"] == "event":
            raise MissingAbility(NO_STORE, "inbox", f"step.wait_for_event({wait['id']!r})")
        remaining = parse_iso(wait.get("wakeAt", "")) - self.clock.now()
        await self.clock.sleep(max(remaining, timedelta(0)))
        return None

    def announce(
        self, event: Callable[..., Event], started_at: float | None = None, **facts: Any
    ) -> None:
        """Publish an event of the run, with the time since `started_at`."""
        if self._emit is not None:
            if started_at is not None:
                facts["duration"] = self._time_since(started_at)
            now = self.clock.now()
            with outside_runs():
                self._emit(event(workflow=self.workflow, run_id=self.run_id, at=now, **facts))

    def tell(self, event: Callable[..., Event], call: StepCall, key: str, **facts: Any) -> None:
        """Publish an event of a step."""
        self.announce(event, step=call.id, key=key, branch=call.path, call=call.call, **facts)

    def _time_since(self, started_at: float) -> timedelta:
        return timedelta(seconds=self.clock.monotonic() - started_at)
