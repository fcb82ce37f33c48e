"""Start and read runs from any program, without executing workflow functions.

async with Client("postgresql://db/app") as client:
    run = await client.trigger("welcome", {"email": "a@b.c"}, run_id="welcome-1")
    print(await client.result(run, timeout="10s"))
"""

from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar, overload

import msgspec

from perdure import codec
from perdure.clock import Duration, parse_duration
from perdure.durable.run import already_running
from perdure.durable.session import Session, poke, wake_workers
from perdure.engine.middleware import send_signals
from perdure.errors import InvalidArgument, RunFailed, RunNotFound, RunOver
from perdure.runtime import transitions
from perdure.runtime.approvals import ApprovalClient
from perdure.runtime.asking import wait_for_answer
from perdure.runtime.definition import Definition
from perdure.runtime.ends import report_end, watchers_in
from perdure.runtime.options import Plan, Start
from perdure.runtime.pruning import remove_logs_of
from perdure.runtime.requests import OPERATOR, Request, encode_request
from perdure.runtime.run import Run, T_co
from perdure.runtime.starter import BATCH, ChangedRun, check_list, encode_payload
from perdure.snapshot import Snapshot, is_over, new_uuid, rest_status
from perdure.snapshot.rollback import rollback_of
from perdure.store import (
    Delivery,
    Grant,
    NewMessage,
    Receipt,
    Refusal,
    can_search,
    require_inbox,
    require_search,
)
from perdure.validation import check_event, check_flag, check_id, check_user_id

