"""The attempts of one call: how often a step is tried, and what happens in between.

A short delay between two attempts is spent in memory. A long one is a durable wait: the run may be
suspended in the meantime, and neither a crash nor a deployment resets the count. The wait contains
the number of the failed attempt and its error, so that the run shows why it waits.
"""

from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

from perdure.clock import isoformat
from perdure.codec.exceptions import safe_text
from perdure.codec.scope import class_name
from perdure.engine.active_run import ActiveRun
from perdure.engine.call import StepCall
from perdure.engine.host import NO_STORE
from perdure.engine.invoke import Elapsed, invoke, with_timeout
from perdure.errors import MissingAbility, StepFailed, StepTimeout
from perdure.events import StepRetry, StepStart, StepTimedOut
from perdure.result import Err
from perdure.retry import Retry, delay_before
from perdure.snapshot import PendingWait

LONG_DELAY = timedelta(seconds=1)
"""Delays longer than this are durable waits, unless the host says otherwise."""

_MAX_ERROR = 1000


async def attempts(run: ActiveRun, call: StepCall, once: Callable[[], Awaitable[Any]]) -> Any:
    """Return the value of the first successful attempt, or the failure of the last one."""
    retry = call.retries
    if (wait := run.history.waits.get(call.wait_id())) is not None and wait["kind"] == "retry":
        # Attempts of an earlier activation count too, and the delay began in that activation.
        call.attempt = wait.get("attempt", 1)
        await run.perform_wait(wait)
        call.attempt += 1
    while True:
        try:
            value = await once()
            if type(value) is not Err:
                return value
            failure: Exception = StepFailed(call.id, value.error, value.cause)
            if retry is None or not _tries_again(run, retry, call, failure):
                return value
        except Exception as error:
            if retry is None or not _tries_again(run, retry, call, error):
                raise
            failure = error
        try:
            await _pause(run, call, retry, failure)
        finally:
            # Its traceback refers to this frame: otherwise a suspended run would stay in memory
            # until the next garbage collection.
            del failure
        call.attempt += 1
        run.retries += 1


def _tries_again(run: ActiveRun, retry: Retry, call: StepCall, failure: Exception) -> bool:
    if not run.live or call.attempt >= retry.attempts:
        return False
    return retry.retry_if is None or bool(retry.retry_if(failure))


async def _pause(run: ActiveRun, call: StepCall, retry: Retry, failure: Exception) -> None:
    delay = delay_before(retry, call.attempt, run.random)
    facts = {"attempt": call.attempt, "attempts": retry.attempts, "delay": delay}
    run.tell(StepRetry, call, call.record_key, error=failure, **facts)
    if run.around is not None:
        run.around.retry(call, failure, delay)
    if delay <= (LONG_DELAY if run.host is None else run.host.suspend_after):
        await run.clock.sleep(delay)
        return
    # Stored with its attempt, so that another process continues the count instead of starting it
    # over.
    wait: PendingWait = {
        "id": call.wait_id(),
        "kind": "retry",
        "wakeAt": isoformat(run.clock.now() + delay),
        "attempt": call.attempt,
        "error": _describe(failure),
    }
    await run.perform_wait(run.open_wait(call, wait))


def _describe(failure: Exception) -> str:
    """Describe a failure by its class and message, for people who look at the run."""
    text = f"{class_name(type(failure))}: {safe_text(failure)}".removesuffix(": ")
    return text if len(text) <= _MAX_ERROR else text[: _MAX_ERROR - 1] + "…"


async def attempt_once(run: ActiveRun, call: StepCall) -> Any:
    """Call the function of a step as soon as its limit permits an attempt."""
    if call.limit is None:
        return await _invoke(run, call)
    if run.host is None:
        raise run.stop(MissingAbility(NO_STORE, "queues", f"the limit of step {call.id!r}"))
    try:
        end = await run.host.permit(call.limit)
    except Exception as error:  # noqa: BLE001  # no permit can be had
        # The step itself has not failed: it did not begin.
        raise run.stop(error) from error.__cause__
    try:
        if not call.is_permitted:
            call.is_permitted = True
            call.started_at = run.clock.monotonic()
            run.tell(StepStart, call, call.record_key)
        return await _invoke(run, call)
    finally:
        # A permit that is not returned blocks others until it expires.
        end()


async def _invoke(run: ActiveRun, call: StepCall) -> Any:
    """Call the function of a step, within the timeout of one attempt."""
    if call.timeout is None:
        return await invoke(call.fn, call.args)
    timeout = call.timeout.after
    try:
        return await with_timeout(run.clock, timeout, invoke(call.fn, call.args))
    except Elapsed:
        run.tell(StepTimedOut, call, call.record_key, after=timeout, attempt=call.attempt)
        return call.timeout.outcome(StepTimeout(call.id, timeout.total_seconds()))
