"""Convert resume states to JSON and to step records of snapshots."""

from collections.abc import Iterator, Mapping
from typing import Any, cast

from perdure import codec
from perdure.errors import CodecError, StateFormatError, StepError
from perdure.result import Err, Ok
from perdure.resume.state import ResumeEntry, ResumeState, as_resume_state, check_resume_state
from perdure.resume.text import OUTCOME, entry_of, record_of
from perdure.snapshot import Origin, Snapshot, StepRecord

_VERSION = 1
_KIND = "ResumeState"
# Tags are read only in records with a time; records without one were not written by perdure.
_ANY_TIME = "1970-01-01T00:00:00.000Z"


def stringify_state(state: ResumeState, /, **metadata: Any) -> str:
    """Return the state as a JSON string of the form `{version, entries, metadata?}`.

    Values of types that JSON lacks are tagged, and `parse_state` restores them.
    """
    document: dict[str, Any] = {
        "version": _VERSION,
        "entries": {key: entry_of(record) for key, record in _records(state)},
    }
    if metadata:
        document["metadata"] = codec.prepare(metadata, lambda: None).data
    return codec.dumps(document).decode()


def parse_state(text: str | bytes, /) -> ResumeState:
    """Parse a JSON string of either form, `{version, entries}` or `{kind, steps}`."""
    document = parse_document(text)
    if document.get("kind") == _KIND:
        return deserialize_state(document)
    return _state(_raw_records(document))


def serialize_state(state: ResumeState, /) -> dict[str, Any]:
    """Return the state as plain JSON: `{"kind": "ResumeState", "steps": [[key, record], …]}`."""
    return {"kind": _KIND, "steps": [[key, record] for key, record in _records(state)]}


def deserialize_state(document: object, /) -> ResumeState:
    """Return the state that `serialize_state` converted to plain JSON."""
    match document:
        case {"kind": "ResumeState", "steps": list(pairs)}:
            return _state(dict(_check_pair(pair) for pair in pairs))
        case _:
            expected = '{"kind": "ResumeState", "steps": [[key, record], …]}'
            raise StateFormatError(f"not a serialized resume state: expected {expected}")


def records_of(state: ResumeState, /) -> dict[str, StepRecord]:
    """Return the state's steps as the records of a snapshot, in order."""
    return {key: cast("StepRecord", _with_cause(record)) for key, record in _records(state)}


def state_of(snapshot: Snapshot, /) -> ResumeState:
    """Return the steps of a snapshot as a resume state."""
    return _state(snapshot["steps"])


def parse_document(text: str | bytes) -> dict[str, Any]:
    """Parse the JSON object of a resume state without reading its steps."""
    if not isinstance(text, str | bytes):
        kind = type(text).__name__
        raise StateFormatError(f"text: expected a resume state as a JSON string, got {kind}")
    try:
        document = codec.loads(text)
    except CodecError as error:
        raise StateFormatError(f"not a resume state: {error}") from error
    if not isinstance(document, dict):
        kind = type(document).__name__
        raise StateFormatError(f"not a resume state: expected a JSON object, got {kind}")
    if "formatVersion" in document:
        as_resume_state(document, "text")
    return document


def _records(state: ResumeState) -> Iterator[tuple[str, dict[str, Any]]]:
    for key, entry in check_resume_state(state).steps.items():
        try:
            yield key, {**_outcome(entry), **entry.facts}
        except CodecError as error:
            raise CodecError(f"the value of step {key!r} cannot be encoded: {error}") from error


def _outcome(entry: ResumeEntry) -> dict[str, Any]:
    result = entry.result
    if isinstance(result, Ok):
        return _success(result.value, entry.facts)
    was_raised = isinstance(result.error, BaseException) and entry.origin != "result"
    cause = entry.serialized_cause or _serialized_cause(result, was_raised)
    outcome: dict[str, Any] = {
        "ok": False,
        "error": _summary(cause or {}) if was_raised else None,
        "meta": {"origin": entry.origin or ("throw" if was_raised else "result")},
    }
    if not was_raised:
        error = codec.prepare(result.error, lambda: type(result.error))
        outcome["error"] = error.data
        if error.typed:
            outcome["typed"] = True
    return outcome if cause is None else {**outcome, "cause": cause}


