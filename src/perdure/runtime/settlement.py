"""Settle a run after its function stopped: it has ended, it waits, or it starts over.

Each case is one fenced write, which replaces snapshot and journal and releases the lease. The end
of a run is reported to other runs before that write: until then the run has an owner, so if this
process dies, the next owner finds the outcome and repeats the rest.
"""

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from typing import Any, cast

import msgspec
from msgspec.structs import replace

from perdure import codec
from perdure.durable.host import REPLAY, RunHost
from perdure.durable.lifecycle import log_failure
from perdure.durable.outcome import describe_outcome, failed_block
from perdure.durable.rollback import Failures, end_or_undo, rolled_back
from perdure.errors import (
    Cancelled,
    ContinuedAsNew,
    LeaseLost,
    ManualValueError,
    PerdureError,
    RollbackFailed,
    RunFailed,
    StoreError,
    ValueTooLarge,
)
from perdure.result import Err, Ok, Result
from perdure.retention import Keep
from perdure.runtime.acts import copy_acts
from perdure.runtime.definition import Definition
from perdure.runtime.delivery import open_runs
from perdure.runtime.edits import RunEdit, at_rest, cancelled
from perdure.runtime.ends import report_end
from perdure.runtime.failure_log import log_failed_rollback, log_failed_run
from perdure.runtime.requests import WATCH, ReceivedRequest
from perdure.runtime.system_workflow import SystemWorkflow
from perdure.runtime.verbs import apply_all, cancel_children, children_of, refuse_all
from perdure.snapshot import ExecutionBlock, PendingWait, RunStatus, is_over, reply_to_of
from perdure.snapshot.record import encode_failure, outcome_of
from perdure.snapshot.tags import parent_tag
from perdure.store import Rest

logger = logging.getLogger(__name__)


class SettledRun(msgspec.Struct, frozen=True):
    """A settled run: its snapshot as JSON, its status, and how often its steps were retried.

    Retries are counted since the run was leased.
    """

    data: bytes
    status: RunStatus
    retries: int = 0


async def leave(
    host: RunHost,
    result: Result[Any, Any] | None,
    definition: Definition[Any, Any],
    requests: Sequence[ReceivedRequest],
    keep: Keep | None,
) -> SettledRun:
    """Write the outcome or the waits of a run, and release it.

    Without a result, the function was unwound: the run was suspended or interrupted.
    """
    reason, suspended_waits = host.execution.stopped_by, host.suspended_waits
    if isinstance(reason, ContinuedAsNew):
        return await _begin_again(host, reason.data, definition)
    if requests and (suspended_waits is not None or isinstance(reason, Cancelled)):
        return await apply_requests(_edit(host, suspended_waits), host, requests)
    if suspended_waits is not None:
        return await _settle(host, *at_rest(host, suspended_waits))
    if isinstance(reason, Cancelled):
        return await _end(host, *cancelled(host, reason.reason))
    if isinstance(reason, ManualValueError):
        return await _pause(host, str(reason))
    if isinstance(reason, StoreError | LeaseLost):
        raise reason
    if result is None:
        assert reason is not None, "a run without a result was stopped"
        result = outcome_of(reason)
    if isinstance(definition, SystemWorkflow) and isinstance(result, Ok):
        return await _sleep_until_next(host, definition, result.value)
    if requests:
        _refuse_late(host, requests)
    if host.history.rollback is not None:
        return await _end_rollback(host, result)
    return await _end_function(host, result, definition, keep)


async def _end_function(
    host: RunHost, result: Result[Any, Any], definition: Definition[Any, Any], keep: Keep | None
) -> SettledRun:
    """Store the result of a run's function."""
    outcome = describe_outcome(host, result, definition.fn, definition.types)
    rest = Rest(outcome.status)
    drops_records = keeps_only_result(rest.status, definition, keep)
    settled_run = await _end(host, outcome.block, rest, drops_records=drops_records)
    if isinstance(outcome.result, Err):
        log_failed_run(host, outcome.result)
    return settled_run


def keeps_only_result(
    status: str, definition: Definition[Any, Any] | None, keep: Keep | None
) -> bool:
    """Return whether the steps of a run that ended so are dropped; `keep` is the default."""
    keep = (None if definition is None else definition.keep) or keep
    return status == "completed" and keep is not None and keep.what == "result"


async def _begin_again(host: RunHost, data: object, definition: Definition[Any, Any]) -> SettledRun:
    """Replace the run with its next generation, due at once, in one fenced write."""
    history, children = host.history, host.history.open_children()
    host.history = next_history = history.next_generation(data)
    next_history.metadata.update(definition.identity)
    if children := [*history.metadata.get("children", ()), *children]:
        # Drop those that have ended: a loop that starts a run in each generation must not grow.
        store = host.session.store
        tag = parent_tag(host.id)
        next_history.metadata["children"] = await open_runs(store, tag, children)
    return await _settle(host, host.block(state="queued"), Rest("queued", host.clock.now()))


