"""Answer approvals and callbacks, and list open approvals.

An answer is a message to the run with the deduplication id of the wait, so the store accepts only
the first. A token is looked up before anything is sent, so that only open questions of the run are
answered. If the wait ends in the meantime, its id is used up, because a run closes a wait before it
drops it.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import msgspec
from msgspec.structs import replace

from perdure import codec
from perdure.clock import Clock, parse_iso
from perdure.durable.session import messages_of
from perdure.errors import AlreadyAnswered, InvalidArgument, Refused, RunNotFound, TooLate
from perdure.snapshot import PendingWait, Snapshot, is_over, open_waits, rest_status
from perdure.snapshot.acts import acts_of
from perdure.snapshot.asks import (
    ANSWERS,
    OPEN,
    Token,
    answer_in,
    asks_tag,
    event_of,
    open_asks,
    read_token,
    token_of,
)
from perdure.snapshot.summary import AskSummary, read_summary
from perdure.store import (
    Delivery,
    InboxStore,
    NewMessage,
    Query,
    RunSummary,
    Store,
    require_inbox,
    require_search,
)
from perdure.validation import check_limit, is_encodable

_MAX_BY, _MAX_NOTE = 200, 2000
_MAX_DEPTH = codec.MAX_DEPTH - 5
"""How deeply a value may be nested: the message and the record around it add a few levels."""


class OpenApproval(msgspec.Struct, frozen=True):
    """An approval that a run waits for.

    `token` answers it. `id` is the name of the wait in its run. In a list, a long `question` is
    shortened to some 150 characters and ends in an ellipsis.
    """

    token: str
    run_id: str
    id: str
    question: str
    to: str = ""
    options: tuple[str, ...] = ()
    since: datetime | None = None
    expires_at: datetime | None = None
    workflow: str | None = None
    data: Any = None


class ApprovalPage(msgspec.Struct, frozen=True):
    """One page of open approvals; `cursor` continues the list, `None` means that it is complete."""

    approvals: tuple[OpenApproval, ...]
    cursor: str | None = None


class Answer(msgspec.Struct, frozen=True, omit_defaults=True):
    """An answer to a run. `value` is JSON; the operator's `act` is stored with the record."""

    approved: bool
    choice: str | None = None
    value: Any = None
    by: str = ""
    note: str = ""
    via: str = ""
    act: dict[str, Any] | None = None

    def with_act(self, act: dict[str, Any]) -> "Answer":
        """Return the answer with the act of the answering operator."""
        return replace(self, act=act)


def check_answer(by: object, note: object) -> None:
    """Check who answers, and the note."""
    for parameter, text, longest in (("by", by, _MAX_BY), ("note", note, _MAX_NOTE)):
        if not isinstance(text, str) or len(text) > longest or not is_encodable(text):
            raise InvalidArgument(parameter, text, f"a string of at most {longest:,} characters")


async def send_answer(store: Store, token: str, answer: Answer) -> OpenApproval:
    """Answer a wait and return the request; raise if the answer does not count."""
    parsed_token, inbox = read_token(token), require_inbox(store, "answering")
    wait, workflow = await _find(inbox, parsed_token)
    _check_fits(wait, answer)
    message = NewMessage(
        parsed_token.run_id, parsed_token.event, codec.dumps(answer), parsed_token.event
    )
    (receipt,) = await messages_of(store).send([message])
    if receipt.delivery is not Delivery.DELIVERED:
        await _refuse(inbox, parsed_token, receipt.delivery)
    return _open_approval(parsed_token.run_id, wait, workflow)


async def find_approval(store: Store, token: str) -> OpenApproval:
    """Return the approval that a token belongs to; raise the same errors as an answer."""
    parsed_token = read_token(token)
    wait, workflow = await _find(require_inbox(store, "looking up a token"), parsed_token)
    return _open_approval(parsed_token.run_id, wait, workflow)


async def find_token(store: Store, run_id: str, wait: str | None) -> str:
    """Return the token of a wait of a run; without a name, of its only wait."""
    snapshot = await store.load(run_id)
    if snapshot is None:
        raise RunNotFound(run_id)
    is_waiting = not is_over(rest_status(snapshot))
    asks = list(open_asks(snapshot).values()) if is_waiting else []
    matching_asks = [each for each in asks if wait in (None, "", each["id"])]
    if len(matching_asks) == 1:
        return token_of(run_id, matching_asks[0])
    names = ", ".join(repr(each["id"]) for each in asks)
    if not asks:
        raise Refused(run_id, "answer", "it is not waiting for an answer")
    raise Refused(run_id, "answer", f"it waits for {names}: name one of them")


async def _find(store: InboxStore, token: Token) -> tuple[PendingWait, str | None]:
    snapshot = await store.load(token.run_id)
    if snapshot is None:
        raise RunNotFound(token.run_id)
    if (wait := _wait_in(snapshot, token)) is None:
        _raise_outcome(token, snapshot)
    if await _first_message(store, token) is not None:
        await _refuse(store, token)
    return wait, snapshot.get("workflowName")


def _wait_in(snapshot: Snapshot, token: Token) -> PendingWait | None:
    if is_over(rest_status(snapshot)):
        return None
    # Looked up by digest, so that the time of the comparison reveals nothing about the nonce.
    wait = open_asks(snapshot).get(token.event)
    return wait if wait is not None and event_of(wait.get("nonce", "")) == token.event else None


