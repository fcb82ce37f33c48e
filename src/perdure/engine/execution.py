"""One execution of a function: a step is answered from its record, or runs and is recorded.

The value of a step reaches the function only after its record is durable in the run's host, if it
has one, and published in the history. A call does not end before its write: a cancellation that
arrives in the meantime is postponed, so the outcome of a write is always known.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from datetime import timedelta
from functools import partial
from random import Random
from typing import Any

from perdure import codec
from perdure.cache import StepCache
from perdure.clock import Clock, parse_iso
from perdure.engine.arguments import Arguments, record_of
from perdure.engine.attempts import attempt_once, attempts
from perdure.engine.branches import Branch
from perdure.engine.call import SCOPE, WAITS, StepCall, step_call, undecorated
from perdure.engine.environment import Environment
from perdure.engine.failures import leading_to, passing_through
from perdure.engine.history import History, UndoableStep
from perdure.engine.host import NO_STORE, Host
from perdure.engine.invoke import invoke, is_awaited, not_callable
from perdure.engine.losses import warnings_of
from perdure.engine.recorded_calls import RecordedCalls
from perdure.engine.records import EncodedRecord
from perdure.engine.tasks import POSITION, Interrupted, Task, outside_runs
from perdure.engine.unawaited import call_named
from perdure.errors import CodecError, MissingAbility
from perdure.events import (
    Event,
    PersistError,
    PersistSuccess,
    StepCacheMiss,
    StepComplete,
    StepFailure,
    StepStart,
    StepSuccess,
)
from perdure.result import Err, Ok
from perdure.snapshot import PendingWait
from perdure.snapshot.record import failure_record, outcome_of, success_record
from perdure.validation import RESERVED, check_text, check_unreserved

_STEP_NAME = "the step's name, a non-empty string, as the first argument"


class Execution(RecordedCalls):
    """The calls of one run, from their identity to their records.

    `saga_failures` are the exceptions that scopes have raised, by key, and `ended_by` is what ended
    the function. `open_asks` are waits that branches keep open while they do something else.
    `rollbacks` are the tasks that undo scopes.
    """

    __slots__ = (
        "_keys_in_use",
        "arguments",
        "cache",
        "callback_url",
        "children",
        "deps",
        "encode_input",
        "ended_by",
        "open_asks",
        "payload",
        "rollbacks",
        "saga_failures",
    )

    def __init__(
        self,
        workflow: str,
        run_id: str,
        history: History,
        clock: Clock,
        random: Random,
        environment: Environment,
        emit: Callable[[Event], None] | None = None,
        host: Host | None = None,
    ) -> None:
        super().__init__(workflow, run_id, history, clock, random, emit, host)
        self.errors, self.types = environment.errors, environment.types
        self.cache: StepCache | None = None
        self.payload, self.deps = environment.payload, environment.deps
        self.encode_input = environment.encode_input
        self.children = environment.children
        self.arguments: Arguments = environment.arguments
        self.callback_url = environment.callback_url
        self.ended_by: BaseException | Err[Any] | None = None
        self.saga_failures: dict[str, BaseException] = {}
        self.rollbacks: dict[Task, None] = {}
        self.open_asks: dict[str, PendingWait] = {}
        self._keys_in_use: dict[str, asyncio.Event] = {}

    def call(
        self,
        id: str,
        fn: Callable[..., Any],
        args: tuple[Any, ...] = (),
        key: str | None = None,
        branch: Branch | None = None,
    ) -> StepCall:
        """Check a call and determine its identity."""
        # Refused before the call gets a number: a step that cannot be recorded must not renumber
        # later ones.
        if self._stopped_by is not None or self._over:
            self.refuse(id)
        if type(id) is not str or not id or not id.isascii() or id[0] == RESERVED:
            id = check_unreserved(check_text(id, "id", _STEP_NAME), "id")
        if branch is None:
            branch = POSITION.get()
            # Almost always the running task carries the branch. Compared here, to save a call.
            if (
                type(branch) is not Branch
                or branch.branches is not self.branches
                or branch.task is not asyncio.current_task(self.branches.loop)
            ):
                branch = self.branches.current(self.run_id, id)
        if not callable(fn):
            raise not_callable(id, fn)
        if key is not None:
            key = check_unreserved(check_text(key, "key", "a non-empty string, or None"), "key")
        if type(fn) is not partial and not hasattr(fn, "durable_step"):
            return step_call(id, branch, key, fn, args)
        fn, decoration = undecorated(fn)
        call = step_call(id, branch, key, fn, args)
        return call if decoration is None else decoration.apply(call)

    def perform(self, call: StepCall) -> Coroutine[Any, Any, Any]:
        """Answer from the record, from the cache, or by running the step."""
        return self.execute(call) if call.key is None else self._perform_keyed(call, call.key)

    @call_named("step")
    async def _perform_keyed(self, call: StepCall, key: str) -> Any:
        """Perform one call per key at a time; calls that waited then find its record."""
        if self.gated and self.may_only_replay and self.find_record(call) is None:
            # A call that must not begin must not block the key for others.
            await self.gate(call)
        await self.take_key(key)
        try:
            if self.cache is not None and self.find_record(call) is None:
                await self._load_from_cache(self.cache, call, key)
            return await self.execute(call)
        finally:
            self.free_key(key)

    async def take_key(self, key: str) -> None:
        """Wait until no call uses the key, and use it until `free_key` is called."""
        # A loop, because of several waiting calls, the first to wake takes the key again.
        while (other := self._keys_in_use.get(key)) is not None:
            await other.wait()
        self._keys_in_use[key] = asyncio.Event()

    def free_key(self, key: str) -> None:
        """Let the next call use the key."""
        self._keys_in_use.pop(key).set()

    async def _load_from_cache(self, cache: StepCache, call: StepCall, key: str) -> None:
        """Add the record of another run to the history, where the call will find it."""
        with outside_runs():
            record = await cache.get(key)
        if record is None:
            self.tell(StepCacheMiss, call, key)
            return
        # This run must not undo what another run did.
        record.pop("undo", None)
        self.history.load({key: record})

    @call_named("step")
    async def execute(self, call: StepCall) -> Any:
        """Answer from the record, or call the function and record its value.

        This is the only coroutine between the call of most steps and the write of their records:
        rare cases are handled elsewhere, and the code of `succeed` is repeated here.
        """
        if (key := self.history.find(call.path, call.call)) is not None:
            record = self.record_for(call, key)
            if self.gated or len(self.branches.tasks) > 1:
                return await self.answer(call, key, record)
            return self.replay(call, key, record)
        if self.gated or call.gate is not None:
            await self.admit(call)
        self.begin(call)
        # In flight until the record is accepted, not only until the function has returned: if the
        # run left memory in between, the value would be lost.
        self.branches.calls.add(call)
        try:
            # Marks the code inside the step, so that a step or wait called there is refused.
            token = POSITION.set(call)
            try:
                try:
                    is_special = call.retries or call.timeout or call.limit or self.around
                    if is_awaited(call.fn) and not is_special:
                        # The usual case, without a call and a coroutine for it.
                        value = await call.fn(*call.args)
                    else:
                        value = await self._invoke(call)
                finally:
                    POSITION.reset(token)
            except Exception as error:  # noqa: BLE001  # the user's function
                return await self.fail(call, error)
            if type(value) is Err:
                return await self.fail(call, value)
            new_record = self.encode(call, value.value if type(value) is Ok else value)
            if self.host is None or self.host.always_replay or self._emit or self.cache is not None:
                return await self._succeed(call, new_record)
            try:
                await self.host.record(call, new_record)
            except Exception as error:  # noqa: BLE001  # whatever keeps the record from the store
                raise self._unrecorded(call, new_record, error) from error.__cause__
            except Interrupted as interruption:
                # The record is durable, so publish it before the cancellation continues: the next
                # call of this step must find it.
                self.publish(call, new_record)
                raise interruption.plain() from None
            self.publish(call, new_record)
            return new_record.value
        finally:
            self.branches.end(call)

    def _invoke(self, call: StepCall) -> Awaitable[Any]:
        """Return an awaitable that calls the function of a step."""
        if self.around is not None:
            return self.around.step(call, partial(self._attempts, call))
        if call.retries is not None or call.timeout is not None or call.limit is not None:
            return self._attempts(call)
        return invoke(call.fn, call.args)

    def _attempts(self, call: StepCall) -> Coroutine[Any, Any, Any]:
        return attempts(self, call, partial(attempt_once, self, call))

    def begin(self, call: StepCall) -> None:
        """Reserve the key of the call's record, and publish that the step starts."""
        if self._stopped_by is not None or self._over:
            self.refuse(call.id)
        if call.undo is not None and self.host is None:
            raise MissingAbility(NO_STORE, "journal", f"the undo of step {call.id!r}")
        call.record_key = self.history.reserve(call.path, call.call)
        # A step with a limit starts only when the limit permits its first attempt.
        if self._emit is not None and call.limit is None and call.kind not in WAITS:
            self.tell(StepStart, call, call.record_key)
        call.started_at = self.clock.monotonic()

    def count_from(self, call: StepCall, since: str | None) -> None:
        """Let a call that began in an earlier activation have its total duration."""
        if since is not None:
            elapsed = self.clock.now() - parse_iso(since)
            call.started_at -= max(elapsed.total_seconds(), 0)

    def in_flight(self, call: StepCall) -> "InFlight":
        """Return a context manager for a call that does more than call a function.

        It waits until the call may begin, begins it, and keeps it in flight.
        """
        return InFlight(self, call)

    async def succeed(self, call: StepCall, value: Any) -> Any:
        """Record a value, and return it as the function sees it."""
        return await self._succeed(call, self.encode(call, value))

    async def _succeed(self, call: StepCall, record: EncodedRecord) -> Any:
        await self._commit(call, record)
        if self._emit is not None:
            self.tell_success(call, record)
        return record.value

    def encode(self, call: StepCall, value: Any) -> EncodedRecord:
        """Encode the record of a value, or raise if nothing can be recorded any longer."""
        if self._stopped_by is not None or self._over:
            self.check_live(call.id)
        key, end = call.record_key, self.clock.monotonic()
        at, ms = self.clock.isoformat(end), int((end - call.started_at) * 1e6) / 1e3
        if call.undo is not None and (scope := SCOPE.get()) is not None:
            call.sagas = scope.names
        try:
            record, visible, losses = success_record(call, value, at, ms, self.types)
        except CodecError as error:
            text = f"the value of {call.place()} cannot be recorded: {error}"
            raise self.stop(CodecError(text)) from error
        if self.arguments != "off" and call.args:
            record.arguments = record_of(call.args, self.arguments)
        warnings = warnings_of(key, losses, visible) if losses else ()
        number = self.history.number()
        return EncodedRecord(key, codec.dumps(record), at, visible, warnings, ms, number)

    async def fail(self, call: StepCall, failure: Exception | Err[Any]) -> Any:
        """Record a failure, and raise it as every replay will."""
        # A step that was interrupted because the run ended or lost its lease did not fail.
        self.check_live(call.id)
        key, scope, end = call.record_key, self.scope_of(call), self.clock.monotonic()
        at, ms = self.clock.isoformat(end), int((end - call.started_at) * 1e6) / 1e3
        record, visible, losses = failure_record(call, failure, scope, at, ms)
        self.failures[key] = visible
        if self.arguments != "off" and call.args:
            record.arguments = record_of(call.args, self.arguments)
        warnings, number = warnings_of(key, losses, visible), self.history.number()
        new_record = EncodedRecord(key, codec.dumps(record), at, visible, warnings, ms, number)
        await self._commit(call, new_record)
        if self._emit is not None:
            span, result = timedelta(milliseconds=ms), outcome_of(visible)
            outcome = {"result": result, "origin": record.meta["origin"], "facts": call.facts(key)}
            self.tell(StepFailure, call, key, duration=span, error=result.error)
            self.tell(StepComplete, call, key, duration=span, **outcome)
        raise visible

    async def _commit(self, call: StepCall, record: EncodedRecord) -> None:
        """Make a record durable, then publish it, and add it to the cache for other runs."""
        if self.host is not None:
            try:
                await self.host.record(call, record)
            except Interrupted as interruption:
                # The record is durable, so publish it before the cancellation continues: the next
                # call of this step must find it.
                self.publish(call, record)
                raise interruption.plain() from None
            except Exception as error:  # noqa: BLE001  # whatever keeps the record from the store
                raise self._unrecorded(call, record, error) from error.__cause__
            if self._emit is not None:
                self.tell(PersistSuccess, call, record.key)
        self.publish(call, record)
        # After publishing, because the suspension stores what is in the history.
        if self.host is not None and self.host.always_replay:
            await self.host.halt(record.key)
        if self.cache is not None:
            await self._save_to_cache(self.cache, call, record)

    def _unrecorded(self, call: StepCall, record: EncodedRecord, error: Exception) -> BaseException:
        """Stop the run because a record cannot be written; return the error to raise."""
        self.tell(PersistError, call, record.key, error=error)
        return self.stop(error)

    async def _save_to_cache(self, cache: StepCache, call: StepCall, record: EncodedRecord) -> None:
        if call.key is not None:
            with outside_runs():
                await cache.set(call.key, codec.loads(record.json), ttl=call.ttl)

    def publish(self, call: StepCall, record: EncodedRecord) -> None:
        """Publish a record that the store has accepted, so that it answers its calls."""
        self.history.publish(record)
        if call.answer is None and call.undo is None and not call.replaces:
            return
        if call.answer is not None:
            # The answer is recorded now; until here it would have had to be kept as an act of the
            # run.
            self.history.asks.pop(call.event, None)
        if call.undo is not None and record.json.startswith(b'{"ok":true'):
            self.history.undoable_steps[record.key] = UndoableStep(call.path, call.sagas)
            self.add_undo(call, record.key)
        if call.replaces:
            self._replace(call.replaces)

    def _replace(self, records: Mapping[str, bytes]) -> None:
        """Replace records with ones that no longer answer any call."""
        for key, json in records.items():
            self.history.silence(key, json)
            if key in self.history.unclaimed and self.host is not None:
                self.host.give_back(key)

    def tell_success(self, call: StepCall, record: EncodedRecord) -> None:
        """Emit the events of a step that succeeded and was recorded."""
        if self._emit is None:
            return
        # As recorded: the time of the function itself, without the write.
        duration, key = timedelta(milliseconds=record.duration_ms), record.key
        facts = call.facts(key)
        self.tell(StepSuccess, call, key, duration=duration)
        self.tell(StepComplete, call, key, duration=duration, result=Ok(record.value), facts=facts)

    def failures_before(self, end: BaseException | Err[Any] | None) -> list[str]:
        """Return the keys of the failed steps that led to an exception, or to a returned `Err`."""
        return leading_to(self.failures, end)

    def sagas_before(self, end: BaseException | Err[Any] | None) -> list[str]:
        """Return the keys of the sagas that an exception, or a returned `Err`, passed through."""
        return passing_through(self.saga_failures, self.failures, end)


class InFlight:
    """A call that begins once it is admitted, and is in flight until the block ends."""

    __slots__ = ("_call", "_run")

    def __init__(self, run: Execution, call: StepCall) -> None:
        self._run = run
        self._call = call

    async def __aenter__(self) -> None:
        run, call = self._run, self._call
        if run.gated or call.gate is not None:
            await run.admit(call)
        run.begin(call)
        run.branches.begin(call)

    async def __aexit__(self, *_: object) -> None:
        self._run.branches.end(self._call)
