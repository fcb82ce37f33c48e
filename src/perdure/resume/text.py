"""Step records in the first text format of a resume state, and back.

There a failure's cause is named by other words than in a snapshot, stands twice (in the result and
in `meta`), and has no causes of its own. The causes of causes and what else perdure records ride in
fields that other readers of the format ignore.
"""

from collections.abc import Mapping
from typing import Any

from perdure.errors import StateFormatError

OUTCOME = frozenset({"ok", "value", "error", "cause", "meta"})

_CAUSE_WORDS = {"name": "errorName", "message": "errorMessage", "stack": "errorStack"}
_RECORD_WORDS = {word: name for name, word in _CAUSE_WORDS.items()}


def entry_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """Give a record as an entry of the text format."""
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
    """Give an entry of the text format as a record; what is not one is a `StateFormatError`."""
    result = _object(_object(entry, key).get("result"), key, "result")
    facts = _object(entry.get("facts", {}), key, "facts")
    if result.get("ok") is True:
        return {"ok": True, "value": result.get("value"), **facts}
    if result.get("ok") is not False or "error" not in result:
        raise StateFormatError(f"entry {key!r}: its result has no boolean `ok`, or no `error`")
    meta = _object(entry.get("meta", {}), key, "meta")
    origin = "throw" if meta.get("origin") == "throw" else "result"
    record = {"ok": False, "error": result["error"], "meta": {"origin": origin}, **facts}
    written = result.get("cause", meta.get("thrown", meta.get("resultCause")))
    if written is not None and (cause := _read_cause(key, written)) is not None:
        record["cause"] = cause
    return record


def _write_cause(cause: Mapping[str, Any]) -> dict[str, Any]:
    if cause["type"] == "thrown":
        return {"type": "value", "value": cause.get("value", cause["stringRepresentation"])}
    written = {_CAUSE_WORDS.get(name, name): part for name, part in cause.items()}
    if isinstance(cause.get("cause"), Mapping):
        written["cause"] = _write_cause(cause["cause"])
    return written


def _read_cause(key: str, written: Any) -> dict[str, Any] | None:
    match _object(written, key, "cause"):
        case {"type": "undefined"}:
            return None
        case {"type": "value", **parts}:
            value = parts.get("value")
            return {"type": "thrown", "stringRepresentation": str(value), "value": value}
        case {"type": "error", **parts}:
            read = {_RECORD_WORDS.get(word, word): part for word, part in parts.items()}
            cause = {"type": "error", "name": "Error", "message": "Unknown error", **read}
            if "cause" in read:
                cause["cause"] = _read_cause(key, read["cause"])
            return cause
        case _:
            raise StateFormatError(f"entry {key!r}: its cause has no known `type`")


def _object(part: Any, key: str, name: str = "") -> dict[str, Any]:
    if not isinstance(part, dict):
        what = f"its {name} is" if name else "it is"
        raise StateFormatError(f"entry {key!r}: {what} no object but {type(part).__name__}")
    return part
