"""Questions to people and to other systems: waits that a token answers.

The wait is durable before anyone learns of its token. It ends with the first message under its
name: an answer, its expiry, or the run itself closing it. The latter two are sent by the run to its
own inbox, under the deduplication id that answers have: the store decides which was first.
"""

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta
from functools import partial
from typing import Any, Generic, TypeAlias, TypeVar

import msgspec

from perdure import codec
from perdure.clock import Duration, isoformat, parse_duration, parse_iso
from perdure.engine.attempts import NO_STORE
from perdure.engine.call import Kind, Received, RunHost, StepCall, undecorated
from perdure.engine.execution import Execution
from perdure.engine.tasks import Interrupted
from perdure.engine.waiting import as_type
from perdure.errors import (
    CodecError,
    InvalidArgument,
    InvalidDuration,
    MissingAbility,
    PerdureError,
    Rejected,
    StepTimeout,
)
from perdure.snapshot import PendingWait
from perdure.snapshot.asks import event_of, new_nonce, token_of

T = TypeVar("T")
Tell: TypeAlias = Callable[[Any], object] | None

logger = logging.getLogger(__name__)

NOTIFY = "~notify:"
"""Begins the ids of the steps that pass tokens on."""

_MAX_GATE = 2000
_MAX_QUESTION = 10_000


class Approval(msgspec.Struct, Generic[T], frozen=True):
    """The answer to a question.

    `choice` is the option that was chosen, `value` what was answered beyond that. An approval that
    has `expired` is not approved.
    """

    approved: bool
    choice: str | None = None
    value: T | None = None
    by: str = ""
    note: str = ""
    at: datetime | None = None
    expired: bool = False


class Callback(msgspec.Struct, frozen=True):
    """An open wait, as the function that passes its token on sees it.

    `reminder` counts from 0: the first call, then each reminder.
    """

    token: str
    run_id: str
    id: str
    base_url: str = ""
    expires_at: datetime | None = None
    reminder: int = 0

    @property
    def url(self) -> str:
        """The address that takes the answer, if the runtime was told where that is."""
        if not self.base_url:
            raise PerdureError(
                "there is no URL for answers: mount perdure.callbacks.CallbackApp(client) in a web "
                "app, and pass its address to Runtime(callback_url=…)"
            )
        return f"{self.base_url}{self.token}"


class ApprovalRequest(Callback, frozen=True):
    """An open approval, as `notify=` sees it: what is asked, and of whom."""

    question: str = ""
    to: str = ""
    options: tuple[str, ...] = ()
    data: Any = None


class Gate(msgspec.Struct, frozen=True):
    """The approval that a step needs before it runs: `step(…, approve=Gate("Wire {amount}?"))`.

    The names in braces are those of the parameters of the step's function. The other fields are
    those of `step.approval`. A step whose approval is rejected, or not given in time, raises
    `Rejected`.
    """

    question: str
    to: str = ""
    timeout: Duration | None = None
    remind: Duration | None = None
    notify: Callable[[ApprovalRequest], object] | None = None


class Ask:
    """What a wait asks, and what is made of the answer. Subclasses say the latter."""

    kind: Kind = "approval"

    def __init__(
        self,
        *,
        facts: PendingWait,
        timeout: Duration | None = None,
        remind: Duration | None = None,
        tell: Tell = None,
        returns: Any = None,
    ) -> None:
        self.facts, self.returns = facts, returns
        self.timeout = None if timeout is None else parse_duration(timeout, "timeout")
        self.remind = None if remind is None else _check_interval(remind)
        self.tell = _check_function(tell)

    def request(self, run: Execution, wait: PendingWait, reminder: int) -> Callback:
        """Return what the function that passes the token on is given."""
        expires = wait.get("expiresAt")
        return Callback(
            token_of(run.run_id, wait),
            run.run_id,
            wait["id"],
            run.callback_url,
            None if expires is None else parse_iso(expires),
            reminder,
        )

    def value(self, call: StepCall, answer: Mapping[str, Any], at: datetime) -> Any:
        """Return the value of the call for an answer, or raise what the call raises."""
        if answer.get("expired"):
            seconds = 0.0 if self.timeout is None else self.timeout.total_seconds()
            raise StepTimeout(call.id, seconds)
        return as_type(answer.get("value"), self.returns)


class CallbackAsk(Ask):
    """A wait for whatever another system answers."""

    kind: Kind = "callback"


