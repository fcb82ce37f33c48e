"""One execution of a function over one ledger: a step either answers from its record or runs and is recorded.

The value of a step reaches the function only after its record is where it must be: in the ledger
always, and in the `Home` of the run when it has one. What cannot be recorded breaks the run: every
later step raises the same error, whatever the function catches.
"""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime, timedelta
from functools import partial
from random import Random
from typing import Any, Literal, Protocol, TypeAlias

from perdure import codec
from perdure.cache import StepCache
from perdure.clock import Clock, isoformat
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
from perdure.lineage import CURRENT, Branch, Call, Lineage
from perdure.result import Err, Ok, Result
from perdure.retry import Retry, Timeout, delay_before
from perdure.snapshot import PendingWait, StepRecord

Kind: TypeAlias = Literal["step", "sleep", "event", "race", "transaction"]
Origin: TypeAlias = Literal["result", "throw"]


class Home(Protocol):
    """Where a run's records become durable and its waits are spent."""

    async def record(
        self, step: str, key: str, record: bytes, warnings: Sequence[Any], takes: Sequence[str]
    ) -> None:
        """Return when the record is durable; an exception breaks the run."""
        ...

    async def wait(self, branch: Branch, wait: PendingWait) -> tuple[str, object] | None:
        """Wait until the wait's time or event has come: an event gives its message id and payload."""
        ...

    async def transact(self, step: str, work: Callable[[Any], Awaitable[tuple[str, bytes]]]) -> None:
        """Call `work` with the store's connection; its record commits with what it wrote."""
        ...


class Spec:
    """One call of a step, as the function asked for it."""

    __slots__ = (
        "args", "branch", "call", "errors", "fn", "id", "key", "kind", "print", "retry",
        "returns", "timeout", "ttl",
    )  # fmt: skip

    def __init__(
        self, id: str, branch: Branch, key: str | None, fn: Callable[..., Any], args: tuple[Any, ...]
    ) -> None:
        self.id = id
        self.branch = branch
        self.key = key
        self.call = branch.call(id) if key is None else key
        self.fn = fn
        self.args = args
        self.print = codec.fingerprint(args) if args and key is None else ""
        self.kind: Kind = "step"
        self.retry: Retry | None = None
        self.timeout: Timeout | None = None
        self.returns: Any = None
        self.errors: tuple[type[BaseException], ...] = ()
        self.ttl: timedelta | None = None

    @property
    def path(self) -> str:
        """The branch the record belongs to; an explicit key is one identity in the whole run."""
        return self.branch.path if self.key is None else ""

    def return_type(self) -> object:
        """Give the type the value comes back as, if that is known."""
        return self.returns if self.returns is not None else codec.return_type(self.fn)


