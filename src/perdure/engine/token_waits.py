"""Waits that are answered with a token: questions to people and to other systems.

The wait is durable before its token is sent out. It ends with the first message under its name: an
answer, its expiry, or the run closing it. The run sends the latter two to its own inbox, under the
same deduplication id as answers, so the store decides which was first.
"""

import asyncio
import logging
from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

from perdure.clock import add_duration, isoformat, parse_iso
from perdure.engine.approvals import Ask
from perdure.engine.call import StepCall, undecorated
from perdure.engine.execution import Execution
from perdure.engine.host import NO_STORE, Host, Received
from perdure.engine.tasks import Args, Interrupted
from perdure.engine.unawaited import call_named
from perdure.errors import CodecError, MissingAbility, Rejected, StepTimeout
from perdure.snapshot import PendingWait
from perdure.snapshot.asks import NOTIFY, event_of, new_nonce

logger = logging.getLogger(__name__)

_PAST = isoformat(datetime.fromtimestamp(0, UTC))
"""The wake time of a wait that only checks for an existing message."""


def host_of(run: Execution, caller: str) -> Host:
    """Return the host of a run, or raise if it has none and nothing could be answered."""
    if run.host is None:
        raise MissingAbility(NO_STORE, "inbox", caller)
    return run.host


@call_named("step.approval")
async def ask(run: Execution, call: StepCall, host: Host, question: Ask) -> Any:
    """Wait for the answer to a question, and record it."""
    recorded_call = run.find_record(call)
    if recorded_call is not None:
        return await run.answer(call, *recorded_call)
    if run.gated:
        await run.gate(call)
    run.begin(call)
    asking = _Asking(run, call, host, question)
    try:
        return await asking.answer()
    finally:
        run.open_asks.pop(call.wait_id(), None)