class ApprovalAsk(Ask):
    """A question to a person."""

    def request(self, run: Execution, wait: PendingWait, reminder: int) -> Callback:
        """Return what `notify=` is given."""
        known = super().request(run, wait, reminder)
        return ApprovalRequest(
            *(known.token, known.run_id, known.id, known.base_url, known.expires_at, reminder),
            wait.get("question", ""),
            wait.get("to", ""),
            tuple(wait.get("options", ())),
            wait.get("data"),
        )

    def value(self, call: StepCall, answer: Mapping[str, Any], at: datetime) -> Any:
        """Return the answer, also one that has expired."""
        value = answer.get("value")
        return Approval(
            approved=bool(answer.get("approved")),
            choice=answer.get("choice"),
            value=None if value is None else as_type(value, self.returns),
            by=str(answer.get("by", "")),
            note=str(answer.get("note", "")),
            at=at,
            expired=bool(answer.get("expired")),
        )


class GateAsk(ApprovalAsk):
    """The question before a step."""

    def value(self, call: StepCall, answer: Mapping[str, Any], at: datetime) -> Any:
        """Return the answer, or raise `Rejected`."""
        given: Approval[Any] = super().value(call, answer, at)
        if given.approved:
            return given
        question, step = self.facts.get("question", ""), call.id.partition(":")[2]
        raise Rejected(step, question, given.by, given.note, at, given.expired)


def _check_function(tell: Tell) -> Tell:
    if tell is not None and not callable(tell):
        raise InvalidArgument("notify", tell, "a function that takes the request, or None")
    return tell


def _check_interval(remind: Duration) -> timedelta:
    interval = parse_duration(remind, "remind")
    if interval < timedelta(seconds=1):
        raise InvalidArgument("remind", remind, "a duration of at least one second")
    return interval


def check_question(question: object, to: object, options: object, data: object) -> PendingWait:
    """Return what is asked as part of a wait, or raise `InvalidArgument`."""
    facts: PendingWait = {"id": "", "kind": "event", "ask": "approval"}
    expected = f"a non-empty string of at most {_MAX_QUESTION:,} characters"
    facts["question"] = _check_string(question, "question", expected, _MAX_QUESTION)
    if not question:
        raise InvalidArgument("question", question, expected)
    if to != "":
        facts["to"] = _check_string(to, "to", "a string of at most 200 characters", 200)
    if choices := _check_options(options):
        facts["options"] = choices
    if data is not None:
        # For people: as its fields, and what JSON cannot represent as text.
        facts["data"] = codec.prepare(data, lambda: type(data), "data").data
    return facts


def _check_string(value: object, parameter: str, expected: str, longest: int) -> str:
    if not isinstance(value, str) or len(value) > longest or "\0" in value:
        raise InvalidArgument(parameter, value, expected)
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InvalidArgument(parameter, value, expected) from None
    return str.__str__(value)


def _check_options(options: object) -> list[str]:
    expected = "a list of distinct, non-empty strings"
    if isinstance(options, str) or not isinstance(options, Sequence):
        raise InvalidArgument("options", options, expected)
    choices = [_check_string(each, "options", expected, 200) for each in options]
    if len(set(choices)) < len(choices) or not all(choices):
        raise InvalidArgument("options", options, expected)
    return choices


async def ask(run: Execution, call: StepCall, host: RunHost, question: Ask) -> Any:
    """Wait for the answer to a question, and record it."""
    found = run.recorded(call)
    if found is not None:
        return await run.answer(call, *found)
    if run.gated:
        await run.gate(call)
    run.begin(call)
    asking = _Asking(run, call, host, question)
    try:
        return await asking.answer()
    finally:
        run.open_asks.pop(call.wait_id(), None)


