"""Convert step records to and from awaitly's first text format of a resume state.

In this format, the fields of a failure's cause have other names than in a snapshot, the cause is
written twice (in the result and in `meta`), and causes cannot be nested. Nested causes and
perdure's other fields are written to fields that other readers of the format ignore.
"""

from collections.abc import Mapping
from typing import Any

from perdure.errors import StateFormatError

OUTCOME = frozenset({"ok", "value", "error", "cause", "meta"})

_CAUSE_FIELDS = {"name": "errorName", "message": "errorMessage", "stack": "errorStack"}
_RECORD_FIELDS = {field: name for name, field in _CAUSE_FIELDS.items()}


def entry_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record as an entry of the text format."""
    entry: dict[str, Any]
    if record["ok"]:
        entry = {"result": {"ok": True, "value": record.get("value")}}
    else:
        result: dict[str, Any] = {"ok": False, "error": record["error"]}
        origin = record["meta"]["origin"]
        meta = {"origin": origin}
        if "cause" in record:
            result["cause"] = cause = _write_cause(record["cause"])
            meta["thrown" if origin == "throw" else "resultCause"] = cause
        entry = {"result": result, "meta": meta}
    facts = {name: fact for name, fact in record.items() if name not in OUTCOME}
    return {**entry, "facts": facts} if facts else entry


def record_of(key: str, entry: Any) -> dict[str, Any]:
    """Return an entry of the text format as a record, or raise `StateFormatError`."""
    result = _object(_object(entry, key).get("result"), key, "result")
    facts = _object(entry.get("facts", {}), key, "facts")
    if result.get("ok") is True:
        return {"ok": True, "value": result.get("value"), **facts}
    if result.get("ok") is not False or "error" not in result:
        raise StateFormatError(f"entry {key!r}: `ok` is not a boolean, or `error` is missing")
    meta = _object(entry.get("meta", {}), key, "meta")
    origin = "throw" if meta.get("origin") == "throw" else "result"
    record = {"ok": False, "error": result["error"], "meta": {"origin": origin}, **facts}
    entry_cause = result.get("cause", meta.get("thrown", meta.get("resultCause")))
    if entry_cause is not None and (cause := _read_cause(key, entry_cause)) is not None:
        record["cause"] = cause
    return record


def _write_cause(cause: Mapping[str, Any]) -> dict[str, Any]:
    if cause["type"] == "thrown":
        return {"type": "value", "value": cause.get("value", cause["stringRepresentation"])}
    entry_cause = {_CAUSE_FIELDS.get(name, name): part for name, part in cause.items()}
    if isinstance(cause.get("cause"), Mapping):
        entry_cause["cause"] = _write_cause(cause["cause"])
    return entry_cause


def _read_cause(key: str, entry_cause: Any) -> dict[str, Any] | None:
    match _object(entry_cause, key, "cause"):
        case {"type": "undefined"}:
            return None
        case {"type": "value", **parts}:
            value = parts.get("value")
            return {"type": "thrown", "stringRepresentation": str(value), "value": value}
        case {"type": "error", **parts}:
            fields = {_RECORD_FIELDS.get(name, name): part for name, part in parts.items()}
            cause = {"type": "error", "name": "Error", "message": "Unknown error", **fields}
            if "cause" in fields:
                cause["cause"] = _read_cause(key, fields["cause"])
            return cause
        case _:
            raise StateFormatError(f"entry {key!r}: unknown `type` of the cause")


def _object(part: Any, key: str, name: str = "") -> dict[str, Any]:
    if not isinstance(part, dict):
        prefix = f"`{name}`: " if name else ""
        kind = type(part).__name__
        raise StateFormatError(f"entry {key!r}: {prefix}expected an object, got {kind}")
    return part
