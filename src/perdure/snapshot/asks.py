"""Waits for an answer from outside: an approval or a callback, and the token that answers it.

A wait contains a *nonce* that no one can guess. The token is the nonce with the run's id. The name
of the message that answers the wait, and its deduplication id, are a digest of the nonce: the name
of the message does not reveal the token.
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
"""Begins the names of messages that answer a wait."""

ASKS: Final = "~asks"
"""The name of the tags of a run with open approvals: one for each addressee."""

OPEN: Final = "~open=approval"
"""The tag of every run with open approvals."""

NOTIFY: Final = "~notify"
"""Begins the ids of the steps that pass tokens on; after a colon follows the call that asks."""

APPROVE: Final = "~approve"
"""Begins the ids of the approvals of steps; after a colon follows the call of the step."""

_NONCE = re.compile("[0-9a-f]{32}")
_MAX_TOKEN = 4096


class Token(NamedTuple):
    """What a token contains."""

    run_id: str
    nonce: str

    @property
    def event(self) -> str:
        """The name of the message that answers the wait, and its deduplication id."""
        return event_of(self.nonce)


def new_nonce(random: Random) -> str:
    """Draw 128 bits that identify one wait; `random` must be a secure source outside tests."""
    # In hexadecimal: a token never begins with a hyphen, which a command would take for an option.
    return f"{random.getrandbits(128):032x}"


def event_of(nonce: str) -> str:
    """Return the name of the message that answers the wait with this nonce."""
    return ANSWER + hashlib.sha256(nonce.encode()).hexdigest()[:32]


def token_of(run_id: str, wait: PendingWait) -> str:
    """Return the token that answers a wait of a run; it can be part of a URL as it is."""
    return f"{wait.get('nonce', '')}.{_encode(run_id.encode())}"


def read_token(token: object) -> Token:
    """Return what a token contains, or raise `InvalidToken`."""
    if not isinstance(token, str) or len(token) > _MAX_TOKEN:
        raise InvalidToken
    nonce, dot, run_id = token.partition(".")
    try:
        known = Token(check_id(_decode(run_id).decode()), nonce)
        is_token = bool(dot) and _NONCE.fullmatch(nonce) is not None
    except (Error, ValueError, InvalidArgument):
        raise InvalidToken from None
    # Base64 has spare bits: only one spelling of each token is accepted.
    if not is_token or run_id != _encode(_decode(run_id)):
        raise InvalidToken
    return known


def _encode(data: bytes) -> str:
    return urlsafe_b64encode(data).rstrip(b"=").decode()


def _decode(text: str) -> bytes:
    return urlsafe_b64decode(text.encode("ascii") + b"=" * (-len(text) % 4))


def is_ask(wait: PendingWait) -> bool:
    """Return whether a wait is answered with a token."""
    return "ask" in wait


def open_asks(snapshot: Snapshot) -> dict[str, PendingWait]:
    """Return the waits of a run that a token answers, by the name of the message."""
    return asks_among(open_waits(snapshot))


def asks_among(waits: Iterable[PendingWait]) -> dict[str, PendingWait]:
    """Return those of the waits that a token answers, by the name of the message."""
    return {wait.get("event", ""): wait for wait in waits if is_ask(wait)}


def asks_tag(to: str) -> str:
    """Return the tag of runs that ask `to` for an approval."""
    return f"{ASKS}={system_tag(ASKS, to)}"


def ask_tags(waits: Iterable[PendingWait]) -> list[str]:
    """Return the tags of a run with these waits."""
    to = [wait.get("to", "") for wait in waits if wait.get("ask") == "approval"]
    return sorted({OPEN, *map(asks_tag, to)}) if to else []


def asking_call(call: str) -> str:
    """Return the call of the user for which the engine made a call, or the call itself."""
    while call.startswith((NOTIFY, APPROVE)):
        call = call.partition(":")[2]
    return call


def answer_in(record: Any) -> dict[str, Any] | None:
    """Return what a record says of the answer to its wait: who, when, or that none came."""
    answer = record.get("answer")
    return answer if isinstance(answer, dict) else None