async def end_failed(host: RunHost, error: StoreError) -> SettledRun:
    """End a run that the store rejects as it is, if necessary without its records."""
    try:
        return await _write_failed(host, error)
    except ValueTooLarge:
        run_error: PerdureError = RunFailed(
            f"{error}. Its {len(host.history)} records together are more than the store takes "
            "and were dropped, so the run cannot be retried"
        )
        if keys := host.history.steps_to_undo():
            reasons = dict.fromkeys(keys, "its record was dropped")
            run_error = RollbackFailed(f"run {host.id!r}", str(run_error), reasons)
        host.history = host.history.without_records()
        return await _write_failed(host, run_error, truncated=True)


async def _write_failed(host: RunHost, error: PerdureError, **facts: Any) -> SettledRun:
    record = encode_failure(error, host.id).record
    settled_run = await _end(host, failed_block(host, record, **facts), Rest("failed"))
    log_failed_run(host, Err(error))
    return settled_run


def _end(
    host: RunHost, block: ExecutionBlock, rest: Rest, *, drops_records: bool = False
) -> Coroutine[Any, Any, SettledRun]:
    """Store that a run has ended, or that its steps have to be undone first."""
    block, rest = end_or_undo(host, block, rest)
    if host.history.rollback is not None:
        cancel_children(host.history, host.clock.now())
    return _settle(host, block, rest, drops_records=drops_records)


async def _end_rollback(host: RunHost, result: Result[Any, Any]) -> SettledRun:
    """Store the end of a run whose steps were undone."""
    failures: Failures = result.value if isinstance(result, Ok) else {}
    if isinstance(result, Err):
        failures = dict.fromkeys(host.history.steps_to_undo(), cast(Exception, result.error))
    settled_run = await _settle(host, *rolled_back(host, failures))
    if failures:
        log_failed_rollback(host, failures)
    return settled_run


async def _settle(
    host: RunHost,
    block: ExecutionBlock,
    rest: Rest,
    consumes: Sequence[str] = (),
    *,
    drops_records: bool = False,
) -> SettledRun:
    """Store the state of a run. If it has ended, report that to other runs before releasing it."""
    if is_over(rest.status):
        if _has_news(host):
            await _tell_others(host, block)
        # A request for the outcome that arrives only now makes the run due.
        rest = replace(rest, wake_at=None, awaits=(WATCH,))
    history = host.history
    if drops_records:
        # This costs nothing, because the rest replaces everything that was stored.
        host.history = history.without_records()
    try:
        data = await host.settle(block, rest, (*consumes, *host.leftovers))
    except StoreError:
        # If it is the output that the store rejects, the run is stored as failed, and a retry needs
        # the records.
        host.history = history
        raise
    return SettledRun(data, rest.status, host.retries)


def _has_news(host: RunHost) -> bool:
    """Cancel the children of a run that ends; return whether other runs must be told of its end."""
    history = host.history
    # In a rollback, they were cancelled when it began. Few runs have any, and need the time.
    if history.rollback is None and children_of(history):
        cancel_children(history, host.clock.now())
    return bool(history.outbox) or reply_to_of(history.metadata) is not None


async def _tell_others(host: RunHost, block: ExecutionBlock) -> None:
    """Make the end durable, cancel children and answer the waiting run."""
    if host.outbox is None:
        return
    history = host.history
    snapshot: Any = {"metadata": history.metadata, "execution": block, "workflowName": history.name}
    try:
        # The outcome is durable before it is reported: if this process dies in between, the next
        # owner reports the same one.
        await host.append_outcome(block)
        await host.outbox.drain()
        await report_end(host.session, host.id, codec.loads(codec.dumps(snapshot)))
    except asyncio.CancelledError as error:
        await log_failure(host.release())
        raise asyncio.CancelledError(*error.args) from None


async def apply_requests(
    edit: RunEdit, host: RunHost, requests: Sequence[ReceivedRequest]
) -> SettledRun:
    """Apply the requests of operators in one write."""
    apply_all(edit, [each.request for each in requests])
    consumes = [each.message_id for each in requests]
    settled_run = await _settle(host, *edit.rest(host), consumes)
    await copy_acts(host.session.store, host.id, edit.acts)
    return settled_run


def _edit(host: RunHost, waits: Sequence[PendingWait] | None) -> RunEdit:
    """Return the edit of a run whose function was unwound for a request."""
    # A branch that was halted still has a step to run, so the run must continue.
    is_halted = waits is None or any(wait["id"].startswith(REPLAY) for wait in waits)
    return _edit_of(host, "queued" if is_halted else "suspended")


def _edit_of(host: RunHost, status: RunStatus) -> RunEdit:
    return RunEdit(host.id, host.history, host.running_block(), status, host.clock.now())


def _refuse_late(host: RunHost, requests: Sequence[ReceivedRequest]) -> None:
    """Record that requests came too late: the function has ended."""
    refuse_all(_edit_of(host, "queued"), [each.request for each in requests])


async def _pause(host: RunHost, reason: str) -> SettledRun:
    """Pause a run that cannot continue until an operator changes it."""
    logger.error("run %r is paused: %s", host.id, reason)
    edit = _edit_of(host, "queued")
    edit.make("paused", reason=reason)
    return await _settle(host, *edit.rest(host))


async def _sleep_until_next(host: RunHost, definition: SystemWorkflow, outcome: Any) -> SettledRun:
    """Replace a run of the engine with its next generation, which begins at its next time."""
    settled_run = await _settle(host, *definition.rest(host, outcome))
    # It is queued, but must not be continued here and now.
    return replace(settled_run, status="suspended")