P = TypeVar("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Signal:
    """An event for a run; it is a duplicate if its `dedup_id` was already used for this run."""

    run_id: str
    event: str
    payload: object = None
    dedup_id: str | None = None


@dataclass(frozen=True, slots=True)
class SignalResult:
    """The outcome of a signal, and the run afterwards.

    `run` is `None` if the run does not exist, or if the call did not wait for it to continue.
    """

    delivery: Delivery
    run: Run | None = None

    def __bool__(self) -> bool:
        return self.delivery in (Delivery.DELIVERED, Delivery.DUPLICATE)


class Client(ApprovalClient):
    """Starts, signals, cancels, retries and reads the runs of a store.

    Workers execute the workflow functions. A workflow is passed by name or as its definition, which
    checks the payload and determines the type of the output. A store opened from a URL is closed by
    `close` or `async with`; a store that is passed in stays open.
    """

    async def signal(
        self, run_id: str, event: str, payload: object = None, *, dedup_id: str | None = None
    ) -> SignalResult:
        """Send an event to a run; a worker continues the run.

        The event is neither lost nor duplicated, whether or not the run waits for it yet. If the
        run does not exist or is over, only `delivery` says so.
        """
        [result] = await self.signal_many([Signal(run_id, event, payload, dedup_id)])
        return result

    async def signal_many(self, signals: Iterable[Signal]) -> list[SignalResult]:
        """Send many events, up to 500 per write; return the outcome of each, in order."""
        return await self._send(signals)

    async def broadcast(
        self,
        event: str,
        payload: object = None,
        *,
        workflow: str | None = None,
        tags: Mapping[str, str] | None = None,
        dedup_id: str | None = None,
    ) -> int:
        """Send an event to the open runs of a workflow, or with tags; return how many got it.

        A run that begins in the meantime may or may not receive it. A call that is repeated with
        the same `dedup_id` after a crash reaches the runs that the first call did not reach.
        """
        if workflow is None and not tags:
            raise InvalidArgument("tags", tags, "tags, or workflow=", "It would reach every run")
        if dedup_id is None:
            dedup_id = new_uuid(self.random)
        message = _message(Signal("all", event, payload, dedup_id))
        run_ids = await self._open_runs(workflow, tags)
        signals = [Signal(run_id, event, payload, dedup_id) for run_id in run_ids]
        messages = [msgspec.structs.replace(message, to=id) for id in run_ids]
        results: list[SignalResult] = await send_signals(
            self.around, signals, lambda: self._deliver(messages)
        )
        return sum(map(bool, results))

    async def _send(
        self, signals: Iterable[Signal], *, for_workers: bool = True
    ) -> list[SignalResult]:
        """Send events to runs that workers continue, or that the caller continues."""
        expected = "a list of Signal(run_id, event, payload)"
        signals = check_list(signals, "signals", expected)
        messages = [_message(each) for each in signals]
        results: list[SignalResult] = await send_signals(
            self.around, signals, lambda: self._deliver(messages, for_workers=for_workers)
        )
        return results

    async def _deliver(
        self, messages: Sequence[NewMessage], *, for_workers: bool = True
    ) -> list[SignalResult]:
        require_inbox(self.store, f"{type(self).__name__}.signal")
        receipts: list[Receipt] = []
        async with self.session() as session:
            if len(messages) == 1:
                signals = session.signals if for_workers else session.deposits
                receipts.append(await signals.send(messages[0]))
            else:
                for first in range(0, len(messages), BATCH):
                    receipts += await session.send(messages[first : first + BATCH])
        return [SignalResult(receipt.delivery) for receipt in receipts]

    @overload
    async def signal_or_start(
        self,
        workflow: Definition[P, Any],
        run_id: str,
        event: str,
        payload: object = None,
        *,
        start: P,
        dedup_id: str | None = None,
    ) -> SignalResult: ...
    @overload
    async def signal_or_start(
        self,
        workflow: Definition[None, Any] | str,
        run_id: str,
        event: str,
        payload: object = None,
        *,
        start: Any = None,
        dedup_id: str | None = None,
    ) -> SignalResult: ...
    async def signal_or_start(
        self,
        workflow: Definition[Any, Any] | str,
        run_id: str,
        event: str,
        payload: object = None,
        *,
        start: Any = None,
        dedup_id: str | None = None,
    ) -> SignalResult:
        """Send an event to a run, creating it if it is missing and restarting it if it is over.

        `start` is the payload with which it starts; many concurrent calls start only one run. The
        result's `run` is set if this call started it. If the run with this id belongs to another
        workflow, `RunConflict` is raised.
        """
        plan = Plan(if_exists="restart_if_over", any_payload=True)
        new = self._start(workflow, start, run_id, plan)
        # Checked before a run is created.
        message = _message(Signal(run_id, event, payload, dedup_id))
        run: Run | None = None
        while True:
            if not await self._is_open(new):
                [run] = await self._create([new])
            (result,) = await self._deliver([message])
            if result:
                return replace(result, run=run)

    async def _is_open(self, start: Start) -> bool:
        """Return whether there is an open run; raise if it belongs to another workflow."""
        if can_search(self.store):
            (summary,) = await self.store.summaries([start.run_id])
            if summary is None or summary.workflow == start.workflow:
                return summary is not None and not is_over(summary.status)
        snapshot = await self.store.load(start.run_id)
        if snapshot is not None:
            start.check_workflow(snapshot)
        return snapshot is not None and not is_over(rest_status(snapshot))

    async def ask(
        self, run_id: str, event: str, payload: object = None, *, timeout: Duration | None = None
    ) -> Any:
        """Send an event to a run, and return the run's answer.

        The run waits for it with `returns=Question[…]` and answers with `step.reply`. After the
        timeout, `TimeoutError` is raised; the run may still answer.
        """
        limit = None if timeout is None else parse_duration(timeout, "timeout")
        store = require_search(self.store, f"{type(self).__name__}.ask")
        question = new_uuid(self.random)
        message = {"id": question, "payload": encode_payload(payload)}
        (result,) = await self._send([Signal(run_id, event, message, question)])
        if result.delivery is Delivery.UNKNOWN:
            raise RunNotFound(run_id)
        if result.delivery is Delivery.OVER:
            raise RunOver(f"run {run_id!r} has ended: it answers no questions")
        return await wait_for_answer(store, self.clock, question, limit)

    async def cancel(self, run_id: str, *, reason: str = "", undo: bool = True) -> Run:
        """Cancel a run. If another process owns the run, that process is asked to stop it.

        Steps that can be undone are undone first, by a worker, unless `undo=False`, which also ends
        a run that is being rolled back.
        """
        run = await self._cancel(run_id, reason, undo)
        if not run.over:
            wake_workers(self.store)
        return run

    async def _cancel(self, run_id: str, reason: str, undo: bool) -> Run:
        if not isinstance(reason, str):
            raise InvalidArgument("reason", reason, "a string")
        request = Request("", "cancel", why=reason, undo=check_flag(undo, "undo"))
        snapshot = await self._load(run_id)
        if _is_ending(snapshot, undo):
            return self._run(run_id, snapshot)
        if (run := await self._cancel_at_rest(run_id, request)) is not None:
            return run
        inbox = require_inbox(self.store, "cancelling a run that is owned elsewhere")
        await inbox.send([NewMessage(run_id, OPERATOR, encode_request(request))])
        poke(self.store, [run_id])
        # The owner may have suspended the run just before the message arrived.
        return await self._cancel_at_rest(run_id, request) or await self._require(run_id)

    async def _cancel_at_rest(self, run_id: str, request: Request) -> Run | None:
        async with self.session() as session:
            grant = await session.acquire(self._lease_request(run_id))
            if isinstance(grant, Refusal):
                return None
            if is_over(rest_status(grant.snapshot)):
                data = await transitions.give_up(session, grant)
            elif _is_ending(grant.snapshot, request.undo):
                data = await transitions.make_due(session, grant)
            else:
                data = await transitions.cancel(session, grant, request)
            return None if data is None else self._run(run_id, codec.loads(data))

    async def retry(self, run_id: str) -> Run:
        """Let a worker continue a failed run: the steps that ended it run again.

        Finished steps do not run again. A run that has not failed is returned as it is.
        """
        run, is_due = await self._retry(run_id)
        if is_due:
            wake_workers(self.store)
        return run

    async def _retry(self, run_id: str) -> ChangedRun:
        snapshot = await self._load(run_id)
        if rest_status(snapshot) != "failed":
            return ChangedRun(self._run(run_id, snapshot), False)
        if snapshot["execution"].get("truncated"):
            raise RunFailed(
                f"run {run_id!r} cannot be retried: its records were too large for the store and "
                "were dropped; trigger it again under another id"
            )
        async with self.session() as session:
            grant = await session.acquire(self._lease_request(run_id))
            if isinstance(grant, Refusal):
                run = await self._require(run_id)
                if run.status == "failed":
                    raise already_running(grant)
                return ChangedRun(run, False)
            return await self._make_due(session, grant, retries=True)

    async def resume(self, run_id: str) -> Run:
        """Let a worker continue a run at once, even if it is paused.

        A run that is over, or owned by another process, is returned as it is.
        """
        snapshot = await self._load(run_id)
        if is_over(rest_status(snapshot)):
            return self._run(run_id, snapshot)
        async with self.session() as session:
            grant = await session.acquire(self._lease_request(run_id))
            if isinstance(grant, Refusal):
                return await self._require(run_id)
            run, is_due = await self._make_due(session, grant, retries=False)
        if is_due:
            wake_workers(self.store)
        return run

    async def _make_due(self, session: Session, grant: Grant, *, retries: bool) -> ChangedRun:
        run_id, status = grant.lease.id, rest_status(grant.snapshot)
        transition = transitions.make_due
        if is_over(status):
            # The run may have ended between the caller's read and the lease.
            is_retried = retries and status == "failed"
            transition = transitions.retry if is_retried else transitions.give_up
        data = await transition(session, grant)
        if data is None:
            return ChangedRun(await self._require(run_id), False)
        is_due = transition is not transitions.give_up
        return ChangedRun(self._run(run_id, codec.loads(data)), is_due)

    async def delete(self, run_id: str) -> bool:
        """Delete a run and everything that belongs to it; return whether it existed."""
        snapshot = await self.store.load(check_id(run_id, "run_id"))
        async with self.session() as session:
            watchers = [] if snapshot is None else watchers_in(await session.read_inbox(run_id))
            await remove_logs_of(self.store, run_id)
            await self.store.delete(run_id)
            if snapshot is not None:
                await report_end(session, run_id, snapshot, watchers)
        return snapshot is not None

    @overload
    async def result(
        self, run: "Run[T] | RunHandle[T]", *, timeout: Duration | None = None
    ) -> T: ...
    @overload
    async def result(self, run: str, *, timeout: Duration | None = None) -> Any: ...
    async def result(self, run: "Run | RunHandle | str", *, timeout: Duration | None = None) -> Any:
        """Wait until a run is completed, in any process, and return its output.

        ```python
        receipt = await runtime.result("order-1", timeout="30s")
        ```

        If the run failed, the exception that ended it is raised, or `RunFailed` with the `error` if
        its function returned an `Err`; if it was cancelled, `Cancelled`. `TimeoutError` means that
        the run is not over after `timeout`; the run itself is not affected.
        """
        return await self._outcome(_id_of(run), timeout)

    @overload
    def watch(self, run: "Run[T] | RunHandle[T]") -> AsyncGenerator[Run[T], None]: ...
    @overload
    def watch(self, run: str) -> AsyncGenerator[Run, None]: ...
    def watch(self, run: "Run | RunHandle | str") -> AsyncGenerator[Run, None]:
        """Yield the run now and after each change, until it is over.

        A change concerns the status, the steps or the reported progress. Changes in quick
        succession are merged.
        """
        return self._changes(_id_of(run))

    @overload
    def handle(self, run_id: str, workflow: Definition[P, T]) -> "RunHandle[T]": ...
    @overload
    def handle(self, run_id: str) -> "RunHandle": ...
    def handle(self, run_id: str, workflow: Definition[Any, Any] | None = None) -> "RunHandle":
        """Return a handle of a run, with the types of `workflow`, without reading the run."""
        if workflow is not None:
            self.registry.add(workflow)
        return RunHandle(self, check_user_id(run_id, "run_id"))


@dataclass(frozen=True, slots=True)
class RunHandle(Generic[T_co]):
    """A run by its id, and the client that reads it."""

    client: Client
    id: str

    async def get(self) -> Run[T_co] | None:
        """Return the run with its history, or `None` if there is no such run."""
        return await self.client.get_run(self.id)

    async def result(self, *, timeout: Duration | None = None) -> T_co:
        """Wait until the run is completed, and return its output or raise its error."""
        return await self.client.result(self, timeout=timeout)

    def watch(self) -> AsyncGenerator[Run[T_co], None]:
        """Yield the run as it is now and after each change, until it is over."""
        return self.client.watch(self)

    async def signal(
        self, event: str, payload: object = None, *, dedup_id: str | None = None
    ) -> SignalResult:
        """Send an event to the run."""
        return await self.client.signal(self.id, event, payload, dedup_id=dedup_id)

    async def cancel(self, *, reason: str = "", undo: bool = True) -> Run[T_co]:
        """Cancel the run; its steps are undone first, unless `undo=False`."""
        return await self.client.cancel(self.id, reason=reason, undo=undo)

    async def retry(self) -> Run[T_co]:
        """Continue the run if it failed: the steps that ended it run again."""
        return await self.client.retry(self.id)


def _is_ending(snapshot: Snapshot, undo: bool) -> bool:
    """Return whether a run is over, or will be once its steps are undone."""
    is_undoing = undo and rollback_of(snapshot) is not None
    return is_undoing or is_over(rest_status(snapshot))


def _id_of(run: Run | RunHandle | str) -> str:
    return check_id(run if isinstance(run, str) else getattr(run, "id", run), "run")


def _message(signal: Signal) -> NewMessage:
    if not isinstance(signal, Signal):
        raise InvalidArgument("signals", signal, "Signal(run_id, event, payload) objects")
    event = check_event(signal.event, "event")
    if signal.dedup_id is not None:
        check_user_id(signal.dedup_id, "dedup_id")
    data = codec.dumps(encode_payload(signal.payload))
    return NewMessage(check_user_id(signal.run_id, "run_id"), event, data, signal.dedup_id)