def _check_fits(wait: PendingWait, answer: Answer) -> None:
    """Raise `InvalidArgument` unless the answer fits the question."""
    options = wait.get("options")
    if not codec.is_shallow(answer.value, _MAX_DEPTH):
        # The run could not read the value, and the token would be used up.
        expected = f"a value that is nested at most {_MAX_DEPTH} levels deep"
        raise InvalidArgument("value", answer.value, expected)
    if wait.get("ask") == "callback":
        if answer.choice is not None or not answer.approved:
            hint = "A callback has no question: call answer(token, payload)"
            raise InvalidArgument("token", "", "the token of an approval", hint)
    elif options and answer.approved and answer.choice not in options:
        raise InvalidArgument("choice", answer.choice, f"one of {', '.join(map(repr, options))}")
    elif answer.choice is not None and not options:
        raise InvalidArgument("choice", answer.choice, "None: the question has no options")


async def _refuse(
    store: InboxStore, token: Token, delivery: Delivery = Delivery.DUPLICATE
) -> NoReturn:
    """Raise the reason why an answer does not count."""
    if delivery is Delivery.UNKNOWN:
        raise RunNotFound(token.run_id)
    # Read the inbox first: a message that is no longer there is in the record that is read next.
    message = await _first_message(store, token)
    if message is not None:
        _raise_answer(token, message[0], message[1])
    snapshot = await store.load(token.run_id)
    if snapshot is None:
        raise RunNotFound(token.run_id)
    _raise_outcome(token, snapshot)


async def _first_message(
    store: InboxStore, token: Token
) -> tuple[Mapping[str, Any], datetime] | None:
    after: str | None = None
    while page := await store.inbox(token.run_id, after=after, limit=1000):
        for message in page:
            if message.name == token.event:
                return codec.loads(message.payload), message.sent_at
        after = page[-1].id
    return None


def _recorded_answers(event: str, snapshot: Snapshot) -> Iterator[Mapping[str, Any]]:
    """Yield the answers to a wait in the record of the wait, the run's metadata, and its acts."""
    records: Iterable[Any] = snapshot["steps"].values()
    for record in records:
        if record.get("event") == event and (answer := answer_in(record)) is not None:
            yield answer
    metadata: dict[str, Any] = {**(snapshot.get("metadata") or {})}
    if (answer := (metadata.get(ANSWERS) or {}).get(event)) is not None:
        yield answer
    yield from (act for act in acts_of(metadata) if act.get("answers") == event)


def _raise_outcome(token: Token, snapshot: Snapshot) -> NoReturn:
    """Raise the outcome that a run recorded for a wait that is over."""
    for answer in _recorded_answers(token.event, snapshot):
        _raise_answer(token, answer, _time(answer.get("at")))
    status = rest_status(snapshot)
    if is_over(status):
        raise TooLate(token.run_id, f"the run is {status}")
    raise TooLate(token.run_id, "the run does not wait for this answer")


def _raise_answer(token: Token, answer: Mapping[str, Any], at: datetime | None) -> NoReturn:
    if answer.get("expired"):
        raise TooLate(token.run_id, "it has expired" + ("" if at is None else f" at {at}"))
    if answer.get("closed"):
        raise TooLate(token.run_id, "the run does not wait for this answer")
    raise AlreadyAnswered(token.run_id, str(answer.get("by", "")), at)


def _time(text: object) -> datetime | None:
    return parse_iso(text) if isinstance(text, str) and text else None


async def list_approvals(
    store: Store, clock: Clock, to: str | None, limit: int, after: str | None
) -> ApprovalPage:
    """Return the open approvals of up to `limit` runs, newest runs first.

    They come from the headers of runs. Snapshots are read only for runs that are running, due or
    paused, or whose approvals do not fit in the header.
    """
    check_limit(limit)
    if to is not None and not (isinstance(to, str) and is_encodable(to)):
        raise InvalidArgument("to", to, "a string, or None for all")
    search = require_search(store, "listing approvals")
    query = Query(tags=(OPEN if to is None else asks_tag(to),))
    page = await search.search(query, limit, after=after)
    now, approvals = clock.now(), list[OpenApproval]()
    for run in page.runs:
        approvals += await _approvals_of(store, run, now)
    if to is not None:
        approvals = [each for each in approvals if each.to == to]
    return ApprovalPage(tuple(approvals), page.cursor)


async def _approvals_of(store: Store, run: RunSummary, now: datetime) -> Sequence[OpenApproval]:
    summary = read_summary(run.summary)
    is_due = run.wake_at is not None and run.wake_at <= now
    # An answer makes a run due, unless the run is paused.
    is_still = run.status not in ("running", "paused") and not is_due
    if is_still and not summary.more_asks:
        return [_approval_of(run, each) for each in summary.asks]
    snapshot = await store.load(run.id)
    if snapshot is None or is_over(rest_status(snapshot)):
        return []
    messages = await require_inbox(store, "listing approvals").inbox(run.id)
    answered_events = {message.name for message in messages}
    waits = [wait for wait in open_waits(snapshot) if wait.get("ask") == "approval"]
    open_ones = (wait for wait in waits if event_of(wait.get("nonce", "")) not in answered_events)
    return [_open_approval(run.id, wait, run.workflow) for wait in open_ones]


def _approval_of(run: RunSummary, ask: AskSummary) -> OpenApproval:
    return OpenApproval(
        token_of(run.id, {"id": ask.id, "kind": "event", "nonce": ask.nonce}),
        run.id,
        ask.id,
        ask.question,
        ask.to,
        ask.options,
        _time(ask.since),
        _time(ask.expires),
        run.workflow,
    )


def _open_approval(run_id: str, wait: PendingWait, workflow: str | None) -> OpenApproval:
    return OpenApproval(
        token_of(run_id, wait),
        run_id,
        wait["id"],
        wait.get("question", ""),
        wait.get("to", ""),
        tuple(wait.get("options", ())),
        _time(wait.get("since")),
        _time(wait.get("expiresAt")),
        workflow,
        wait.get("data"),
    )