def _serialized_cause(failure: Err[Any], was_raised: bool) -> Mapping[str, Any] | None:
    error, cause = failure.error, failure.cause
    if not was_raised:
        return None if cause is None else codec.encode_cause(cause)
    if isinstance(error, StepError):
        # This error stands in for an exception whose class is unknown: store that exception
        # instead.
        if (stored_cause := codec.recorded_cause(error)) is not None:
            return {**stored_cause}
        stack = {"stack": error.traceback} if error.traceback else {}
        return {"type": "error", "name": error.name, "message": error.message, **stack}
    # A function saw these classes, so it will find them again.
    classes = {type(error), *(type(member) for member in codec.members_of(error))}
    return codec.encode_cause(error, codec.ErrorScope(tuple(classes)))


def _success(value: Any, facts: Mapping[str, Any]) -> dict[str, Any]:
    if facts.get("typed"):
        return {"ok": True, "value": value}
    data, _, is_typed, _ = codec.prepare(value, lambda: type(value))
    outcome = {"ok": True, "value": data}
    if data is not value:
        outcome |= {"at": _ANY_TIME, "coded": True}
    return {**outcome, "typed": True} if is_typed else outcome


def _summary(cause: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": cause.get("name", ""), "message": cause.get("message", "")}


def _with_cause(record: dict[str, Any]) -> dict[str, Any]:
    # In a snapshot every failure has a cause: the error itself if there is no other.
    if record["ok"] or "cause" in record:
        return record
    cause = codec.encode_cause(codec.decode(record["error"]))
    return {**record, "cause": cause, "meta": {**record["meta"], "causeless": True}}


def _state(records: Mapping[str, Any]) -> ResumeState:
    return ResumeState({key: _entry(key, record) for key, record in records.items()})


def _entry(key: str, record: Any) -> ResumeEntry:
    match record:
        case {"ok": True} | {"ok": False, "error": _}:
            facts = {name: fact for name, fact in record.items() if name not in OUTCOME}
        case _:
            raise StateFormatError(f"step {key!r}: `ok` is not a boolean, or `error` is missing")
    try:
        if not record["ok"]:
            return _failure(record, facts)
        value = record.get("value")
        return ResumeEntry(Ok(value if facts.get("typed") else codec.decode(value)), None, facts)
    except (CodecError, TypeError, AttributeError, LookupError) as error:
        raise StateFormatError(f"step {key!r}: the record cannot be read: {error}") from error


def _failure(record: Mapping[str, Any], facts: Mapping[str, Any]) -> ResumeEntry:
    meta = record.get("meta") or {}
    origin: Origin = "throw" if meta.get("origin") == "throw" else "result"
    serialized = record.get("cause")
    if serialized is None or meta.get("causeless"):
        return ResumeEntry(Err(codec.decode(record["error"])), origin, facts)
    cause = codec.decode_cause(serialized)
    if isinstance(cause, BaseException) and record["error"] == _summary(serialized):
        return ResumeEntry(Err(cause, cause.__cause__), origin, facts, serialized)
    return ResumeEntry(Err(codec.decode(record["error"]), cause), origin, facts, serialized)


def _raw_records(document: dict[str, Any]) -> dict[str, Any]:
    version = document.get("version", _VERSION)
    if version != _VERSION:
        raise StateFormatError(
            f"not a resume state of version {_VERSION}: its version is {version!r}"
        )
    entries = document.get("entries")
    if not isinstance(entries, dict):
        raise StateFormatError("not a resume state: `entries` is missing or not an object")
    return {key: record_of(key, entry) for key, entry in entries.items()}


def _check_pair(pair: Any) -> tuple[str, Any]:
    match pair:
        case [str(key), dict(record)]:
            return key, record
        case _:
            raise StateFormatError(
                "not a serialized resume state: `steps` must be pairs of a key and a record"
            )
