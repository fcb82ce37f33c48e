"""One execution of a function: a step answers from its record, or runs and is recorded.

The value of a step reaches the function only after its record is where it must be: in the ledger
always, and in the `Home` of the run when it has one. What cannot be recorded breaks the run: every
later step raises the same error, whatever the function catches.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from datetime import timedelta
from random import Random
from typing import Any

from perdure import codec
from perdure._execution_blame import blamed
from perdure.arguments import check_text
from perdure.cache import StepCache
from perdure.calling import Elapsed, check_callable, invoke, is_awaited, within
from perdure.clock import Clock, isoformat, parse_iso
from perdure.errors import (
    CodecError,
    DriftError,
    InvalidArgument,
    MissingAbility,
    RunOver,
    StepFailed,
    StepTimeout,
)
from perdure.events import (
    Event,
    PersistError,
    PersistSuccess,
    StepCacheHit,
    StepCacheMiss,
    StepComplete,
    StepFailure,
    StepRetry,
    StepStart,
    StepSuccess,
    StepTimedOut,
)
from perdure.ledger import Ledger
from perdure.lineage import CURRENT, Branch, Call, Lineage, outside
from perdure.record import Record, failure_record, is_plain, outcome_of, result_of
from perdure.result import Err, Ok
from perdure.retry import Retry, delay_before
from perdure.snapshot import PendingWait, StepRecord
from perdure.spec import Home, Made, Spec

_NO_STORE = "a Workflow in this process"
_NOTHING_LOST: tuple[codec.Loss, ...] = ()


class Execution:
    """The engine's side of one run."""

    __slots__ = (
        "_broken",
        "_emit",
        "_inflight",
        "_over",
        "cache",
        "clock",
        "ended_by",
        "errors",
        "failures",
        "home",
        "last_key",
        "ledger",
        "lineage",
        "payload",
        "random",
        "run_id",
        "workflow",
    )

    def __init__(
        self,
        *,
        workflow: str,
        run_id: str,
        ledger: Ledger,
        clock: Clock,
        random: Random,
        emit: Callable[[Event], None] | None = None,
        cache: StepCache | None = None,
        errors: tuple[type[BaseException], ...] = (),
        payload: object = None,
    ) -> None:
        self.workflow = workflow
        self.run_id = run_id
        self.ledger = ledger
        self.lineage = Lineage()
        self.clock = clock
        self.random = random
        self.cache = cache
        self.errors = errors
        self.home: Home | None = None
        self.payload = payload
        self.last_key: str | None = None
        self.ended_by: BaseException | None = None
        self.failures: dict[str, BaseException] = {}
        self._emit = emit
        self._broken: BaseException | None = None
        self._over = False
        self._inflight: dict[str, asyncio.Event] = {}

    def spec(
        self,
        id: str,
        fn: Callable[..., Any],
        args: tuple[Any, ...] = (),
        key: str | None = None,
        branch: Branch | None = None,
    ) -> Spec:
        """Check a call and give it its identity."""
        if self._broken is not None:
            raise self._broken
        if self._over:
            raise RunOver(f"step {id!r} was called after the run {self.run_id!r} had ended")
        if type(id) is not str or not id or not id.isascii():
            id = check_text(id, "id", "the step's name, a non-empty text")
        if not callable(fn):
            check_callable(id, fn)
        if key is not None:
            key = check_text(key, "key", "a non-empty text, or nothing")
        return Spec(id, self.lineage.branch() if branch is None else branch, key, fn, args)

    def end(self) -> None:
        """Refuse steps from now on."""
        self._over = True

    def break_off(self, error: BaseException) -> BaseException:
        """Make `error` the answer of every step from now on, and give it back to be raised."""
        if self._broken is None:
            self._broken = error
        return self._broken

    @property
    def broken(self) -> BaseException | None:
        """What broke the run, if anything did."""
        return self._broken

    def unhandled(self) -> list[str]:
        """Give the keys of the failures that ended the run; all, when it does not show which
        did.
        """
        return blamed(self.failures, self.ended_by)

    def perform(self, spec: Spec) -> Coroutine[Any, Any, Any]:
        """Answer from the record, from the cache, or by running the step."""
        return self._execute(spec) if spec.key is None else self._perform_keyed(spec, spec.key)

    async def _perform_keyed(self, spec: Spec, key: str) -> Any:
        """Let one call of a key at a time go on; those that waited find its record."""
        while (twin := self._inflight.get(key)) is not None:
            if (inside := CURRENT.get()) is not None and (inside.path, inside.call) == ("", key):
                raise InvalidArgument("key", key, "a key that is not the one of the step around it")
            await twin.wait()
        done = self._inflight[key] = asyncio.Event()
        try:
            found = self.recorded(spec) or await self._cached(spec, key)
            if found is not None:
                return self._replay(spec, *found)
            return await self._execute(spec)
        finally:
            del self._inflight[key]
            done.set()

    def recorded(self, spec: Spec) -> tuple[str, StepRecord] | None:
        """Give the record that answers this call, with its key."""
        key = self.ledger.find(spec.path, spec.call)
        if key is None:
            return None
        record = self.ledger.get(key)
        self._check_drift(spec, record)
        return key, record

    async def _cached(self, spec: Spec, key: str) -> tuple[str, StepRecord] | None:
        if self.cache is None:
            return None
        with outside():
            record = await self.cache.get(key)
        if record is None:
            self.tell(StepCacheMiss, spec, key)
            return None
        self._check_drift(spec, record)
        self.ledger.put("", key, key, codec.dumps(record))
        return key, record

    def _check_drift(self, spec: Spec, record: StepRecord) -> None:
        kind = record.get("kind", "step")
        if kind != spec.kind:
            what = f"is recorded as a {kind}, and the function now asks for a {spec.kind}"
            hint = "give changed code new step ids, or the workflow a new version"
            raise self._drifted(spec, what, hint, kind, spec.kind)
        before = record.get("args", "")
        if before != spec.print and before and spec.print:
            what = (
                f"was recorded with other arguments (fingerprint {before}) than it is called with "
                f"now ({spec.print}): its record belongs to another call"
            )
            hint = "make arguments depend only on earlier steps, or give the call a key= of its own"
            raise self._drifted(spec, what, hint, before, spec.print)

    def _drifted(
        self, spec: Spec, what: str, hint: str, recorded: str, asked: str
    ) -> BaseException:
        text = f"{spec.place()} {what}; {hint}"
        return self.break_off(DriftError(spec.call, text, recorded=recorded, asked=asked))

    def _replay(self, spec: Spec, key: str, record: StepRecord) -> Any:
        self.last_key = key
        if self._emit is None and is_plain(record):
            return record.get("value")
        declared = (*spec.errors, *self.errors)
        try:
            result, seen = result_of(record, spec.id, spec.return_type, declared, spec.error_type)
        except CodecError as error:
            text = f"the record of {spec.place()} cannot be read: {error}"
            raise self.break_off(CodecError(text)) from error
        if self._emit is not None:
            meta: Any = record.get("meta") or {"origin": "result"}
            origin = None if result.ok else meta["origin"]
            facts = spec.facts(key)
            self.tell(StepCacheHit, spec, key, result=result, origin=origin, facts=facts)
        if isinstance(result, Ok):
            return result.value
        assert seen is not None
        self.failures[key] = seen
        raise seen

    async def _execute(self, spec: Spec) -> Any:
        found = self.recorded(spec)
        if found is not None:
            return self._replay(spec, *found)
        if self._emit is not None:
            self.tell(StepStart, spec, spec.call)
        started = self.clock.monotonic()
        token = CURRENT.set(spec)
        # A step within a step is no further work, and a race only waits for its branches.
        working = spec.kind == "step" and not isinstance(token.old_value, Call)
        self.lineage.busy += working
        try:
            if spec.retries is not None or spec.timeout is not None:
                value = await self._attempts(spec)
            elif is_awaited(spec.fn):
                value = await spec.fn(*spec.args)
            else:
                value = await invoke(spec.fn, spec.args)
        except Exception as error:
            if self._broken is not None:
                raise
            return await self._fail(spec, started, error)
        finally:
            self.lineage.busy -= working
            CURRENT.reset(token)
        if type(value) is Err:
            return await self._fail(spec, started, value)
        if type(value) is Ok:
            value = value.value
        made = self._made(spec, started, value)
        if self.home is not None or self.cache is not None:
            await self._keep(spec, made)
        if self._emit is not None:
            self._tell_success(spec, started, made)
        return made.seen

    async def succeed(
        self, spec: Spec, started: float, value: Any, takes: Sequence[str] = ()
    ) -> Any:
        """Record a value and give what the function sees of it."""
        made = self._made(spec, started, value)
        await self._keep(spec, made, takes)
        if self._emit is not None:
            self._tell_success(spec, started, made)
        return made.seen

    def _made(self, spec: Spec, started: float, value: Any) -> Made:
        made = self.encode(spec, self.ledger.key_for(spec.path, spec.call), started, value)
        self._admit(spec, made)
        return made

    def _admit(self, spec: Spec, made: Made) -> None:
        key = self.last_key = made.key
        self.ledger.put(spec.path, spec.call, key, made.record)
        if made.losses:
            self.ledger.warn(key, made.losses)

    async def _keep(self, spec: Spec, made: Made, takes: Sequence[str] = ()) -> None:
        """Let a record become durable, and others find it in the cache."""
        key = made.key
        if self.home is not None:
            warnings = self.ledger.warnings_of(key) if made.losses else ()
            try:
                await self.home.record(spec.id, key, made.record, made.at, warnings, takes)
            except Exception as error:  # noqa: BLE001  # whatever keeps the record from the store
                self.ledger.drop([key])
                self.tell(PersistError, spec, key, error=error)
                raise self.break_off(error) from error.__cause__
            if self._emit is not None:
                self.tell(PersistSuccess, spec, key)
        if self.cache is not None and spec.key is not None:
            with outside():
                await self.cache.set(spec.key, codec.loads(made.record), ttl=spec.ttl)

    def _tell_success(self, spec: Spec, started: float, made: Made) -> None:
        took = timedelta(seconds=self.clock.monotonic() - started)
        facts = spec.facts(made.key)
        self.tell(StepSuccess, spec, made.key, duration=took)
        self.tell(StepComplete, spec, made.key, duration=took, result=Ok(made.seen), facts=facts)

    def encode(self, spec: Spec, key: str, started: float, value: Any) -> Made:
        """Give the record of a value."""
        data, seen, typed, losses = value, value, False, _NOTHING_LOST
        if not codec.is_plain(value):
            try:
                data, seen, typed, losses = codec.settle(value, spec.return_type)
            except CodecError as error:
                text = f"the value of {spec.place()} cannot be recorded: {error}"
                raise self.break_off(CodecError(text)) from error
        clock = self.clock
        at = isoformat(clock.now())
        record = Record(
            ok=True,
            value=data,
            at=at,
            durationMs=int((clock.monotonic() - started) * 1e6) / 1e3,
            attempts=spec.attempt,
            args=spec.print,
            kind=spec.kind,
            typed=typed,
            coded=data is not value,
            branch=spec.path,
            call="" if key == spec.call else spec.call,
        )
        return Made(key, codec.dumps(record), at, seen, losses)

    async def _fail(
        self,
        spec: Spec,
        started: float,
        failure: Exception | Err[Any],
        takes: Sequence[str] = (),
    ) -> Any:
        declared = (*spec.errors, *self.errors)
        failed, seen, losses = failure_record(failure, spec.id, declared, spec.error_type)
        key = self.ledger.key_for(spec.path, spec.call)
        failed.at = isoformat(self.clock.now())
        failed.durationMs = int((self.clock.monotonic() - started) * 1e6) / 1e3
        failed.attempts, failed.args, failed.kind = spec.attempt, spec.print, spec.kind
        failed.branch, failed.call = spec.path, "" if key == spec.call else spec.call
        made = Made(key, codec.dumps(failed), failed.at, seen, losses)
        self._admit(spec, made)
        self.failures[key] = seen
        await self._keep(spec, made, takes)
        if self._emit is not None:
            took, result = timedelta(seconds=self.clock.monotonic() - started), outcome_of(seen)
            outcome = {"result": result, "origin": failed.meta["origin"], "facts": spec.facts(key)}
            self.tell(StepFailure, spec, key, duration=took, error=result.error)
            self.tell(StepComplete, spec, key, duration=took, **outcome)
        raise seen

    async def _attempts(self, spec: Spec) -> Any:
        retry = spec.retries
        while True:
            try:
                value = await self._once(spec)
                if type(value) is not Err:
                    return value
                failure: Exception = StepFailed(spec.id, value.error, value.cause)
                if retry is None or not self._tries_again(retry, spec, failure):
                    return value
            except Exception as error:
                if retry is None or not self._tries_again(retry, spec, error):
                    raise
                failure = error
            delay = delay_before(retry, spec.attempt, self.random)
            facts = {"attempt": spec.attempt, "attempts": retry.attempts, "delay": delay}
            self.tell(StepRetry, spec, spec.call, error=failure, **facts)
            await self.clock.sleep(delay)
            self._forget_failures(spec, failure)
            spec.retry()

    def _forget_failures(self, spec: Spec, failure: Exception) -> None:
        """Let the steps inside a failed attempt that made it fail run again in the next one."""
        within = spec.within().path
        inner = [key for key in self.failures if self.ledger.lies_within(key, within)]
        ended = blamed({key: self.failures.pop(key) for key in inner}, failure)
        self.ledger.drop(ended)

    def _tries_again(self, retry: Retry, spec: Spec, failure: Exception) -> bool:
        if self._broken is not None or spec.attempt >= retry.attempts:
            return False
        return retry.retry_if is None or bool(retry.retry_if(failure))

    async def _once(self, spec: Spec) -> Any:
        if spec.timeout is None:
            return await invoke(spec.fn, spec.args)
        after = spec.timeout.after
        try:
            return await within(self.clock, after, invoke(spec.fn, spec.args))
        except Elapsed:
            self.tell(StepTimedOut, spec, spec.call, after=after, attempt=spec.attempt)
            return spec.timeout.outcome(StepTimeout(spec.id, after.total_seconds()))

    async def wait(self, spec: Spec, wait: PendingWait) -> Any:
        """Spend a sleep or wait for an event, once; its end is a record like any other."""
        found = self.recorded(spec)
        if found is not None:
            return self._replay(spec, *found)
        wait = self.ledger.pending.setdefault(wait["id"], wait)
        started = self.clock.monotonic()
        try:
            if self.home is not None:
                answer = await self.home.wait(wait)
            else:
                answer = await self._wait_here(spec, wait)
        except Exception as error:  # noqa: BLE001  # whatever keeps the run from waiting
            raise self.break_off(error) from error.__cause__
        self.ledger.pending.pop(wait["id"], None)
        if answer is None:
            return await self.succeed(spec, started, None)
        try:
            value = _as_type(answer[1], spec.returns)
        except CodecError as error:
            event = wait.get("event")
            text = f"the payload of event {event!r} does not fit {spec.place()}: {error}"
            return await self._fail(spec, started, CodecError(text), takes=answer[:1])
        return await self.succeed(spec, started, value, answer[:1])

    async def _wait_here(self, spec: Spec, wait: PendingWait) -> tuple[str, object] | None:
        if wait["kind"] == "event":
            raise MissingAbility(_NO_STORE, "inbox", f"step.wait_for_event({spec.id!r})")
        remaining = parse_iso(wait.get("wakeAt", "")) - self.clock.now()
        await self.clock.sleep(max(remaining, timedelta(0)))
        return None

    def forget_waits(self, path: str) -> None:
        """Drop the waits of branches below `path`: nobody is waiting there any more."""
        for id in [id for id in self.ledger.pending if id.startswith(f"{path}/")]:
            del self.ledger.pending[id]

    async def transact(self, spec: Spec) -> Any:
        """Run a step whose writes commit with its record."""
        found = self.recorded(spec)
        if found is not None:
            return self._replay(spec, *found)
        if self.home is None:
            raise MissingAbility(_NO_STORE, "transaction", f"step.transaction({spec.id!r})")
        key = self.ledger.key_for(spec.path, spec.call)
        self.tell(StepStart, spec, key)
        started = self.clock.monotonic()
        kept: list[Made] = []

        async def work(connection: Any) -> tuple[str, bytes, str]:
            try:
                value = await spec.fn(connection, *spec.args)
            except Exception as error:  # the user's function
                raise _RolledBack(error) from error
            if isinstance(value, Err):
                raise _RolledBack(value)
            made = self.encode(spec, key, started, value.value if type(value) is Ok else value)
            kept[:] = [made]
            return key, made.record, made.at

        token = CURRENT.set(spec)
        try:
            await self.home.transact(spec.id, work)
        except _RolledBack as rolled_back:
            return await self._fail(spec, started, rolled_back.failure)
        except Exception as error:  # noqa: BLE001  # the store: nobody knows whether it committed
            raise self.break_off(error) from error.__cause__
        finally:
            CURRENT.reset(token)
        [made] = kept
        self._admit(spec, made)
        if self._emit is not None:
            self._tell_success(spec, started, made)
        return made.seen

    def announce(
        self, event: Callable[..., Event], started: float | None = None, **facts: Any
    ) -> None:
        """Publish news of the run, with how long it took since `started`."""
        if self._emit is not None:
            if started is not None:
                facts["duration"] = timedelta(seconds=self.clock.monotonic() - started)
            now = self.clock.now()
            with outside():
                self._emit(event(workflow=self.workflow, run_id=self.run_id, at=now, **facts))

    def tell(self, event: Callable[..., Event], spec: Spec, key: str, **facts: Any) -> None:
        """Publish news of a step, if anybody listens."""
        self.announce(event, step=spec.id, key=key, **facts)


def _as_type(payload: Any, wanted: Any) -> Any:
    if wanted is None:
        return payload
    data = codec.encode(payload)
    if data is payload:
        return codec.convert(data, wanted)
    # It has tags: perdure's own writing, and no JSON from elsewhere.
    return codec.decode(data, wanted, typed=True)


class _RolledBack(Exception):
    """Takes a failure of the user's function out through the store's transaction."""

    def __init__(self, failure: Exception | Err[Any]) -> None:
        self.failure = failure
