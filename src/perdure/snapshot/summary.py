"""The summary of a run: what lists show, so that no snapshot has to be read."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from perdure.codec import dumps, loads
from perdure.snapshot.format import (
    Metadata,
    PendingWait,
    Snapshot,
    created_at_of,
    version_of,
)

# At most 1,000 bytes in total, including the numbers: a store accepts 1 KiB. A run with a reason
# has no step that ended it, and a run that waits for an approval has no error.
_MAX_STEP, _MAX_ERROR, _MAX_REASON = 200, 400, 200
_MAX_ASKS, _MAX_QUESTION = 400, 160
_LONGEST_ESCAPE = len("\\u0000")

_encoder = msgspec.json.Encoder()


class AskSummary(msgspec.Struct, frozen=True, omit_defaults=True, array_like=True):
    """An open approval: its wait's id and nonce, the question, addressee, start and expiry.

    A question that ends in an ellipsis may have been shortened.
    """

    id: str
    nonce: str
    question: str
    to: str = ""
    since: str = ""
    expires: str = ""
    options: tuple[str, ...] = ()


class Summary(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is known about a run without its snapshot.

    `created` is ISO 8601. `steps` counts the records, `failed` the records of failed steps. `error`
    is the first line of the error of a failed run, `ended_by` the step that ended it, "" if no step
    did, or `None` if that is unknown. `reason` is why a run is paused. `size` is the size of the
    snapshot in bytes. `asks` are open approvals, `more_asks` counts those that did not fit.
    """

    created: str = ""
    version: int = 0
    steps: int = 0
    failed: int = 0
    last_step: str = ""
    error: str = ""
    reason: str = ""
    size: int = 0
    ended_by: str | None = None
    asks: tuple[AskSummary, ...] = ()
    more_asks: int = 0


_decoder = msgspec.json.Decoder(Summary)


def summarize(snapshot: Snapshot, size: int = 0, waits: Sequence[PendingWait] = ()) -> bytes:
    """Summarize a run with this snapshot and these open waits, as JSON of at most 1 KiB."""
    steps, metadata = snapshot["steps"], snapshot.get("metadata")
    failed = sum(not record["ok"] for record in steps.values()) if steps else 0
    last_step = next(reversed(steps), "")
    count, execution = len(steps), snapshot["execution"]
    return encode_summary(metadata, execution, count, failed, last_step, size, waits)


def encode_summary(
    metadata: Metadata | None,
    execution: Mapping[str, Any],
    steps: int,
    failures: int,
    last_step: str,
    size: int,
    waits: Sequence[PendingWait] = (),
) -> bytes:
    """Summarize a run with these parts, as JSON of at most 1 KiB."""
    error, reason = execution.get("error"), execution.get("reason")
    approvals: Sequence[PendingWait] = ()
    if waits and error is None:
        approvals = [wait for wait in waits if wait.get("ask") == "approval"]
    asks = _asks_with_room(approvals) if approvals else ()
    return _encoder.encode(
        Summary(
            created_at_of(metadata),
            version_of(metadata),
            steps,
            failures,
            _clip(last_step, _MAX_STEP) if last_step else "",
            "" if error is None else _clip(_first_line(error), _MAX_ERROR),
            "" if reason is None else _clip(reason, _MAX_REASON),
            size,
            _ended_by(execution),
            asks,
            len(approvals) - len(asks),
        )
    )


def _asks_with_room(approvals: Sequence[PendingWait]) -> tuple[AskSummary, ...]:
    """Return as many of the first approvals as fit in a summary."""
    asks: list[AskSummary] = []
    for wait in approvals:
        asks.append(_ask(wait))
        if len(_encoder.encode(asks)) > _MAX_ASKS:
            asks.pop()
            break
    return tuple(asks)


def _ask(wait: PendingWait) -> AskSummary:
    question = wait.get("question", "")
    if (short_question := _clip(question, _MAX_QUESTION)) != question:
        short_question += "…"
    return AskSummary(
        wait["id"],
        wait.get("nonce", ""),
        short_question,
        wait.get("to", ""),
        wait.get("since", ""),
        wait.get("expiresAt", ""),
        tuple(wait.get("options", ())),
    )


def _ended_by(execution: Mapping[str, Any]) -> str | None:
    keys = execution.get("failed")
    if keys is None or execution.get("reason"):
        return None
    return _clip(keys[0], _MAX_STEP) if keys else ""


def read_summary(data: bytes) -> Summary:
    """Decode a stored summary; if it is empty or unknown, return only defaults."""
    try:
        return _decoder.decode(data) if data else Summary()
    except msgspec.MsgspecError:
        return Summary()


def _first_line(record: Any) -> str:
    """Return the first line of a recorded error."""
    # A record that was just created is not a dict yet.
    fields = record if isinstance(record, dict) else loads(dumps(record))
    error, cause = fields.get("error"), fields.get("cause") or {}
    name, message = cause.get("name"), cause.get("message") or cause.get("stringRepresentation")
    parts = [error] if isinstance(error, str) else [name, message]
    return ": ".join(filter(None, parts)).partition("\n")[0]


def _clip(text: str, size: int) -> str:
    """Shorten the text so that its JSON has at most `size` bytes."""
    if len(text) * _LONGEST_ESCAPE + 2 <= size:
        return text
    text = text[:size]
    while len(_encoder.encode(text)) > size:
        text = text[: len(text) * 3 // 4]
    return text
