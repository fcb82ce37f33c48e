"""Export a run as a bundle: JSON with a checksum that can be kept, sent, or imported elsewhere."""

import hashlib
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import msgspec
from msgspec.structs import asdict, replace

from perdure.clock import isoformat
from perdure.errors import InvalidArgument
from perdure.insights.chunks import JsonWriter, UserValue, chunks
from perdure.insights.model import Bundle, BundleMessage, Json
from perdure.insights.redaction import Path, Redact
from perdure.insights.run import read_json
from perdure.insights.state import RunState
from perdure.insights.steps import step_path
from perdure.store import Message

Read: TypeAlias = Callable[[Json, Path], Json]

_EXPECTED = "a bundle that `perdure export` or Insights.export() made"


def bundle_of(state: RunState, messages: list[Message]) -> Bundle:
    """Return a run with its snapshot and inbox, redacted."""
    read = state.redact.value
    snapshot = redacted_snapshot(state.snapshot, state.redact, read)
    inbox = tuple(_message(each, read) for each in messages)
    is_redacted = snapshot != state.snapshot or any(
        each.payload != read_json(message.payload)
        for each, message in zip(inbox, messages, strict=True)
    )
    bundle = replace(_head(state), redacted=is_redacted, snapshot=snapshot, inbox=inbox)
    return replace(bundle, checksum=checksum_of(bundle))


def _head(state: RunState) -> Bundle:
    row = state.row
    return Bundle(
        run_id=row.id,
        workflow=row.workflow,
        version=row.version,
        status=row.status,
        queue=row.queue,
        tags=row.tags,
        exported_at=isoformat(state.now),
        redacted=False,
        snapshot=None,
    )


def bundle_chunks(state: RunState, messages: list[Message]) -> Iterator[bytes]:
    """Yield the JSON of the same bundle in chunks."""
    return chunks(_bundle_pieces(state, messages))


def _bundle_pieces(state: RunState, messages: list[Message]) -> Iterator[bytes]:
    writer = JsonWriter(state.redact)
    snapshot = redacted_snapshot(state.snapshot, state.redact, UserValue)
    inbox = [asdict(_message(each, UserValue)) for each in messages]
    fields = {**asdict(_head(state)), "snapshot": snapshot, "inbox": inbox}
    # These two depend on all others, so they are the last.
    del fields["redacted"], fields["checksum"]
    yield b"{"
    yield from writer.members(fields)
    is_redacted = writer.has_hidden or _has_changed(snapshot, state.snapshot)
    checksum = _checksum({**fields, "redacted": is_redacted, "checksum": ""}, state.redact)
    end = {"redacted": is_redacted, "checksum": checksum}
    yield b"," + msgspec.json.encode(end)[1:]


def _checksum(fields: dict[str, Any], redact: Redact) -> str:
    """Return the same as `checksum_of`: what was written in the order of a snapshot is sorted."""
    digest = hashlib.sha256()
    for piece in JsonWriter(redact, is_sorted=True).pieces(fields):
        digest.update(piece)
    return digest.hexdigest()


def _has_changed(snapshot: Any, original: Any) -> bool:
    """Return whether something was hidden besides the values of users."""
    if isinstance(snapshot, UserValue):
        return False
    if isinstance(snapshot, dict):
        return any(_has_changed(each, original[name]) for name, each in snapshot.items())
    return bool(snapshot != original)


def value_chunks(value: UserValue, redact: Redact) -> Iterator[bytes]:
    """Yield the JSON of one value in chunks, redacted."""
    return chunks(JsonWriter(redact).pieces(value))


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


def redacted_snapshot(snapshot: Any, redact: Redact, read: Read) -> Any:
    """Return a copy of a snapshot in which everything is redacted.

    `read` returns what stands for a value of a user at a path.
    """
    if redact.is_off:
        return snapshot
    steps = {
        key: _record(record, redact, step_path(key, record), read)
        for key, record in snapshot["steps"].items()
    }
    execution = _texts(snapshot["execution"], redact, ("execution",))
    old_execution = snapshot["execution"]
    if "output" in old_execution:
        execution["output"] = read(old_execution["output"], ("output",))
    if isinstance(old_execution.get("error"), dict):
        execution["error"] = _record(old_execution["error"], redact, ("output",), read)
    copy = {**snapshot, "steps": steps, "execution": execution}
    if isinstance(metadata := snapshot.get("metadata"), dict):
        copy["metadata"] = _texts(metadata, redact, ("metadata",))
        if "input" in metadata:
            copy["metadata"]["input"] = read(metadata["input"], ("payload",))
    return copy


def _record(record: Any, redact: Redact, path: Path, read: Read) -> Any:
    redacted = dict(record)
    for name in ("value", "error", "arguments"):
        if name in redacted:
            redacted[name] = read(redacted[name], path)
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


def _message(message: Message, read: Read) -> BundleMessage:
    payload = read(read_json(message.payload), ("inbox", message.name))
    return BundleMessage(message.name, payload, isoformat(message.sent_at), message.id)
