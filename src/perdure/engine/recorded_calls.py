"""Calls that have a record: how it is found, checked and returned to the function.

In a run that is resumed with several branches, each call waits for its turn: see `turns`.
"""

import asyncio
from collections.abc import Awaitable, Callable
from random import Random
from typing import Any

from perdure.clock import Clock
from perdure.codec import DeclaredTypes, ErrorScope
from perdure.engine.active_run import ActiveRun
from perdure.engine.branches import Branch
from perdure.engine.call import StepCall
from perdure.engine.history import History
from perdure.engine.host import Host, Received
from perdure.engine.turns import Turns
from perdure.errors import CodecError, ManualValueError
from perdure.events import Event, StepCacheHit
from perdure.result import Ok
from perdure.snapshot import PendingWait, StepRecord
from perdure.snapshot.record import is_plain, result_of


class RecordedCalls(ActiveRun):
    """A run that answers recorded calls.

    `errors` and `types` are the classes that records may refer to. `failures` are the exceptions
    that steps have raised, by key. `unseen_events` are waits that were cancelled after they had
    received their event. `replayed` counts calls that were answered from their records.
    """

    __slots__ = ("_turns", "errors", "failures", "replayed", "types", "unseen_events")

    errors: ErrorScope
    types: DeclaredTypes

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
        super().__init__(workflow, run_id, history, clock, random, emit, host)
        self.replayed = 0
        self.failures: dict[str, BaseException] = {}
        self.unseen_events: tuple[tuple[Branch, StepCall], ...] = ()
        self._turns: Turns | None = None
        if history.has_unused and not self.replays_only:
            self.branches.on_first_branch = self._keep_order

    def _keep_order(self) -> None:
        """Let calls wait for their turns, now that several branches make them."""
        self._turns = Turns(self.history, self.branches)
        self.gated = True

    def find_record(self, call: StepCall) -> tuple[str, StepRecord] | None:
        """Return the record that answers this call, with its key."""
        key = self.history.find(call.path, call.call)
        return None if key is None else (key, self.record_for(call, key))

    def record_for(self, call: StepCall, key: str) -> StepRecord:
        """Return a record that was found, or raise if it belongs to a different call."""
        record = self.history.get(key)
        if (drift := call.drift_from(record)) is not None:
            # Not just raised: the function must not catch this and go beyond a record that is not
            # its own. If an operator entered the record, the run is paused for an operator.
            by = record.get("by")
            raise self.stop(ManualValueError(f"{by} entered it: {drift}") if by else drift)
        return record

    def replay(self, call: StepCall, key: str, record: StepRecord) -> Any:
        """Return the recorded value, or raise the recorded failure."""
        self.history.last_key = key
        if call.undo is not None and "undo" in record:
            self.add_undo(call, key)
        self.replayed += 1
        # The usual case: plain JSON and no listeners, so nothing has to be decoded.
        if self._emit is None and is_plain(record):
            return record.get("value")
        try:
            result, error = result_of(
                record, call.id, call.return_type, self.scope_of(call), call.error_type, self.types
            )
        except CodecError as unreadable:
            text = f"the record of {call.place()} cannot be read: {unreadable}"
            if by := record.get("by"):
                text = f"the value that {by} entered for {call.place()} does not fit: {unreadable}"
                raise self.stop(ManualValueError(text)) from unreadable
            raise self.stop(CodecError(text)) from unreadable
        if self._emit is not None:
            meta: Any = record.get("meta") or {"origin": "result"}
            origin = None if result.ok else meta["origin"]
            facts = call.facts(key)
            self.tell(StepCacheHit, call, key, result=result, origin=origin, facts=facts)
        if isinstance(result, Ok):
            return result.value
        assert error is not None
        self.failures[key] = error
        raise error

    async def answer(self, call: StepCall, key: str, record: StepRecord) -> Any:
        """Return or raise what was recorded, in the order of the records."""
        if self._turns is not None and self._has_branches:
            try:
                await self._stay_in_memory(call, self._turns.wait_to_continue(key))
            except asyncio.CancelledError:
                if self.live and call.kind == "event":
                    # A race that ends this branch makes the event available to the next wait.
                    call.record_key = key
                    branch = self.branches.current(self.run_id, call.id)
                    self.unseen_events += ((branch, call),)
                raise
            self.check_live(call.id)
        return self.replay(call, key, record)

    async def gate(self, call: StepCall, *, is_wait: bool = False) -> None:
        """Stop a call without a record if it may not begin, or not yet."""
        # A call that continues its wait has its turn there: if it is cancelled before, the wait has
        # to be closed.
        if self._has_branches and call.wait_id() not in self.history.waits:
            await self._stay_in_memory(call, self.wait_for_turn())
        await super().gate(call, is_wait=is_wait)

    async def _wait(self, wait: PendingWait) -> Received | None:
        await self.wait_for_turn()
        return await super()._wait(wait)

    async def wait_for_turn(self) -> None:
        """Wait until the function has seen what was recorded before."""
        if self._turns is not None and self._has_branches:
            await self._turns.wait_to_begin()

    @property
    def _has_branches(self) -> bool:
        """Whether several branches make calls; a single one makes them in order anyway."""
        return len(self.branches.tasks) > 1

    async def _stay_in_memory(self, call: StepCall, turn: Awaitable[None]) -> None:
        """Wait for the turn of a call; the run must not be suspended in the meantime.

        It would be stored without the waits that the branch has not reached again yet.
        """
        with self.branches.busy(call):
            await turn

    def value_of(self, call: StepCall, key: str) -> Any:
        """Return the value of a recorded step."""
        record, scope = self.history.get(key), self.scope_of(call)
        result, _ = result_of(record, call.id, call.return_type, scope, call.error_type, self.types)
        return result.unwrap()

    def scope_of(self, call: StepCall) -> ErrorScope:
        """Return the classes by which failures of a call are recognized."""
        # Sleeps, waits for events and races have no user function.
        is_users = call.kind not in ("sleep", "event", "race")
        return self.errors.inside(call.errors, call.fn) if is_users else self.errors