class _Asking:
    """A wait with a token, from its opening to the record of its answer."""

    def __init__(self, run: Execution, call: StepCall, host: Host, question: Ask) -> None:
        self._run = run
        self._call = call
        self._host = host
        self._question = question
        self._sent_steps: set[str] = set()
        self._cancelled_with: Args | None = None
        wait = run.history.waits.get(call.wait_id())
        if wait is not None:
            run.count_from(call, wait.get("since"))

    async def answer(self) -> Any:
        """Open the wait, or find it open; return the answer as the function sees it."""
        try:
            return await self._answer()
        finally:
            if self._cancelled_with is not None and self._run.live:
                # The outcome of the call is recorded; the function sees the cancellation.
                raise asyncio.CancelledError(*self._cancelled_with) from None

    async def _answer(self) -> Any:
        try:
            message = await self._receive()
        except asyncio.CancelledError as error:
            if self._run.live:
                await self._withdraw()
            raise asyncio.CancelledError(*error.args) from None
        except Exception as error:
            if not self._run.live or not self._is_open:
                raise
            if _is_closed(message := await self._conclude({"closed": True})):
                self._run.history.close_ask(self._call.wait_id())
                return await self._fail(error)
        return await self._record(message)

    @property
    def _is_open(self) -> bool:
        return self._call.wait_id() in self._run.history.waits

    async def _withdraw(self) -> None:
        """Close a wait that the function has cancelled; record an answer that was first."""
        if not self._is_open:
            return
        message = await self._conclude({"closed": True})
        if _is_closed(message):
            self._run.history.close_ask(self._call.wait_id())
        else:
            # The failure of the call is recorded; the function sees the cancellation.
            with suppress(Exception):
                await self._record(message)

    async def _receive(self) -> Received | None:
        """Return the first message under the wait's name, from any sender."""
        wait = self._run.history.waits.get(self._call.wait_id())
        if wait is None or event_of(wait.get("nonce", "")) != wait.get("event"):
            # A run that was imported without its secrets asks again.
            wait = await self._open()
        while True:
            self._run.open_asks[wait["id"]] = wait
            # An answer that has already arrived counts now: `notify` may be retried for days.
            message = await self._wait({**wait, "wakeAt": _PAST})
            if message is None:
                await self._tell(wait, 0)
                wait = await self._remind(wait)
                message = await self._wait(wait)
            if message is None and self._has_expired(wait):
                message = await self._conclude({"expired": True})
            if message is None:
                continue
            if not _is_closed(message):
                return message
            # An earlier owner closed the wait, but died before the write for which it was closed.
            # The function waits again, with another token, since the old one was used up.
            wait = await self._open()

    async def _open(self) -> PendingWait:
        """Make the wait durable, with a token that no other wait has."""
        run, nonce, now = self._run, new_nonce(self._run.random), self._run.clock.now()
        wait: PendingWait = {**self._question.facts, "id": self._call.wait_id()}
        wait["event"], wait["nonce"], wait["since"] = event_of(nonce), nonce, isoformat(now)
        if (timeout := self._question.timeout) is not None:
            wait["expiresAt"] = wait["wakeAt"] = isoformat(add_duration(now, timeout, "timeout"))
        if self._question.remind is not None:
            wait["wakeAt"] = self._wake_at(wait, 1)
        if (round := self._next_round()) > 1:
            wait["round"] = round
        run.history.change_wait(wait)
        with self._in_flight():
            try:
                await self._host.persist()
            except Interrupted as interruption:
                raise interruption.plain() from None
            except Exception as error:  # noqa: BLE001  # the wait cannot be stored
                raise run.stop(error) from error.__cause__
        return wait

    async def _tell(self, wait: PendingWait, reminder: int) -> None:
        """Send out the token, in a separate step, once for each token and reminder."""
        tell, run = self._question.tell, self._run
        name = self._step_name(wait.get("round", 1), reminder)
        if tell is None or name in self._sent_steps:
            return
        self._sent_steps.add(name)
        fn, decoration = undecorated(tell)
        request = self._question.request(run, wait, reminder)
        # Not as an argument: the token must not be recorded with the arguments of the step.
        call = self._call.on_behalf(name, partial(fn, request))
        if decoration is not None:
            decoration.apply(call)
        call.token = request.token
        await run.perform(call)

    def _step_name(self, round: int, reminder: int = 0) -> str:
        """Return the id of the step that sends out a token.

        It does not contain the token, because names of steps are shown to everyone who may look at
        the run.
        """
        count = (f"@{round}" if round > 1 else "") + (f".{reminder}" if reminder else "")
        return f"{NOTIFY}{count}:{self._call.call}"

    def _next_round(self) -> int:
        """Return how often this call has asked, to distinguish its steps from earlier ones."""
        wait = self._run.history.waits.get(self._call.wait_id())
        round = 1 if wait is None else wait.get("round", 1) + 1
        # After the run failed and was retried, the wait is gone, but the records are not.
        while self._run.history.find(self._call.path, self._step_name(round)) is not None:
            round += 1
        return round

    async def _remind(self, wait: PendingWait) -> PendingWait:
        """Send the reminder that is due, if there is one, and set the time of the next."""
        interval, run = self._question.remind, self._run
        if interval is None or self._has_expired(wait):
            return wait
        # After a long outage, all missed reminders count as one. Times are stored in milliseconds.
        elapsed = run.clock.now() - parse_iso(wait.get("since", "")) + timedelta(milliseconds=1)
        number = int(elapsed / interval)
        if number > 0:
            if wait.get("wakeAt") != (wake_at := self._wake_at(wait, number + 1)):
                # The record of the reminder makes this durable. If the process dies first, the
                # reminder is due again.
                wait = self._change({**wait, "wakeAt": wake_at})
            try:
                await self._tell(wait, number)
            except Exception as error:  # the user's function; the question stays open
                if not run.live:
                    raise
                logger.warning("run %r: a reminder of %r failed: %r", run.run_id, wait["id"], error)
        return wait

    def _wake_at(self, wait: PendingWait, number: int) -> str:
        """Return when a reminder is due, or when the wait expires if that is earlier."""
        interval = self._question.remind or timedelta(0)
        due_at = isoformat(
            add_duration(parse_iso(wait.get("since", "")), number * interval, "remind")
        )
        return min(wait.get("expiresAt", due_at), due_at)

    def _change(self, wait: PendingWait) -> PendingWait:
        self._run.open_asks[wait["id"]] = self._run.history.change_wait(wait)
        return wait

    def _has_expired(self, wait: PendingWait) -> bool:
        expires = wait.get("expiresAt")
        return expires is not None and self._run.clock.now() >= parse_iso(expires)

    async def _wait(self, wait: PendingWait) -> Received | None:
        with self._in_flight():
            await self._run.wait_for_turn()
            try:
                return await self._host.wait(wait)
            except Exception as error:  # noqa: BLE001  # whatever keeps the run from waiting
                raise self._run.stop(error) from error.__cause__

    async def _conclude(self, outcome: Mapping[str, Any]) -> Received:
        """Answer the wait on behalf of the run, unless it was already answered."""
        with self._in_flight():
            try:
                wait = self._run.history.waits[self._call.wait_id()]
                return await self._host.conclude(wait, outcome)
            except Interrupted as interruption:
                # The function must see the cancellation, but only after the record is written.
                self._cancelled_with = interruption.args
                first: Received = interruption.answer
                return first
            except Exception as error:  # noqa: BLE001  # the message may or may not have been sent
                raise self._run.stop(error) from error.__cause__

    async def _record(self, message: Received | None) -> Any:
        """Record the answer, and consume its message in the same write."""
        assert message is not None, "a message that no record consumed is in the inbox"
        run, call, answer = self._run, self._call, message.payload
        # Before anything changes: if this is too late, the answer is kept as an act.
        run.check_live(call.id)
        wait = run.history.waits[call.wait_id()]
        call.consumes, call.event = (message.message_id,), wait.get("event", "")
        call.answer = _facts(answer, message.sent_at)
        if (act := answer.get("act")) is not None:
            run.history.add_act(act)
        run.history.close_wait(call.wait_id())
        try:
            value = self._question.value(call, answer, message.sent_at)
        except CodecError as error:
            text = f"the answer to {call.place()} does not fit: {error}"
            return await self._fail(CodecError(text))
        except (Rejected, StepTimeout) as error:
            return await self._fail(error)
        with self._in_flight():
            return await run.succeed(call, value)

    async def _fail(self, error: Exception) -> Any:
        with self._in_flight():
            return await self._run.fail(self._call, error)

    def _in_flight(self) -> AbstractContextManager[None]:
        """Keep the run in memory; not needed around a step, which does so itself."""
        return self._run.branches.busy(self._call)


def _is_closed(message: Received) -> bool:
    return bool(message.payload.get("closed"))


def _facts(answer: Mapping[str, Any], at: datetime) -> dict[str, Any]:
    """Return the recorded facts about an answer."""
    facts = {name: answer[name] for name in ("by", "note", "via", "expired") if answer.get(name)}
    return {"at": isoformat(at), **facts}
