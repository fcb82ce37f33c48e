"""Many runs of one workflow, started in chunks, with one message when the last has ended.

The runs report their ends to a log: a run that no process ever leases. The run whose report
completes the log sends a message to the parent, so that the parent wakes once for any number of
children. It reads the log, records the results in chunks, and deletes the log.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

from perdure import codec
from perdure.clock import isoformat
from perdure.engine.branches import Branch
from perdure.engine.call import StepCall, step_call
from perdure.engine.children import (
    RunRef,
    await_run,
    children_of,
    run_failed,
)
from perdure.engine.execution import Execution
from perdure.engine.host import Host
from perdure.engine.target import ChildOptions, Target
from perdure.engine.unawaited import call_named
from perdure.errors import DriftError, LeaseLost, RunFailed, StepTimeout
from perdure.result import Err, Ok
from perdure.snapshot import PendingWait
from perdure.snapshot.record import result_of

CHUNK = 1000
MAX_CHUNK_BYTES = 4 * 1024 * 1024
"""The maximum number of children, and of bytes of their payloads, that one entry starts."""

FULL = "~full:"
"""The prefix of the name of the message that reports that the last child has ended."""

OnError: TypeAlias = Literal["raise", "collect"]


class RunMap:
    """One call of `step.map_runs`: its children are numbered in the order of the items.

    `base` is the prefix of the ids of the children. Records are in a separate branch.
    """

    def __init__(
        self,
        run: Execution,
        call: StepCall,
        host: Host,
        target: Target[Any, Any],
        items: Sequence[Any],
        options: ChildOptions,
    ) -> None:
        self._run = run
        self._call = call
        self._host = host
        self._target = target
        self._items = items
        self._options = options
        self._children = children_of(run, "step.map_runs")
        self._branch: Branch = call.branch.child(call.call)
        self._base = ""
        self._event = ""
        self._is_seen = False
        # Children that failed or were cancelled before this time were continued.
        self._retried_at: str = run.history.metadata.get("retriedAt", "")
        # When the first runs were started, or continued; perhaps in an earlier activation.
        self._started_at: str | None = self._retried_at or None

    async def conclude(self, failure: RunFailed | None) -> None:
        """Record that the function sees the results, or a failure, which is then raised.

        A retry drops the failure only if it ended the run; a failure that the function handled
        stays.
        """
        if self._is_seen or not self._items:
            return
        async with self._run.in_flight(self._call):
            self._call.consumes = ()
            self._run.count_from(self._call, self._started_at)
            if failure is None:
                await self._run.succeed(self._call, self._retried_at)
            else:
                await self._run.fail(self._call, failure)

    async def results(self) -> list[Ok[Any] | Err[Any]]:
        """Start the runs, wait for all of them, and return how each ended, in order."""
        if not self._items:
            return []
        if (recorded_call := self._run.find_record(self._call)) is not None:
            # This raises the recorded failure again; otherwise the function has seen these results.
            self._retried_at = await self._run.answer(self._call, *recorded_call)
            self._is_seen = True
        await self._start_all()
        calls = self._result_calls()
        if self._run.find_record(calls[0]) is None:
            await self._wait()
        outcomes = await self._collect(calls)
        return [await self._result(*each) for each in enumerate(outcomes)]

    def _inner(self, id: str) -> StepCall:
        call = step_call(id, self._branch, None, _chunk)
        call.kind = "map"
        return call

    async def _start_all(self) -> None:
        """Start the runs, one chunk per record."""
        first = 0
        while first < len(self._items):
            call = self._inner(f"start[{first}]")
            call.kind = "start"
            recorded_call = self._run.find_record(call)
            if recorded_call is None:
                self._started_at = self._started_at or isoformat(self._run.clock.now())
                facts = await self._start_chunk(call, first)
            else:
                self._started_at = self._started_at or recorded_call[1].get("at")
                facts = await self._run.answer(call, *recorded_call)
            self._check_same(call, facts)
            self._base, self._event = facts["base"], facts["event"]
            first += facts["count"]

    def _check_same(self, call: StepCall, facts: Any) -> None:
        if facts["of"] != len(self._items):
            text = (
                f"{self._call.place()} started {facts['of']} runs, and the function now passes "
                f"{len(self._items)} items; make them depend only on earlier steps"
            )
            requested = str(len(self._items))
            drift = DriftError(call.call, text, recorded=str(facts["of"]), asked=requested)
            raise self._run.stop(drift)

    async def _start_chunk(self, call: StepCall, first: int) -> Any:
        run, name = self._run, self._call.wait_id()
        async with run.in_flight(call):
            if not self._base:
                self._base = self._children.base_id(name)
                self._event = f"{FULL}{name}:{run.random.getrandbits(48):012x}"
            full = {"run": run.run_id, "event": self._event, "count": len(self._items)}
            payloads = self._next_payloads(first)
            call.run = self._base
            facts = {
                "base": self._base,
                "event": self._event,
                "first": first,
                "count": len(payloads),
                "of": len(self._items),
                "cancels": self._options.on_parent_end == "cancel",
            }
            item = self._children.new_runs(
                self._target, payloads, self._base, first, name, self._options, full
            )
            # Before the record is written, so that the same write contains the item.
            run.history.outbox.put(f"start:{call.wait_id()}", item)
            value = await run.succeed(call, facts)
            run.history.children.add(facts, call.path)
            return value

    def _next_payloads(self, first: int) -> list[Any]:
        """Return the payloads of the next chunk, checked and as JSON."""
        payloads: list[Any] = []
        size = 0
        for item in self._items[first : first + CHUNK]:
            payload = self._children.encode(self._target, item)
            size += len(codec.dumps(payload))
            if payloads and size > MAX_CHUNK_BYTES:
                break
            payloads.append(payload)
        return payloads

    def _result_calls(self) -> list[StepCall]:
        return [self._inner(f"results[{n}]") for n in range(-(-len(self._items) // CHUNK))]

    async def _wait(self) -> None:
        """Wait for the message that reports a complete log; the first record consumes it."""
        try:
            async with self._run.in_flight(self._call):
                self._run.count_from(self._call, self._started_at)
                if not await self._is_complete():
                    await self._receive()
        except asyncio.CancelledError:
            if self._run.live:
                self._cancel()
            raise

    async def _receive(self) -> None:
        run, call = self._run, self._call
        now = isoformat(run.clock.now())
        wait: PendingWait = {
            "id": call.wait_id(),
            "kind": "event",
            "event": self._event,
            "since": now,
        }
        answer = await run.perform_wait(run.history.open_wait(wait))
        if answer is None:
            # The wait has no timeout, so an operator has ended it.
            self._cancel()
            seconds = run.clock.monotonic() - call.started_at
            await run.fail(call, StepTimeout(call.id, seconds))
        else:
            call.consumes = (answer.message_id,)

    def _cancel(self) -> None:
        history, at = self._run.history, isoformat(self._run.clock.now())
        history.cancel_runs(self._call.wait_id(), history.children.forget(self._base), at)

    async def _is_complete(self) -> bool:
        """Return whether all runs had ended when this run was retried.

        The message that reports it may have come while this run was over and received no messages.
        """
        if "retriedAt" not in self._run.history.metadata:
            return False
        return len(await self._read_outcomes()) >= len(self._items)

    async def _read_outcomes(self) -> dict[str, Any]:
        """Return the reported outcomes, by the numbers of the runs."""
        try:
            return dict(await self._host.read_log(f"~log:{self._base}"))
        except Exception as error:  # noqa: BLE001  # the log cannot be read
            raise self._run.stop(error) from error.__cause__

    async def _collect(self, calls: Sequence[StepCall]) -> list[Any]:
        """Return the outcomes in the order of the items, recorded in chunks."""
        run, outcomes = self._run, list[Any]()
        outcome_by_number: dict[str, Any] | None = None
        for number, call in enumerate(calls):
            recorded_call = run.find_record(call)
            if recorded_call is not None:
                outcomes += await run.answer(call, *recorded_call)
                continue
            if outcome_by_number is None:
                outcome_by_number = await self._read_outcomes()
            last = min((number + 1) * CHUNK, len(self._items))
            chunk = [
                self._outcome(outcome_by_number, index) for index in range(number * CHUNK, last)
            ]
            # The first record shows that the log was complete, so the message is no longer needed.
            call.consumes = self._call.consumes if number == 0 else ()
            outcomes += await self._record(call, chunk, is_last=call is calls[-1])
        return outcomes

    def _outcome(self, outcome_by_number: Mapping[str, Any], index: int) -> Any:
        """Return the outcome that a child reported."""
        payload = outcome_by_number.get(str(index))
        if payload is None:
            # The log was complete, so another owner of this run has recorded and deleted it.
            raise self._run.stop(LeaseLost(self._run.run_id))
        outcome = codec.loads(payload["outcome"].encode())
        del outcome["workflow"]
        return outcome

    async def _record(self, call: StepCall, chunk: list[Any], *, is_last: bool) -> Any:
        run = self._run
        async with run.in_flight(call):
            if is_last:
                # With the last record, not earlier: if this process dies first, the next owner
                # reads the log again.
                call.run = self._base
                run.history.outbox.put(f"delete:{call.wait_id()}", {"delete": f"~log:{self._base}"})
            value = await run.succeed(call, chunk)
            if is_last:
                run.history.children.forget(self._base)
            return value

    async def _result(self, index: int, outcome: Any) -> Ok[Any] | Err[Any]:
        run_id, run = f"{self._base}/{index}", self._run
        if not outcome["ok"] and outcome["at"] <= self._retried_at:
            # The parent was retried after this child had failed, so the child has been continued.
            call = self._inner(f"again[{index}]@{self._retried_at}")
            call.kind, call.fn = "result", self._target.fn
            try:
                ref: RunRef[Any] = RunRef(run_id, self._target.name)
                return Ok(await await_run(run, call, self._host, ref, None))
            except RunFailed as run_error:
                return Err(run_error)
        scope = run.errors.inside((), self._target.fn)
        call = self._call
        result, error = result_of(
            outcome, run_id, call.return_type, scope, call.error_type, self._target.types
        )
        if isinstance(result, Ok):
            return result
        assert error is not None, "a failure has an exception"
        return Err(run_failed(run_id, self._target.name, error))


@call_named("step.map_runs")
async def map_runs(
    run_map: RunMap, call: StepCall, on_error: OnError, tolerate: int | None
) -> list[Any]:
    """Return the outputs or results; raise if more runs failed than are tolerated."""
    results = await run_map.results()
    failures = [result.error for result in results if isinstance(result, Err)]
    await run_map.conclude(_failure(call, len(results), failures, on_error, tolerate))
    if on_error == "collect":
        return results
    return [result.value for result in results if isinstance(result, Ok)]


def _failure(
    call: StepCall,
    runs: int,
    failures: Sequence[RunFailed],
    on_error: OnError,
    tolerate: int | None,
) -> RunFailed | None:
    if on_error == "raise" and failures:
        return failures[0]
    if tolerate is None or len(failures) <= tolerate:
        return None
    text = (
        f"{len(failures)} of {runs} runs of {call.place()} failed, and {tolerate} are tolerated; "
        f"the first: {failures[0]}"
    )
    failure = RunFailed(text, None, failures[0].run_id)
    failure.__cause__ = failures[0]
    return failure


def _chunk() -> Any:
    """A placeholder for the function of calls whose values are the engine's own."""