class Execution:
    """The engine's side of one run."""

    __slots__ = (
        "_broken", "_emit", "_inflight", "_over", "cache", "clock", "ended_by", "errors", "failures",
        "home", "last_key", "ledger", "lineage", "payload", "random", "run_id", "workflow",
    )  # fmt: skip

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
        self, id: str, fn: Callable[..., Any], args: tuple[Any, ...] = (), key: str | None = None
    ) -> Spec:
        """Check a call and give it its identity."""
        if self._broken is not None:
            raise self._broken
        if self._over:
            raise RunOver(f"step {id!r} was called after the run {self.run_id!r} had ended")
        if type(id) is not str or not id:
            raise InvalidArgument("id", id, "the step's name, a non-empty text")
        if not callable(fn):
            _explain_thunks(id, fn)
        if key is not None and (type(key) is not str or not key):
            raise InvalidArgument("key", key, "a non-empty text, or nothing")
        return Spec(id, self.lineage.branch(), key, fn, args)

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
        """Give the keys of the failures that ended the run; all, when it does not show which did."""
        seen = _chain(self.ended_by)
        ended = [key for key, error in self.failures.items() if id(error) in seen]
        return ended or list(self.failures)

    async def perform(self, spec: Spec) -> Any:
        """Answer from the record, from the cache, or by running the step."""
        found = self.recorded(spec)
        if found is None and spec.key is not None:
            found = await self._elsewhere(spec, spec.key)
        if found is not None:
            return self._replay(spec, *found)
        if spec.key is None:
            return await self._execute(spec)
        done = self._inflight[spec.key] = asyncio.Event()
        try:
            return await self._execute(spec)
        finally:
            del self._inflight[spec.key]
            done.set()

    def recorded(self, spec: Spec) -> tuple[str, StepRecord] | None:
        """Give the record that answers this call, with its key."""
        key = self.ledger.find(spec.path, spec.call)
        if key is None:
            return None
        record = self.ledger.get(key)
        self._check_drift(spec, record)
        return key, record

    async def _elsewhere(self, spec: Spec, key: str) -> tuple[str, StepRecord] | None:
        if (twin := self._inflight.get(key)) is not None:
            await twin.wait()
            if (found := self.recorded(spec)) is not None:
                return found
        if self.cache is None:
            return None
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
            raise self.break_off(
                DriftError(
                    spec.call,
                    f"{_place(spec)} is recorded as a {kind}, and the function now asks for a {spec.kind}; "
                    "give changed code new step ids, or a new version of the workflow",
                    recorded=kind,
                    asked=spec.kind,
                )
            )
        before = record.get("args", "")
        if spec.print and before and before != spec.print:
            raise self.break_off(
                DriftError(
                    spec.call,
                    f"{_place(spec)} was recorded with other arguments (fingerprint {before}) than it is called with now "
                    f"({spec.print}); its record belongs to another call. Make the arguments depend only on "
                    "earlier steps, or give the call its own key=",
                    recorded=before,
                    asked=spec.print,
                )
            )

    def _replay(self, spec: Spec, key: str, record: StepRecord) -> Any:
        self.last_key = key
        declared = (*spec.errors, *self.errors)
        result, seen = result_of(record, spec.id, spec.return_type, declared)
        if self._emit is not None:
            origin = None if result.ok else record["meta"]["origin"] if "meta" in record else "result"
            self.tell(StepCacheHit, spec, key, result=result, origin=origin)
        if seen is not None:
            self.failures[key] = seen
            raise seen
        return result.value  # type: ignore[union-attr]  # seen is None only for Ok

    async def _execute(self, spec: Spec) -> Any:
        call = Call(spec.branch, spec.call)
        if self._emit is not None:
            self.tell(StepStart, spec, spec.call)
        started = self.clock.monotonic()
        token = CURRENT.set(call)
        working = spec.kind == "step"
        spec.branch.busy += working
        try:
            if spec.retry is None and spec.timeout is None:
                value = await invoke(spec.fn, spec.args)
            else:
                value = await self._attempts(spec, call)
        except Exception as error:
            if self._broken is not None:
                raise
            return await self._fail(spec, call.attempt, started, error)
        finally:
            spec.branch.busy -= working
            CURRENT.reset(token)
        if type(value) is Err:
            return await self._fail(spec, call.attempt, started, value)
        if type(value) is Ok:
            value = value.value
        return await self.succeed(spec, started, value, attempts=call.attempt)

    async def succeed(
        self, spec: Spec, started: float, value: Any, *, attempts: int = 1, takes: Sequence[str] = ()
    ) -> Any:
        """Record a value and give what the function sees of it."""
        key = self.ledger.key_for(spec.path, spec.call)
        record, seen, losses = self.success(spec, key, started, value, attempts)
        await self._keep(spec, key, record, losses, takes)
        if self._emit is not None:
            took = timedelta(seconds=self.clock.monotonic() - started)
            self.tell(StepSuccess, spec, key, duration=took)
            self.tell(StepComplete, spec, key, duration=took, result=Ok(seen))
        return seen

    def success(
        self, spec: Spec, key: str, started: float, value: Any, attempts: int = 1
    ) -> tuple[bytes, Any, tuple[codec.Loss, ...]]:
        """Encode a value as a record; what comes back is the record, the value seen, and what was lost."""
        try:
            settled = codec.settle(value, spec.return_type)
        except CodecError as error:
            raise self.break_off(
                CodecError(f"the value of {_place(spec)} cannot be recorded: {error}")
            ) from error
        record: dict[str, Any] = {"ok": True, "value": settled.data}
        if settled.typed:
            record["typed"] = True
        return self._facts(spec, key, record, started, attempts), settled.value, settled.losses

    def _facts(
        self, spec: Spec, key: str, record: dict[str, Any], started: float, attempts: int
    ) -> bytes:
        record["at"] = isoformat(self.clock.now())
        record["durationMs"] = round((self.clock.monotonic() - started) * 1000, 3)
        if attempts != 1:
            record["attempts"] = attempts
        if spec.print:
            record["args"] = spec.print
        if spec.kind != "step":
            record["kind"] = spec.kind
        if spec.path:
            record["branch"] = spec.path
        if key != spec.call:
            record["call"] = spec.call
        return codec.dumps(record)

    async def _fail(
        self, spec: Spec, attempts: int, started: float, failure: Exception | Err[Any]
    ) -> Any:
        declared = (*spec.errors, *self.errors)
        record, seen = failure_record(failure, spec.id, declared)
        origin = record["meta"]["origin"]
        key = self.ledger.key_for(spec.path, spec.call)
        await self._keep(spec, key, self._facts(spec, key, record, started, attempts), (), ())
        self.failures[key] = seen
        if self._emit is not None:
            took = timedelta(seconds=self.clock.monotonic() - started)
            result = outcome_of(seen)
            self.tell(StepFailure, spec, key, duration=took, error=result.error)
            self.tell(StepComplete, spec, key, duration=took, result=result, origin=origin)
        raise seen

    async def _keep(
        self,
        spec: Spec,
        key: str,
        record: bytes,
        losses: Sequence[codec.Loss],
        takes: Sequence[str],
    ) -> None:
        self.admit(spec, key, record, losses)
        if self.home is not None:
            warnings = [w for w in self.ledger.warnings if w["stepId"] == key] if losses else ()
            try:
                await self.home.record(spec.id, key, record, warnings, takes)
            except Exception as error:
                raise self.break_off(error) from error.__cause__
        if self.cache is not None and spec.key is not None:
            await self.cache.set(spec.key, codec.loads(record), ttl=spec.ttl)

    def admit(self, spec: Spec, key: str, record: bytes, losses: Sequence[codec.Loss]) -> None:
        """Put a record in the ledger, with a warning for each thing that was lost."""
        self.ledger.put(spec.path, spec.call, key, record)
        self.last_key = key
        for loss in losses:
            self.ledger.warn(key, loss)

    async def _attempts(self, spec: Spec, call: Call) -> Any:
        attempts = spec.retry.attempts if spec.retry is not None else 1
        while True:
            failure: Exception
            try:
                value = await self._once(spec, call)
                if type(value) is not Err or call.attempt >= attempts:
                    return value
                failure = StepFailed(spec.id, value.error, value.cause)
                if not self._retries(spec, failure):
                    return value
            except Exception as error:
                if self._broken is not None or not self._retries(spec, error):
                    raise
                if call.attempt >= attempts:
                    raise
                failure = error
            assert spec.retry is not None
            delay = delay_before(spec.retry, call.attempt, self.random)
            self.tell(
                StepRetry, spec, spec.call, attempt=call.attempt, attempts=attempts, delay=delay, error=failure
            )  # fmt: skip
            await self.clock.sleep(delay)
            call.retry(call.attempt + 1)

    def _retries(self, spec: Spec, failure: Exception) -> bool:
        if spec.retry is None:
            return False
        return spec.retry.retry_if is None or bool(spec.retry.retry_if(failure))

    async def _once(self, spec: Spec, call: Call) -> Any:
        if spec.timeout is None:
            return await invoke(spec.fn, spec.args)
        after = spec.timeout.after
        try:
            return await within(self.clock, after, invoke(spec.fn, spec.args))
        except _Elapsed:
            self.tell(StepTimedOut, spec, spec.call, after=after, attempt=call.attempt)
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
                answer = await self.home.wait(spec.branch, wait)
            else:
                answer = await self._wait_here(spec, wait)
        except Exception as error:
            raise self.break_off(error) from error.__cause__
        self.ledger.pending.pop(wait["id"], None)
        takes, value = ((answer[0],), answer[1]) if answer is not None else ((), None)
        return await self.succeed(spec, started, value, takes=takes)

    async def _wait_here(self, spec: Spec, wait: PendingWait) -> tuple[str, object] | None:
        if wait["kind"] == "event":
            raise MissingAbility(self, "inbox", f"step.wait_for_event({spec.id!r})")
        remaining = datetime.fromisoformat(wait["wakeAt"]) - self.clock.now()
        await self.clock.sleep(max(remaining, timedelta(0)))
        return None

    def announce(
        self, event: Callable[..., Event], started: float | None = None, **facts: Any
    ) -> None:
        """Publish news of the run, with how long it took since `started`."""
        if self._emit is not None:
            if started is not None:
                facts["duration"] = timedelta(seconds=self.clock.monotonic() - started)
            self._emit(
                event(workflow=self.workflow, run_id=self.run_id, at=self.clock.now(), **facts)
            )

    def forget_waits(self, path: str) -> None:
        """Drop the waits of branches below `path`: nobody is waiting there any more."""
        for id in [id for id in self.ledger.pending if id.startswith(f"{path}/")]:
            del self.ledger.pending[id]

    async def transact(self, spec: Spec) -> Any:
        """Run a step whose writes commit with its record."""
        found = self.recorded(spec)
        if found is not None:
            return self._replay(spec, *found)
        home = self.home
        if home is None:
            raise MissingAbility(self, "transaction", f"step.transaction({spec.id!r})")
        fn, args = spec.fn, spec.args
        key = self.ledger.key_for(spec.path, spec.call)
        started = self.clock.monotonic()
        kept: list[Any] = []

        async def work(connection: Any) -> tuple[str, bytes]:
            value = await fn(connection, *args)
            if isinstance(value, Err):
                raise StepFailed(spec.id, value.error, value.cause)
            value = value.value if isinstance(value, Ok) else value
            record, seen, losses = self.success(spec, key, started, value)
            kept[:] = [record, seen, losses]
            return key, record

        token = CURRENT.set(Call(spec.branch, spec.call))
        try:
            await home.transact(spec.id, work)
        except Exception as error:
            if self._broken is not None:
                raise
            failed = isinstance(error, StepFailed) and error.step == spec.id
            return await self._fail(spec, 1, started, outcome_of(error) if failed else error)
        finally:
            CURRENT.reset(token)
        record, seen, losses = kept
        self.admit(spec, key, record, losses)
        return seen

    def tell(self, event: Callable[..., Event], spec: Spec, key: str, **facts: Any) -> None:
        """Publish news of a step, if anybody listens."""
        if self._emit is not None:
            self._emit(
                event(
                    workflow=self.workflow,
                    run_id=self.run_id,
                    at=self.clock.now(),
                    step=spec.id,
                    key=key,
                    **facts,
                )
            )


