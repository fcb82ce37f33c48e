"""Waits for an answer from outside, an approval or a callback, and the tokens that answer them.

A wait contains an unguessable *nonce*. The token is the nonce with the run's id. The name of the
message that answers the wait, and its deduplication id, are a digest of the nonce, so the name does
not reveal the token.
"""

import hashlib
import re
from base64 import urlsafe_b64decode, urlsafe_b64encode
from binascii import Error
from collections.abc import Iterable
from random import Random
from typing import Any, Final, NamedTuple

from perdure.errors import InvalidArgument, InvalidToken
from perdure.snapshot.format import PendingWait, Snapshot, open_waits
from perdure.snapshot.tags import system_tag
from perdure.validation import check_id

ANSWER: Final = "~answer:"
"""The prefix of the names of messages that answer a wait."""

ANSWERS: Final = "answers"
"""The metadata name of the answers of a run whose records were dropped, by message name."""

ASKS: Final = "~asks"
"""The name of the tags of a run with open approvals, one per addressee."""

OPEN: Final = "~open=approval"
"""The tag of every run with open approvals."""

NOTIFY: Final = "~notify"
"""The prefix of the ids of steps that send out tokens; a colon and the asking call follow."""

APPROVE: Final = "~approve"
"""The prefix of the ids of step approvals; a colon and the call of the step follow."""

_NONCE = re.compile("[0-9a-f]{32}")
_MAX_TOKEN = 4096


class Token(NamedTuple):
    """The contents of a token."""

    run_id: str
    nonce: str

    @property
    def event(self) -> str:
        """The name of the message that answers the wait, and its deduplication id."""
        return event_of(self.nonce)


def new_nonce(random: Random) -> str:
    """Draw 128 bits that identify a wait; outside tests, `random` must be a secure source."""
    # In hexadecimal, so that a token never begins with a hyphen, which a command line would take
    # for an option.
    return f"{random.getrandbits(128):032x}"


def event_of(nonce: str) -> str:
    """Return the name of the message that answers the wait with this nonce."""
    return ANSWER + hashlib.sha256(nonce.encode()).hexdigest()[:32]


def token_of(run_id: str, wait: PendingWait) -> str:
    """Return the token that answers a wait of a run; it is URL-safe."""
    return f"{wait.get('nonce', '')}.{_encode(run_id.encode())}"


def read_token(token: object) -> Token:
    """Parse a token, or raise `InvalidToken`."""
    if not isinstance(token, str) or len(token) > _MAX_TOKEN:
        raise InvalidToken
    nonce, dot, run_id = token.partition(".")
    try:
        parsed_token = Token(check_id(_decode(run_id).decode()), nonce)
        is_token = bool(dot) and _NONCE.fullmatch(nonce) is not None
    except (Error, ValueError, InvalidArgument):
        raise InvalidToken from None
    # Base64 has spare bits: only one spelling of each token is accepted.
    if not is_token or run_id != _encode(_decode(run_id)):
        raise InvalidToken
    return parsed_token


def _encode(data: bytes) -> str:
    return urlsafe_b64encode(data).rstrip(b"=").decode()


def _decode(text: str) -> bytes:
    return urlsafe_b64decode(text.encode("ascii") + b"=" * (-len(text) % 4))


def is_ask(wait: PendingWait) -> bool:
    """Return whether a wait is answered with a token."""
    return "ask" in wait


def open_asks(snapshot: Snapshot) -> dict[str, PendingWait]:
    """Return the open waits of a run that are answered with a token, by message name."""
    return asks_among(open_waits(snapshot))


def asks_among(waits: Iterable[PendingWait]) -> dict[str, PendingWait]:
    """Return the waits that are answered with a token, by message name."""
    return {wait.get("event", ""): wait for wait in waits if is_ask(wait)}


def asks_tag(to: str) -> str:
    """Return the tag of runs that ask `to` for an approval."""
    return f"{ASKS}={system_tag(ASKS, to)}"


def ask_tags(waits: Iterable[PendingWait]) -> list[str]:
    """Return the tags of a run with these waits."""
    to = [wait.get("to", "") for wait in waits if wait.get("ask") == "approval"]
    return sorted({OPEN, *map(asks_tag, to)}) if to else []


def asking_call(call: str) -> str:
    """Return the user's call on whose behalf the engine made this call, or the call itself."""
    while call.startswith((NOTIFY, APPROVE)):
        call = call.partition(":")[2]
    return call


def answer_in(record: Any) -> dict[str, Any] | None:
    """Return the answer in the record of a wait: by whom and when, or that it expired."""
    answer = record.get("answer")
    return answer if isinstance(answer, dict) else None
