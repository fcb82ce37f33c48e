"""One execution of a function: a step answers from its record, or runs and is recorded.

The value of a step reaches the function only after its record is durable in the run's host, if it
has one, and then published in the history. A call does not end before its write has: a cancellation
that arrives in the meantime is postponed, so the outcome of a write is always known. What cannot be
recorded breaks the run: every later step raises the same error, whatever the function catches.
"""

import asyncio
from collections.abc import Callable, Coroutine
from datetime import timedelta
from functools import partial
from random import Random
from typing import Any

from perdure import codec
from perdure.cache import StepCache
from perdure.clock import Clock, isoformat, parse_iso
from perdure.engine.arguments import Arguments, record_of
from perdure.engine.attempts import NO_STORE, attempt_once, attempts
from perdure.engine.branches import Branch, Branches
from perdure.engine.call import SCOPE, WAITS, Received, RunHost, StepCall, undecorated
from perdure.engine.failures import leading_to, passing_through
from perdure.engine.history import EncodedRecord, History, Marked, warnings_of
from perdure.engine.invoke import check_callable, invoke, is_awaited
from perdure.engine.middleware import Around
from perdure.engine.target import ChildRuns
from perdure.engine.tasks import POSITION, Interrupted, outside_runs
from perdure.engine.turns import Rank, Turns
from perdure.engine.unwinding import is_unwinding, warn_of_late_call
from perdure.errors import (
    CodecError,
    ContinuedAsNew,
    ManualValueError,
    MissingAbility,
    RunOver,
    Suspended,
)
from perdure.events import (
    Event,
    PersistError,
    PersistSuccess,
    StepCacheHit,
    StepCacheMiss,
    StepComplete,
    StepFailure,
    StepStart,
    StepSuccess,
)
from perdure.result import Err, Ok
from perdure.snapshot import PendingWait, StepRecord
from perdure.snapshot.record import (
    failure_record,
    is_plain,
    outcome_of,
    result_of,
    success_record,
)
from perdure.validation import RESERVED, check_text, check_unreserved

_STEP_NAME = "the step's name, a non-empty string"


