"""Export a run as a bundle: JSON with a checksum that can be kept, sent, or imported elsewhere."""

import hashlib
from typing import Any

import msgspec
from msgspec.structs import replace

from perdure.clock import isoformat
from perdure.errors import InvalidArgument
from perdure.insights.model import Bundle, BundleMessage, Json
from perdure.insights.redaction import Path, Redact
from perdure.insights.run import read_json
from perdure.insights.state import RunState
from perdure.insights.steps import step_path
from perdure.store import Message

_EXPECTED = "a bundle that `perdure export` or Insights.export() made"


def bundle_of(state: RunState, messages: list[Message]) -> Bundle:
    """Return a run with its snapshot and inbox, redacted."""
    snapshot = redacted_snapshot(state.snapshot, state.redact)
    inbox = tuple(_message(each, state.redact) for each in messages)
    is_redacted = snapshot != state.snapshot or any(
        each.payload != read_json(message.payload)
        for each, message in zip(inbox, messages, strict=True)
    )
    row = state.row
    bundle = Bundle(
        run_id=row.id,
        workflow=row.workflow,
        version=row.version,
        status=row.status,
        queue=row.queue,
        tags=row.tags,
        exported_at=isoformat(state.now),
        redacted=is_redacted,
        snapshot=snapshot,
        inbox=inbox,
    )
    return replace(bundle, checksum=checksum_of(bundle))


def read_bundle(data: Json) -> Bundle:
    """Read a bundle from plain JSON values, or raise `InvalidArgument` if it was changed."""
    try:
        bundle = msgspec.convert(data, Bundle)
    except msgspec.ValidationError as error:
        raise InvalidArgument("bundle", data, _EXPECTED, str(error)) from None
    if bundle.checksum != checksum_of(bundle):
        hint = "Its checksum does not match: it was changed or cut off. Export the run again"
        raise InvalidArgument("bundle", data, _EXPECTED, hint)
    return bundle


def checksum_of(bundle: Bundle) -> str:
    """Return the SHA-256 of a bundle without its checksum, whatever the order of its keys."""
    data = msgspec.json.encode(replace(bundle, checksum=""), order="sorted")
    return hashlib.sha256(data).hexdigest()


def redacted_snapshot(snapshot: Any, redact: Redact) -> Any:
    """Return a copy of a snapshot in which everything a user stored is redacted."""
    if redact.is_off:
        return snapshot
    steps = {
        key: _record(record, redact, step_path(key, record))
        for key, record in snapshot["steps"].items()
    }
    execution = _texts(snapshot["execution"], redact, ("execution",))
    old_execution = snapshot["execution"]
    if "output" in old_execution:
        execution["output"] = redact.value(old_execution["output"], ("output",))
    if isinstance(old_execution.get("error"), dict):
        execution["error"] = _record(old_execution["error"], redact, ("output",))
    copy = {**snapshot, "steps": steps, "execution": execution}
    if isinstance(metadata := snapshot.get("metadata"), dict):
        copy["metadata"] = _texts(metadata, redact, ("metadata",))
        if "input" in metadata:
            copy["metadata"]["input"] = redact.value(metadata["input"], ("payload",))
    return copy


def _record(record: Any, redact: Redact, path: Path) -> Any:
    redacted = dict(record)
    for name in ("value", "error", "arguments"):
        if name in redacted:
            redacted[name] = redact.value(redacted[name], path)
    if "cause" in redacted:
        redacted["cause"] = _texts(redacted["cause"], redact, path)
    return redacted


def _texts(value: Any, redact: Redact, path: Path) -> Any:
    """Redact what surrounds users' values: causes, reasons, acts. Their strings come from code."""
    if isinstance(value, str):
        return redact.text(value)
    if isinstance(value, list):
        return [_texts(item, redact, path) for item in value]
    if isinstance(value, dict):
        return {
            key: redact.value(item, (*path, key))
            if redact.hides((*path, key), item)
            else _texts(item, redact, path)
            for key, item in value.items()
        }
    return value


def _message(message: Message, redact: Redact) -> BundleMessage:
    payload = redact.value(read_json(message.payload), ("inbox", message.name))
    return BundleMessage(message.name, payload, isoformat(message.sent_at), message.id)