class _Asking:
    """One wait with a token, from its opening to the record of its answer."""

    def __init__(self, run: Execution, call: StepCall, host: RunHost, question: Ask) -> None:
        self._run = run
        self._call = call
        self._host = host
        self._question = question
        self._told: set[str] = set()
        self._cancelled = False
        wait = run.history.waits.get(call.wait_id())
        if wait is not None and "since" in wait:
            # It began in an earlier activation, and its record says how long it took in all.
            took = run.clock.now() - parse_iso(wait["since"])
            call.started -= max(took.total_seconds(), 0)

    async def answer(self) -> Any:
        """Open the wait, or find it open; return what the function sees of the answer."""
        try:
            received = await self._receive()
        except asyncio.CancelledError:
            if self._run.live:
                await self._withdraw()
            raise asyncio.CancelledError from None
        except Exception as error:
            if not self._run.live:
                raise
            if _is_closed(received := await self._conclude({"closed": True})):
                self._run.history.close_wait(self._call.wait_id())
                return await self._fail(error)
        return await self._record(received)

    async def _withdraw(self) -> None:
        """Close a wait that the function has cancelled; record an answer that was first."""
        if self._call.wait_id() not in self._run.history.waits:
            return
        received = await self._conclude({"closed": True})
        if received is None or _is_closed(received):
            self._run.history.close_wait(self._call.wait_id())
        else:
            # What the call would raise is in the record; the function sees the cancellation.
            with suppress(Exception):
                await self._record(received)

    async def _receive(self) -> Received | None:
        """Return the first message under the wait's name, whatever sent it."""
        wait = self._run.history.waits.get(self._call.wait_id())
        if wait is None or event_of(wait.get("nonce", "")) != wait.get("event"):
            # A run that was imported without its secrets asks again.
            wait = await self._open()
        while True:
            self._run.open_asks[wait["id"]] = wait
            await self._tell(wait, 0)
            wait = await self._remind(wait)
            received = await self._wait(wait)
            if received is None and self._has_expired(wait):
                received = await self._conclude({"expired": True})
            if received is None:
                continue
            if not received.payload.get("closed"):
                return received
            # An earlier owner closed it, and did not get to write what the wait was closed for. The
            # function waits again: for another token, since the old one was refused.
            wait = await self._open()

    async def _open(self) -> PendingWait:
        """Make the wait durable, with a token that no other wait has."""
        run, nonce, now = self._run, new_nonce(self._run.random), self._run.clock.now()
        wait: PendingWait = {**self._question.facts, "id": self._call.wait_id()}
        wait["event"], wait["nonce"], wait["since"] = event_of(nonce), nonce, isoformat(now)
        if (timeout := self._question.timeout) is not None:
            wait["expiresAt"] = wait["wakeAt"] = isoformat(_after(now, timeout, "timeout"))
        if self._question.remind is not None:
            wait["wakeAt"] = self._wake_at(wait, 1)
        if (round := self._next_round()) > 1:
            wait["round"] = round
        run.history.change_wait(wait)
        with self._in_flight():
            try:
                await self._host.persist()
            except Interrupted:
                raise asyncio.CancelledError from None
            except Exception as error:  # noqa: BLE001  # what cannot be stored breaks the run
                raise run.break_off(error) from error.__cause__
        return wait

    async def _tell(self, wait: PendingWait, reminder: int) -> None:
        """Pass the token on, in a step of its own, once for each token and reminder."""
        tell, run = self._question.tell, self._run
        name = self._step_name(wait.get("round", 1), reminder)
        if tell is None or name in self._told:
            return
        self._told.add(name)
        fn, decoration = undecorated(tell)
        request = self._question.request(run, wait, reminder)
        # Not as an argument: the token must not be recorded with the arguments of the step.
        call = StepCall(name, self._call.branch, None, partial(fn, request), ())
        if decoration is not None:
            decoration.apply(call)
        call.token = request.token
        await run.perform(call)

    def _step_name(self, round: int, reminder: int = 0) -> str:
        """Return the id of the step that passes a token on.

        Not the token: names of steps are shown to everyone who may look at the run.
        """
        again = f"@{round}" if round > 1 else ""
        return f"{NOTIFY}{self._call.call}{again}" + (f":{reminder}" if reminder else "")

    def _next_round(self) -> int:
        """Return how often this call has asked, so that its steps are told from earlier ones."""
        known = self._run.history.waits.get(self._call.wait_id())
        round = 1 if known is None else known.get("round", 1) + 1
        path = self._call.branch.path
        # After the run failed and was retried, the wait is gone, but not the records.
        while self._run.history.find(path, self._step_name(round)) is not None:
            round += 1
        return round

    async def _remind(self, wait: PendingWait) -> PendingWait:
        """Send the reminder that is due, if there is one, and set the time of the next."""
        interval, run = self._question.remind, self._run
        if interval is None or self._has_expired(wait):
            return wait
        # After a long outage, the reminders that were missed are one. Times are stored in
        # milliseconds.
        passed = run.clock.now() - parse_iso(wait.get("since", "")) + timedelta(milliseconds=1)
        number = int(passed / interval)
        if number > 0:
            if wait.get("wakeAt") != (wake_at := self._wake_at(wait, number + 1)):
                # The record of the reminder makes this durable. If the process dies before, the
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
        """Return when a reminder is due, or the wait expires if that is earlier."""
        interval = self._question.remind or timedelta(0)
        due = isoformat(_after(parse_iso(wait.get("since", "")), number * interval, "remind"))
        return min(wait.get("expiresAt", due), due)

    def _change(self, wait: PendingWait) -> PendingWait:
        self._run.open_asks[wait["id"]] = self._run.history.change_wait(wait)
        return wait

    def _has_expired(self, wait: PendingWait) -> bool:
        expires = wait.get("expiresAt")
        return expires is not None and self._run.clock.now() >= parse_iso(expires)

    async def _wait(self, wait: PendingWait) -> Received | None:
        with self._in_flight():
            try:
                return await self._host.wait(wait)
            except Exception as error:  # noqa: BLE001  # whatever keeps the run from waiting
                raise self._run.break_off(error) from error.__cause__

    async def _conclude(self, outcome: Mapping[str, Any]) -> Received | None:
        """Answer the wait on behalf of the run, unless it has been answered."""
        with self._in_flight():
            try:
                wait = self._run.history.waits[self._call.wait_id()]
                return await self._host.conclude(wait, outcome)
            except Interrupted as interrupted:
                # The function has to see a cancellation, but only after the record.
                self._cancelled = True
                first: Received | None = interrupted.answer
                return first
            except Exception as error:  # noqa: BLE001  # the store: nothing is known of the message
                raise self._run.break_off(error) from error.__cause__

    async def _record(self, received: Received | None) -> Any:
        """Record the answer, and consume its message in the same write."""
        assert received is not None, "a message that no record consumed is in the inbox"
        run, call, answer = self._run, self._call, received.payload
        # Before the wait is closed: if this is too late, the answer stays on record as an act.
        run.check_live(call.id)
        wait = run.history.waits[call.wait_id()]
        call.consumes, call.event = (received.message_id,), wait.get("event", "")
        call.answer = _facts(answer, received.sent_at)
        if (act := answer.get("act")) is not None:
            run.history.add_act(act)
        run.history.close_wait(call.wait_id())
        try:
            value = self._question.value(call, answer, received.sent_at)
        except CodecError as error:
            text = f"the answer to {call.place()} does not fit: {error}"
            return await self._fail(CodecError(text))
        except (Rejected, StepTimeout) as error:
            return await self._fail(error)
        with self._in_flight():
            value = await run.succeed(call, value)
        if self._cancelled:
            raise asyncio.CancelledError
        return value

    async def _fail(self, error: Exception) -> Any:
        try:
            with self._in_flight():
                return await self._run.fail(self._call, error)
        except Exception:
            if self._cancelled and self._run.live:
                raise asyncio.CancelledError from None
            raise

    @contextmanager
    def _in_flight(self) -> Generator[None]:
        """Keep the run in memory; not around a step, which does so itself."""
        self._run.branches.begin(self._call)
        try:
            yield
        finally:
            self._run.branches.end(self._call)