class Execution:
    """The engine's side of one run."""

    __slots__ = (
        "_broken",
        "_emit",
        "_keys_in_use",
        "_over",
        "_warned",
        "arguments",
        "around",
        "branches",
        "cache",
        "callback_url",
        "children",
        "clock",
        "deps",
        "encode_input",
        "ended_by",
        "errors",
        "failures",
        "gated",
        "history",
        "host",
        "open_asks",
        "pausing",
        "payload",
        "random",
        "replayed",
        "replays_only",
        "retries",
        "run_id",
        "saga_failures",
        "turns",
        "types",
        "undos",
        "unknown_undos",
        "unseen_events",
        "workflow",
    )

    def __init__(
        self,
        *,
        workflow: str,
        run_id: str,
        history: History,
        clock: Clock,
        random: Random,
        emit: Callable[[Event], None] | None = None,
        cache: StepCache | None = None,
        errors: codec.ErrorScope = codec.NOWHERE,
        types: codec.DeclaredTypes = codec.NO_TYPES,
        payload: object = None,
        deps: Any = None,
        encode_input: Callable[[Any], Any] | None = None,
        children: ChildRuns | None = None,
        arguments: Arguments = "off",
        callback_url: str = "",
        host: RunHost | None = None,
    ) -> None:
        self.workflow = workflow
        self.arguments: Arguments = arguments
        self.run_id = run_id
        self.history = history
        self.branches = Branches()
        self.clock, self.random = clock, random
        self.cache = cache
        self.errors, self.types = errors, types
        self.host = host
        self.payload, self.deps = payload, deps
        self.encode_input = encode_input
        self.children = children
        self.callback_url = callback_url
        self.open_asks: dict[str, PendingWait] = {}
        self.ended_by: BaseException | Err[Any] | None = None
        self.failures: dict[str, BaseException] = {}
        # Set by the host if there is middleware for steps.
        self.around: Around | None = None
        self._emit = emit
        self._broken: BaseException | None = None
        self._over = self._warned = False
        self.replayed = self.retries = 0
        self.pausing = self.replays_only = False
        self.unknown_undos = set(history.owed()) if history.marked else set()
        self.gated = bool(self.unknown_undos)
        self.turns = Turns(history, self.unknown_undos)
        self.undos: dict[str, StepCall] = {}
        self.saga_failures: dict[str, BaseException] = {}
        self._keys_in_use: dict[str, asyncio.Event] = {}
        self.unseen_events: list[tuple[Branch, StepCall]] = []

    def call(
        self,
        id: str,
        fn: Callable[..., Any],
        args: tuple[Any, ...] = (),
        key: str | None = None,
        branch: Branch | None = None,
    ) -> StepCall:
        """Check a call and determine its identity."""
        # Refused before the call gets a number: a step that cannot be recorded must not shift those
        # that come after it.
        if self._broken is not None or self._over:
            self._refuse(id)
        if type(id) is not str or not id or not id.isascii() or id[0] == RESERVED:
            id = check_unreserved(check_text(id, "id", _STEP_NAME), "id")
        if branch is None:
            branch = self.branches.current(self.run_id, id)
        if not callable(fn):
            check_callable(id, fn)
        if key is not None:
            key = check_unreserved(check_text(key, "key", "a non-empty string, or None"), "key")
        if type(fn) is not partial and not hasattr(fn, "durable_step"):
            return StepCall(id, branch, key, fn, args)
        fn, decoration = undecorated(fn)
        call = StepCall(id, branch, key, fn, args)
        return call if decoration is None else decoration.apply(call)

    def end(self) -> None:
        """Refuse steps from now on."""
        self._over = True

    def check_live(self, id: str) -> None:
        """Raise if nothing can be recorded any more: the run was broken off, or is over."""
        if self._broken is not None:
            raise self._broken
        if self._over:
            raise RunOver(f"step {id!r} cannot be recorded: run {self.run_id!r} has ended")

    def _refuse(self, id: str) -> None:
        """Raise for a call that begins too late; log the first one of a run that is unwound."""
        is_unwound = self.branches.cancelled and not self._over
        if is_unwound and not self._warned and is_unwinding(self._broken):
            self._warned = True
            warn_of_late_call(self.run_id, id, self._broken)
        self.check_live(id)

    def break_off(self, error: BaseException) -> BaseException:
        """Make `error` the answer of every step from now on, and return it to be raised."""
        # The first error stays: what is raised later is usually its consequence.
        if self._broken is None:
            self._broken = error
            # Without a host the function belongs to the caller's task, which is not ours to cancel.
            if self.host is not None:
                self.branches.cancel()
        return self._broken

    def begin_again(self, data: object) -> None:
        """Break the run off to continue as new with this input, after what is in flight has ended.

        Its records are dropped, but a step that is cut off would have half an effect.
        """
        if self._broken is None:
            self._broken = ContinuedAsNew(data)
            if self.branches.in_flight:
                self.branches.when_idle = self.branches.cancel
            else:
                self.branches.cancel()

    @property
    def broken(self) -> BaseException | None:
        """The error that broke the run off, or `None`."""
        return self._broken

    @property
    def live(self) -> bool:
        """Whether steps can still be recorded."""
        return self._broken is None and not self._over

    def failures_that_ended_it(self) -> list[str]:
        """Return the keys of the failed steps that the run's end comes from."""
        return leading_to(self.failures, self.ended_by)

    def sagas_that_ended_it(self) -> list[str]:
        """Return the keys of the sagas through which the run's end came."""
        return passing_through(self.saga_failures, self.failures, self.ended_by)

    def perform(self, call: StepCall) -> Coroutine[Any, Any, Any]:
        """Answer from the record, from the cache, or by running the step."""
        return self._execute(call) if call.key is None else self._perform_keyed(call, call.key)

    async def _perform_keyed(self, call: StepCall, key: str) -> Any:
        """Perform one call of a key at a time; the calls that waited find its record."""
        if self.gated and self.stops and self.recorded(call) is None:
            # One that is not to begin must not keep the key from others.
            await self.gate(call)
        # In a loop: of several that waited, the first to wake takes the key again.
        while (other := self._keys_in_use.get(key)) is not None:
            await other.wait()
        done = self._keys_in_use[key] = asyncio.Event()
        try:
            if (found := self.recorded(call) or await self._cached(call, key)) is not None:
                return await self.answer(call, *found)
            return await self._execute(call)
        finally:
            del self._keys_in_use[key]
            done.set()

    def recorded(self, call: StepCall) -> tuple[str, StepRecord] | None:
        """Return the record that answers this call, with its key."""
        key = self.history.find(call.path, call.call)
        if key is None:
            return None
        record = self.history.get(key)
        if (drift := call.drift_from(record)) is not None:
            by = record.get("by")
            # A run with a manual record that does not fit is paused, until an operator has seen it.
            raise self.break_off(ManualValueError(f"{by} entered it: {drift}") if by else drift)
        return key, record

    async def _cached(self, call: StepCall, key: str) -> tuple[str, StepRecord] | None:
        if self.cache is None:
            return None
        with outside_runs():
            record = await self.cache.get(key)
        if record is None:
            self.tell(StepCacheMiss, call, key)
            return None
        # What another run did is not undone by this one.
        record.pop("undo", None)
        self.history.load({key: record})
        return self.recorded(call)

    def replay(self, call: StepCall, key: str, record: StepRecord) -> Any:
        """Return what a record says, or raise it."""
        self.history.last_key = key
        if call.undo is not None and "undo" in record:
            self.add_undo(call, key)
        self.replayed += 1
        # Most records: a JSON value that no listener wants to see. Nothing needs to be rebuilt.
        if self._emit is None and is_plain(record):
            return record.get("value")
        try:
            result, error = result_of(
                record, call.id, call.return_type, self._scope(call), call.error_type, self.types
            )
        except CodecError as unreadable:
            text = f"the record of {call.place()} cannot be read: {unreadable}"
            if by := record.get("by"):
                text = f"the value that {by} entered for {call.place()} does not fit: {unreadable}"
                raise self.break_off(ManualValueError(text)) from unreadable
            raise self.break_off(CodecError(text)) from unreadable
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

    def begin(self, call: StepCall) -> None:
        """Reserve the key of the call's record, and publish that the step starts."""
        if self._broken is not None or self._over:
            self._refuse(call.id)
        if call.undo is not None and self.host is None:
            raise MissingAbility(NO_STORE, "journal", f"the undo of step {call.id!r}")
        call.record_key = self.history.reserve(call.path, call.call)
        # One with a limit starts when the limit permits its first attempt.
        if self._emit is not None and call.limit is None and call.kind not in WAITS:
            self.tell(StepStart, call, call.record_key)
        call.started = self.clock.monotonic()

    async def _execute(self, call: StepCall) -> Any:
        found = self.recorded(call)
        if found is not None:
            if self.gated:
                return await self.answer(call, *found)
            return self.replay(call, *found)
        if call.gate is not None:
            if self.gated:
                await self.gate(call)
            await call.gate(self, call)
        if self.gated:
            await self.gate(call)
        self.begin(call)
        # In flight until the record is accepted, not only until the function has returned: a run
        # that left memory in between would lose the value.
        self.branches.begin(call)
        try:
            token = POSITION.set(call)
            try:
                try:
                    if self.around is not None:
                        value = await self.around.step(call, partial(self._attempts, call))
                    elif call.retries is not None or call.timeout is not None or call.limit:
                        value = await self._attempts(call)
                    elif is_awaited(call.fn):
                        value = await call.fn(*call.args)
                    else:
                        value = await invoke(call.fn, call.args)
                finally:
                    POSITION.reset(token)
            except Exception as error:  # noqa: BLE001  # the user's function
                return await self.fail(call, error)
            if type(value) is Err:
                return await self.fail(call, value)
            # What `succeed` does, without one more coroutine for each step.
            record = self.encode(call, value.value if type(value) is Ok else value)
            await self._commit(call, record)
            if self._emit is not None:
                self.tell_success(call, record)
            return record.value
        finally:
            self.branches.end(call)

    def pause(self) -> None:
        """Let no call without a record begin."""
        self.gated = self.pausing = True

    def replay_only(self) -> None:
        """Answer calls from their records only, until the undos of all steps are known."""
        self.replays_only = self._warned = True
        self.pause()

    @property
    def stops(self) -> bool:
        """Whether the calling branch must not get further than its records."""
        scope = SCOPE.get()
        return self.replays_only or (scope is not None and scope.is_closed)

    async def gate(self, call: StepCall, *, is_wait: bool = False) -> None:
        """Stop a call that has no record, where none may begin; a wait may begin during a pause."""
        if (scope := SCOPE.get()) is not None and call.kind != "undo":
            await scope.stop(call)
        if self.pausing and (self.replays_only or not is_wait):
            await self.hold(call)
        if call.kind != "undo":
            # What is recorded happened before this call.
            await self.take_turn(call, Rank.NEW)

    def add_undo(self, call: StepCall, key: str) -> None:
        """Remember how a recorded step is undone."""
        self.undos[key] = call
        if (scope := SCOPE.get()) is not None:
            call.undo_retry = scope.retry
        self.unknown_undos.discard(key)
        if self.replays_only and not self.unknown_undos:
            # Whatever else the function does when it is replayed, nothing needs it.
            self.break_off(Suspended())

    def find_undo(self, call: StepCall) -> None:
        """Remember how a step is undone whose record is not asked for."""
        key = self.history.find(call.path, call.call)
        if key is not None and key in self.unknown_undos and call.undo is not None:
            self.add_undo(call, key)

    def value_of(self, call: StepCall, key: str) -> Any:
        """Return the value that a recorded step returned, as it was."""
        record, scope = self.history.get(key), self._scope(call)
        result, _ = result_of(record, call.id, call.return_type, scope, call.error_type, self.types)
        return result.unwrap()

    async def answer(self, call: StepCall, key: str, record: StepRecord) -> Any:
        """Return what a record says, or raise it, after other branches have shown their undos."""
        if self.unknown_undos:
            # At once: the call may be cancelled while it waits.
            self.find_undo(call)
        await self.take_turn(call, Rank.SUCCESS if record["ok"] else Rank.FAILURE, key)
        return self.replay(call, key, record)

    async def take_turn(self, call: StepCall, rank: Rank, key: str = "") -> None:
        """Let other branches come as far as they were when this call was made."""
        if self.turns.matter and len(self.branches.tasks) > 1:
            with self.turns.wait(call.wait_id(), rank, key):
                await self.hold(call)

    def end_turn(self) -> None:
        """Let the next of the calls that wait for their turn continue."""
        assert self.host is not None, "only a run with undos waits for turns"
        self.host.resume_branch(self.turns.next())

    def _attempts(self, call: StepCall) -> Coroutine[Any, Any, Any]:
        return attempts(self, call, partial(attempt_once, self, call))

    async def hold(self, call: StepCall) -> None:
        """Stop the calling branch at a step that is not to begin: the run is being paused."""
        if self._broken is not None or self._over:
            self._refuse(call.id)
        assert self.host is not None, "only a host pauses a run"
        self.branches.begin(call)
        try:
            await self.host.halt(call.wait_id())
        finally:
            self.branches.end(call)

    async def spend(self, wait: PendingWait) -> Received | None:
        """Spend a durable wait, and close it; return the message that came."""
        try:
            answer = await self._wait(wait)
        except asyncio.CancelledError:
            if self.live:
                # The function cancelled the wait; a suspension would have broken the run off first.
                self.history.close_wait(wait["id"])
            raise
        except Exception as error:  # noqa: BLE001  # whatever keeps the run from waiting
            raise self.break_off(error) from error.__cause__
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

    async def succeed(self, call: StepCall, value: Any) -> Any:
        """Record a value and return what the function sees of it."""
        record = self.encode(call, value)
        await self._commit(call, record)
        if self._emit is not None:
            self.tell_success(call, record)
        return record.value

    async def _commit(self, call: StepCall, record: EncodedRecord) -> None:
        """Make a record durable, then let it answer; other runs find it in the cache."""
        if self.host is not None:
            try:
                await self.host.record(call, record)
            except Interrupted:
                # The record is durable, so the next call of this step must find it.
                self.publish(call, record)
                raise asyncio.CancelledError from None
            except Exception as error:  # noqa: BLE001  # whatever keeps the record from the store
                self.tell(PersistError, call, record.key, error=error)
                raise self.break_off(error) from error.__cause__
            if self._emit is not None:
                self.tell(PersistSuccess, call, record.key)
        self.publish(call, record)
        # After it was published: the suspension stores what the history has.
        if self.host is not None and self.host.always_replay:
            await self.host.halt(record.key)
        if self.cache is not None and call.key is not None:
            with outside_runs():
                await self.cache.set(call.key, codec.loads(record.json), ttl=call.ttl)

    def publish(self, call: StepCall, record: EncodedRecord) -> None:
        """Make a record that the store has accepted answer its calls."""
        self.history.publish(record)
        if call.undo is not None and record.json.startswith(b'{"ok":true'):
            self.history.marked[record.key] = Marked(call.path, call.sagas)
            self.add_undo(call, record.key)
        for key, json in call.replaces.items():
            self.history.silence(key, json)
            if key in self.history.unclaimed and self.host is not None:
                self.host.give_back(key)

    def tell_success(self, call: StepCall, record: EncodedRecord) -> None:
        """Publish that a step succeeded and is recorded."""
        if self._emit is None:
            return
        took, key, facts = self._since(call.started), record.key, call.facts(record.key)
        self.tell(StepSuccess, call, key, duration=took)
        self.tell(StepComplete, call, key, duration=took, result=Ok(record.value), facts=facts)

    def encode(self, call: StepCall, value: Any) -> EncodedRecord:
        """Return the record of a value, or raise if nothing can be recorded any more."""
        if self._broken is not None or self._over:
            self.check_live(call.id)
        at, key = isoformat(self.clock.now()), call.record_key
        if call.undo is not None and (scope := SCOPE.get()) is not None:
            call.sagas = scope.names
        try:
            record, visible, losses = success_record(
                call, value, at, self._milliseconds(call), self.types
            )
        except CodecError as error:
            text = f"the value of {call.place()} cannot be recorded: {error}"
            raise self.break_off(CodecError(text)) from error
        if self.arguments != "off" and call.args:
            record.arguments = record_of(call.args, self.arguments)
        warnings = warnings_of(key, losses) if losses else ()
        return EncodedRecord(key, codec.dumps(record), at, visible, warnings)

    def _milliseconds(self, call: StepCall) -> float:
        return int((self.clock.monotonic() - call.started) * 1e6) / 1e3

    async def fail(self, call: StepCall, failure: Exception | Err[Any]) -> Any:
        """Record a failure and raise it as the function will see it from now on."""
        # A step that was interrupted because the run ended or lost its lease has not failed.
        self.check_live(call.id)
        at, key, scope = isoformat(self.clock.now()), call.record_key, self._scope(call)
        failed, visible, losses = failure_record(call, failure, scope, at, self._milliseconds(call))
        self.failures[key] = visible
        if self.arguments != "off" and call.args:
            failed.arguments = record_of(call.args, self.arguments)
        record = EncodedRecord(key, codec.dumps(failed), at, visible, warnings_of(key, losses))
        await self._commit(call, record)
        if self._emit is not None:
            took, result = self._since(call.started), outcome_of(visible)
            outcome = {"result": result, "origin": failed.meta["origin"], "facts": call.facts(key)}
            self.tell(StepFailure, call, key, duration=took, error=result.error)
            self.tell(StepComplete, call, key, duration=took, **outcome)
        raise visible

    def _scope(self, call: StepCall) -> codec.ErrorScope:
        # The function of a sleep, a wait for an event or a race is the engine's own.
        is_users = call.kind not in ("sleep", "event", "race")
        return self.errors.inside(call.errors, call.fn) if is_users else self.errors

    def _since(self, started: float) -> timedelta:
        return timedelta(seconds=self.clock.monotonic() - started)

    def announce(
        self, event: Callable[..., Event], started: float | None = None, **facts: Any
    ) -> None:
        """Publish an event of the run, with the time since `started`."""
        if self._emit is not None:
            if started is not None:
                facts["duration"] = self._since(started)
            now = self.clock.now()
            with outside_runs():
                self._emit(event(workflow=self.workflow, run_id=self.run_id, at=now, **facts))

    def tell(self, event: Callable[..., Event], call: StepCall, key: str, **facts: Any) -> None:
        """Publish an event of a step."""
        self.announce(event, step=call.id, key=key, branch=call.path, call=call.call, **facts)