def _chain(error: BaseException | None) -> set[int]:
    seen: set[int] = set()
    todo = [error]
    while todo:
        error = todo.pop()
        if error is not None and id(error) not in seen:
            seen.add(id(error))
            todo += [error.__cause__, error.__context__]
            if isinstance(error, BaseExceptionGroup):
                todo += error.exceptions
    return seen


def _place(spec: Spec) -> str:
    return f"step {spec.call!r}" + (f" of branch {spec.path!r}" if spec.path else "")


def _explain_thunks(id: str, fn: object) -> None:
    if inspect.isawaitable(fn):
        if inspect.iscoroutine(fn):
            fn.close()
        raise InvalidArgument(
            "fn",
            fn,
            "a function, not the coroutine of having called it",
            f"Write step({id!r}, function, argument) or step({id!r}, lambda: function(argument)): "
            "a step that is already recorded must not be called at all",
        )
    raise InvalidArgument("fn", fn, "a function and its arguments, or a lambda")


_IN_PLACE, _AWAITED, _THREADED = range(3)
_manners: dict[object, int] = {}


async def invoke(fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Call a step's function: async in place, a lambda in place, any other in a thread."""
    code = getattr(fn, "__code__", None)
    manner = _manners.get(code) if code is not None else None
    if manner is None:
        manner = _manner(fn)
        if code is not None:
            _manners[code] = manner
    if manner == _AWAITED:
        return await fn(*args)
    value = fn(*args) if manner == _IN_PLACE else await asyncio.to_thread(fn, *args)
    return await value if inspect.isawaitable(value) else value


def _manner(fn: Callable[..., Any]) -> int:
    while isinstance(fn, partial):
        fn = fn.func
    if inspect.isasyncgenfunction(fn):
        raise InvalidArgument("fn", fn, "a function that gives one value, not an async generator")
    if inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(getattr(fn, "__call__", None)):
        return _AWAITED
    return _IN_PLACE if getattr(fn, "__name__", "") == "<lambda>" else _THREADED


class _Elapsed(Exception):
    pass


async def within(clock: Clock, after: timedelta, work: Awaitable[Any]) -> Any:
    """Await `work`; when the clock passes `after` first, cancel it and raise."""
    task = asyncio.current_task()
    assert task is not None
    cancels = task.cancelling()
    elapsed = False

    async def watch() -> None:
        nonlocal elapsed
        await clock.sleep(after)
        elapsed = True
        task.cancel()

    timer = asyncio.Task(watch(), loop=task.get_loop())
    try:
        return await work
    except asyncio.CancelledError:
        if elapsed and task.uncancel() <= cancels:
            raise _Elapsed from None
        raise
    finally:
        timer.cancel()


def failure_record(
    failure: Exception | Err[Any], step: str, declared: Sequence[type[BaseException]]
) -> tuple[dict[str, Any], BaseException]:
    """Give the record of a failure, and the exception that the function sees of it."""
    if isinstance(failure, Err):
        error = codec.settle(failure.error, lambda: None, "error")
        cause = failure.error if failure.cause is None else failure.cause
        meta: dict[str, Any] = {"origin": "result"}
        if failure.cause is None:
            meta["causeless"] = True
        record = {"ok": False, "error": error.data, "cause": codec.encode_cause(cause), "meta": meta}
        return record, _step_failed(step, record, declared)
    told, seen = codec.settle_error(failure, declared)
    summary = {"type": type(failure).__name__, "message": told.get("message", "")}
    return {"ok": False, "error": summary, "cause": told, "meta": {"origin": "throw"}}, seen


def _step_failed(step: str, record: Any, declared: Sequence[type[BaseException]]) -> StepFailed:
    cause = None
    if not record.get("meta", {}).get("causeless"):
        cause = codec.decode_cause(record["cause"], declared)
    failed = StepFailed(step, codec.decode(record["error"]), cause)
    if isinstance(cause, BaseException):
        failed.__cause__ = cause
    return failed


def result_of(
    record: StepRecord,
    step: str,
    returns: Callable[[], object],
    declared: Sequence[type[BaseException]],
) -> tuple[Result[Any, Any], BaseException | None]:
    """Give what a record says: the result, and the exception that the function sees of a failure."""
    if record["ok"]:
        data = record.get("value")
        if record.get("typed"):
            return Ok(codec.decode(data, returns(), typed=True)), None
        if "at" not in record and (wanted := returns()) is not None:
            return Ok(codec.convert(data, wanted)), None
        return Ok(codec.decode(data)), None
    if record.get("meta", {}).get("origin") == "throw":
        seen = codec.decode_cause(record["cause"], declared)
        if isinstance(seen, BaseException):
            return outcome_of(seen), seen
    failed = _step_failed(step, record, declared)
    return outcome_of(failed), failed


def outcome_of(error: BaseException) -> Err[Any]:
    """Give an exception that ended a run or a step as `Err(error, cause)`."""
    if isinstance(error, StepFailed):
        return Err(error.error, error.cause)
    return Err(error, error.__cause__)
