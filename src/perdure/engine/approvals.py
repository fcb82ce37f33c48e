"""Approvals and callbacks: the requests, and what their answers turn into."""

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Generic, TypeAlias, TypeVar

import msgspec

from perdure import codec
from perdure.clock import Duration, parse_duration, parse_iso
from perdure.engine.call import StepCall, undecorated
from perdure.engine.execution import Execution
from perdure.engine.waiting import as_type
from perdure.errors import InvalidArgument, PerdureError, StepTimeout
from perdure.snapshot import PendingWait
from perdure.snapshot.asks import token_of

T = TypeVar("T")
Tell: TypeAlias = Callable[[Any], object] | None

_MAX_QUESTION = 10_000


class Approval(msgspec.Struct, Generic[T], frozen=True):
    """The answer to a question.

    `choice` is the chosen option, `value` an additional answer. An approval that has `expired` is
    not approved.
    """

    approved: bool
    choice: str | None = None
    value: T | None = None
    by: str = ""
    note: str = ""
    at: datetime | None = None
    expired: bool = False


class Callback(msgspec.Struct, frozen=True):
    """An open wait, as passed to the function that sends out its token.

    `reminder` is 0 in the first call, and then counts the reminders.
    """

    token: str
    run_id: str
    id: str
    base_url: str = ""
    expires_at: datetime | None = None
    reminder: int = 0

    @property
    def url(self) -> str:
        """The URL that receives the answer, if the runtime has a `callback_url`."""
        if not self.base_url:
            raise PerdureError(
                "there is no URL for answers: mount perdure.callbacks.CallbackApp(client) in a web "
                "app, and pass its address to Runtime(callback_url=…)"
            )
        return f"{self.base_url}{self.token}"


class ApprovalRequest(Callback, frozen=True):
    """An open approval, as passed to `notify=`: the question and the addressee."""

    question: str = ""
    to: str = ""
    options: tuple[str, ...] = ()
    data: Any = None


class Ask:
    """What a wait asks for, and how its answer is converted: for a callback, to its value."""

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
        if remind is not None and tell is None:
            hint = "Without notify=, there is nothing to call again"
            raise InvalidArgument("remind", remind, "None, or a notify= beside it", hint)

    def request(self, run: Execution, wait: PendingWait, reminder: int) -> Callback:
        """Return the argument for the function that sends out the token."""
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
        """Return the value of the call for an answer, or raise its error."""
        if answer.get("expired"):
            seconds = 0.0 if self.timeout is None else self.timeout.total_seconds()
            raise StepTimeout(call.id, seconds)
        return as_type(answer.get("value"), self.returns)


class ApprovalAsk(Ask):
    """A question to a person."""

    def request(self, run: Execution, wait: PendingWait, reminder: int) -> Callback:
        """Return the argument for `notify=`."""
        base = super().request(run, wait, reminder)
        return ApprovalRequest(
            *(base.token, base.run_id, base.id, base.base_url, base.expires_at, reminder),
            wait.get("question", ""),
            wait.get("to", ""),
            tuple(wait.get("options", ())),
            wait.get("data"),
        )

    def value(self, call: StepCall, answer: Mapping[str, Any], at: datetime) -> Any:
        """Return the answer, even if it has expired."""
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


def _check_function(tell: Tell) -> Tell:
    if tell is not None and not callable(tell):
        raise InvalidArgument("notify", tell, "a function that takes the request, or None")
    decoration = undecorated(tell)[1]
    if decoration is not None and decoration.undo is not None:
        hint = "A notification is not undone: put what has to be undone into a separate step"
        raise InvalidArgument("notify", tell, "a function without undo=", hint)
    return tell


def _check_interval(remind: Duration) -> timedelta:
    interval = parse_duration(remind, "remind")
    if interval < timedelta(seconds=1):
        raise InvalidArgument("remind", remind, "a duration of at least one second")
    return interval


def check_question(question: object, to: object, options: object, data: object) -> PendingWait:
    """Return the question as part of a wait, or raise `InvalidArgument`."""
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
        # For display: objects as their fields, and anything that JSON cannot represent as text.
        facts["data"] = codec.prepare(data, lambda: type(data), "data").data
    return facts


def _check_string(value: object, parameter: str, expected: str, longest: int) -> str:
    if not isinstance(value, str) or len(value) > longest or "\0" in value:
        raise InvalidArgument(parameter, value, expected)
    try:
        value.encode()
    except UnicodeEncodeError:
        # Lone surrogates cannot be stored.
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