def _is_closed(received: Received | None) -> bool:
    return received is None or bool(received.payload.get("closed"))


def _after(time: datetime, duration: timedelta, parameter: str) -> datetime:
    try:
        return time + duration
    except OverflowError:
        expected = "a duration that ends before the year 10000"
        raise InvalidDuration(parameter, duration, expected) from None


def _facts(answer: Mapping[str, Any], at: datetime) -> dict[str, Any]:
    """Return what is recorded of who answered."""
    facts = {name: answer[name] for name in ("by", "note", "via", "expired") if answer.get(name)}
    return {"at": isoformat(at), **facts}


def gate_of(approve: object) -> Callable[[Execution, StepCall], Awaitable[object]]:
    """Return what awaits the approval of a step, given the option `approve` of the step."""
    gate = Gate(approve) if isinstance(approve, str) else approve
    if not isinstance(gate, Gate):
        raise InvalidArgument("approve", approve, "a question, or a Gate(question, …)")
    check_question(gate.question, gate.to, (), None)
    return partial(_await_gate, gate)


async def _await_gate(gate: Gate, run: Execution, call: StepCall) -> None:
    """Ask for the approval of a step; raise `Rejected` if it is not given."""
    host = host_of(run, "approve=")
    question = fill_in(gate.question, call.fn, call.args)
    asked = GateAsk(
        facts=check_question(question, gate.to, (), None),
        timeout=gate.timeout,
        remind=gate.remind,
        tell=gate.notify,
    )
    # Named after the call, which is the same on every replay, not after its turn.
    key = None if call.key is None else f"~approve:{call.key}"
    approval = StepCall(f"~approve:{call.call}", call.branch, key, _approval, ())
    approval.kind, approval.returns = "approval", Approval
    await ask(run, approval, host, asked)


def _approval() -> Any:
    """Stands for the function of an approval, whose value is known by a type."""


def fill_in(template: str, fn: Callable[..., Any], args: tuple[Any, ...]) -> str:
    """Return a question with the arguments of a step's function in place of their names."""
    named = {}
    if "{" in template:
        bound = inspect.signature(fn).bind(*args)
        bound.apply_defaults()
        named = dict(bound.arguments)
    try:
        question = template.format(*args, **named)
    except (KeyError, IndexError, AttributeError, ValueError, TypeError) as error:
        known = ", ".join(f"{{{name}}}" for name in named) or "none: its function has no parameters"
        expected = f"a question with the names of the function's parameters in braces ({known})"
        raise InvalidArgument("approve", template, expected, f"{error!r}") from None
    return question if len(question) <= _MAX_GATE else question[: _MAX_GATE - 1] + "…"


def host_of(run: Execution, what: str) -> RunHost:
    """Return the host of a run, or raise if it has none: nothing could be answered."""
    if run.host is None:
        raise MissingAbility(NO_STORE, "inbox", what)
    return run.host
