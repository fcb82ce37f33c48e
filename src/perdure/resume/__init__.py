"""Resume states: what the finished steps of a run gave, to be handed to the next run.

`ResumeStateCollector` gathers one from a run's events, `stringify_state` and `parse_state` turn it
into text and back, and `StatePersistence` keeps such texts in any key-value store. A snapshot holds
more (how far the run is, its metadata) and is given as `snapshot=`, not as `resume_state=`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeGuard, cast, overload

from perdure import codec
from perdure.clock import isoformat
from perdure.errors import CodecError, InvalidArgument, StateFormatError, StepError
from perdure.events import StepCacheHit, StepComplete
from perdure.keyvalue import AsyncKeyValue, KeyValueStore, as_keyvalue
from perdure.result import Err, Ok, Result
from perdure.resume.text import OUTCOME, entry_of, record_of
from perdure.snapshot import Origin, Snapshot, StepRecord

_VERSION = 1
_KIND = "ResumeState"
# Only records with a time are known as perdure's own, whose tags are read.
_SOME_TIME = "1970-01-01T00:00:00.000Z"


@dataclass(frozen=True, slots=True)
class ResumeEntry:
    """What one step gave.

    `origin` tells of a failure whether it was returned as `Err` ("result") or raised ("throw").
    `facts` are the other fields of the step's record; with `typed` among them, the value is data
    from which the step's return type is rebuilt. `told` is a failure's cause as it was recorded:
    from it, its class comes back where it is declared.
    """

    result: Result[Any, Any]
    origin: Origin | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    told: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class ResumeState:
    """The finished steps of a run by key, in the order they were recorded.

    A run that gets it answers these steps from here, failures too; to have failed steps run again,
    leave them out:

        ResumeState({key: entry for key, entry in state.steps.items() if entry.result.ok})
    """

    steps: Mapping[str, ResumeEntry] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.steps, Mapping):
            raise InvalidArgument("steps", self.steps, "a dict of ResumeEntry by step key")
        for key, entry in self.steps.items():
            if not isinstance(key, str) or not isinstance(entry, ResumeEntry):
                raise InvalidArgument(f"steps[{key!r}]", entry, "a ResumeEntry under a text")
        object.__setattr__(self, "steps", dict(self.steps))


class ResumeStateCollector:
    """Gathers a resume state from the events of a run.

    Steps that answered from a record are gathered like those that ran, so the state of a resumed
    run holds the earlier steps too.

        collector = ResumeStateCollector()
        workflow = Workflow("checkout", deps, on_event=collector.handle_event)
    """

    def __init__(self) -> None:
        self._steps: dict[str, ResumeEntry] = {}

    def handle_event(self, event: object) -> None:
        """Take the outcome of a finished step; other events are ignored."""
        if isinstance(event, StepComplete | StepCacheHit):
            facts = {"at": isoformat(event.at), **event.facts}
            self._steps[event.key] = ResumeEntry(event.result, event.origin, facts)

    def resume_state(self) -> ResumeState:
        """Give what was gathered so far; what comes later does not change it."""
        return ResumeState(self._steps)

    def clear(self) -> None:
        """Forget what was gathered; states given out before stay as they are."""
        self._steps.clear()


@overload
def is_step_complete(state: ResumeState | None, key: str, /) -> bool: ...
@overload
def is_step_complete(event: object, /) -> TypeGuard[StepComplete]: ...
def is_step_complete(subject: object, key: str | None = None, /) -> bool:
    """Tell whether a state holds the step, success or failure; or whether an event ends a step.

    is_step_complete(state, "user:123")
    is_step_complete(event)
    """
    if key is None:
        return isinstance(subject, StepComplete)
    if not isinstance(key, str):
        raise InvalidArgument("key", key, "the key of a step")
    state = as_resume_state(subject, "state")
    return state is not None and key in state.steps


def as_resume_state(value: object, parameter: str = "resume_state") -> ResumeState | None:
    """Give the state, or None for None; else a `StateFormatError` says what to do instead."""
    if value is None or isinstance(value, ResumeState):
        return value
    if isinstance(value, Mapping) and "formatVersion" in value:
        what, hint = "a snapshot", "pass it as snapshot=, or convert it with state_of(snapshot)"
    elif isinstance(value, Mapping) and ("kind" in value or "entries" in value):
        what, hint = "a serialized state", "read it with deserialize_state"
    elif isinstance(value, str | bytes):
        what, hint = "text", "read it with parse_state"
    else:
        what, hint = type(value).__name__, "ResumeStateCollector and parse_state give one"
    raise StateFormatError(f"{parameter}: got {what}, wanted a ResumeState; {hint}")


def stringify_state(state: ResumeState, /, **metadata: Any) -> str:
    """Give the state as JSON text of the form `{version, entries, metadata?}`.

    Values that JSON lacks are tagged and come back as they were.
    """
    document: dict[str, Any] = {
        "version": _VERSION,
        "entries": {key: entry_of(record) for key, record in _records(state)},
    }
    if metadata:
        document["metadata"] = codec.prepare(metadata, lambda: None).data
    return codec.dumps(document).decode()


def parse_state(text: str | bytes, /) -> ResumeState:
    """Give the state of a text in either form, `{version, entries}` or `{kind, steps}`."""
    document = _parse(text)
    if document.get("kind") == _KIND:
        return deserialize_state(document)
    return _state(_raw_records(document))


def serialize_state(state: ResumeState, /) -> dict[str, Any]:
    """Give the state as plain JSON: `{"kind": "ResumeState", "steps": [[key, record], …]}`."""
    return {"kind": _KIND, "steps": [[key, record] for key, record in _records(state)]}


def deserialize_state(document: object, /) -> ResumeState:
    """Give the state that `serialize_state` made plain."""
    match document:
        case {"kind": "ResumeState", "steps": list(pairs)}:
            return _state(dict(_check_pair(pair) for pair in pairs))
        case _:
            expected = '{"kind": "ResumeState", "steps": [[key, record], …]}'
            raise StateFormatError(
                f"this is no serialized resume state, which looks so: {expected}"
            )


def records_of(state: ResumeState, /) -> dict[str, StepRecord]:
    """Give the state's steps as the records of a snapshot, in order."""
    return {key: cast("StepRecord", _with_cause(record)) for key, record in _records(state)}


def state_of(snapshot: Snapshot, /) -> ResumeState:
    """Give the steps of a snapshot as a resume state."""
    return _state(snapshot["steps"])


class StatePersistence:
    """Keeps the resume states of runs in a key-value store, each as text under `prefix` + run id.

    `kv` is a `KeyValueStore` or a `py-key-value-aio` driver. What lies there and is no resume state
    is a `StateFormatError`, and never "no state": a run would begin anew and do everything twice.
    """

    def __init__(self, kv: KeyValueStore | AsyncKeyValue, prefix: str = "workflow:state:") -> None:
        self._kv = as_keyvalue(kv, "kv")
        if not isinstance(prefix, str):
            raise InvalidArgument("prefix", prefix, "text")
        self._prefix = prefix

    async def save(self, run_id: str, state: ResumeState, /, **metadata: Any) -> None:
        """Keep the state in place of an earlier one."""
        if not isinstance(state, ResumeState):
            as_resume_state(state, "state")
            raise StateFormatError("state: got None, wanted a ResumeState")
        await self._kv.set(self._key(run_id), stringify_state(state, **metadata))

    async def load(self, run_id: str, /) -> ResumeState | None:
        """Give the state, or None when there is none."""
        text = await self._kv.get(self._key(run_id))
        return parse_state(text) if text else None

    async def load_raw(self, run_id: str, /) -> dict[str, Any] | None:
        """Give the stored document itself, with `version`, `entries` and `metadata`, or None."""
        text = await self._kv.get(self._key(run_id))
        return _parse(text) if text else None

    async def delete(self, run_id: str, /) -> bool:
        """Remove the state; tell whether there was one."""
        return await self._kv.delete(self._key(run_id))

    async def list(self) -> list[str]:
        """Give the ids of all runs that have a state."""
        keys = await self._kv.keys(self._prefix + "*")
        # A `*` in the prefix itself would match more than the prefix.
        return [key.removeprefix(self._prefix) for key in keys if key.startswith(self._prefix)]

    def _key(self, run_id: object) -> str:
        if not isinstance(run_id, str) or not run_id:
            raise InvalidArgument("run_id", run_id, "a non-empty text")
        return self._prefix + run_id


def _records(state: ResumeState) -> Iterator[tuple[str, dict[str, Any]]]:
    if not isinstance(state, ResumeState):
        as_resume_state(state, "state")
        raise StateFormatError("state: got None, wanted a ResumeState")
    for key, entry in state.steps.items():
        try:
            yield key, {**_outcome(entry), **entry.facts}
        except CodecError as error:
            raise CodecError(f"the value of step {key!r} cannot be written: {error}") from error


def _outcome(entry: ResumeEntry) -> dict[str, Any]:
    result = entry.result
    if isinstance(result, Ok):
        return _success(result.value, entry.facts)
    raised = isinstance(result.error, BaseException) and entry.origin != "result"
    told = entry.told or _told(result, raised)
    outcome: dict[str, Any] = {
        "ok": False,
        "error": _summary(told or {}) if raised else None,
        "meta": {"origin": entry.origin or ("throw" if raised else "result")},
    }
    if not raised:
        error = codec.prepare(result.error, lambda: type(result.error))
        outcome["error"] = error.data
        if error.typed:
            outcome["typed"] = True
    return outcome if told is None else {**outcome, "cause": told}


def _told(failure: Err[Any], raised: bool) -> Mapping[str, Any] | None:
    error, cause = failure.error, failure.cause
    if not raised:
        return None if cause is None else codec.encode_cause(cause)
    if isinstance(error, StepError):
        # It stands for an exception whose class is not known here, and that one is told.
        if isinstance(cause, BaseException):
            return codec.encode_cause(cause)
        stack = {"stack": error.traceback} if error.traceback else {}
        return {"type": "error", "name": error.name, "message": error.message, **stack}
    return codec.encode_cause(error)


def _success(value: Any, facts: Mapping[str, Any]) -> dict[str, Any]:
    if facts.get("typed"):
        return {"ok": True, "value": value}
    data, _, typed, _ = codec.prepare(value, lambda: type(value))
    outcome = {"ok": True, "value": data}
    if data is not value:
        outcome |= {"at": _SOME_TIME, "coded": True}
    return {**outcome, "typed": True} if typed else outcome


def _summary(told: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": told.get("name", ""), "message": told.get("message", "")}


def _with_cause(record: dict[str, Any]) -> dict[str, Any]:
    # A snapshot's failure always has a cause; where none is known, the error itself.
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
            raise StateFormatError(f"step {key!r}: its record has no boolean `ok`, or no `error`")
    try:
        if record["ok"]:
            value = record.get("value")
            return ResumeEntry(
                Ok(value if facts.get("typed") else codec.decode(value)), None, facts
            )
        return _failure(record, facts)
    except (CodecError, TypeError, AttributeError, LookupError) as error:
        raise StateFormatError(f"step {key!r}: its record cannot be read: {error}") from error


def _failure(record: Mapping[str, Any], facts: Mapping[str, Any]) -> ResumeEntry:
    meta = record.get("meta") or {}
    origin: Origin = "throw" if meta.get("origin") == "throw" else "result"
    told = record.get("cause")
    if told is None or meta.get("causeless"):
        return ResumeEntry(Err(codec.decode(record["error"])), origin, facts)
    cause = codec.decode_cause(told)
    if isinstance(cause, BaseException) and record["error"] == _summary(told):
        return ResumeEntry(Err(cause, cause.__cause__), origin, facts, told)
    return ResumeEntry(Err(codec.decode(record["error"]), cause), origin, facts, told)


def _parse(text: str | bytes) -> dict[str, Any]:
    if not isinstance(text, str | bytes):
        raise StateFormatError(
            f"text: got {type(text).__name__}, wanted the text of a resume state"
        )
    try:
        document = codec.loads(text)
    except CodecError as error:
        raise StateFormatError(
            f"this is no resume state but text that is no JSON: {error}"
        ) from error
    if not isinstance(document, dict):
        raise StateFormatError("this is no resume state: a JSON object was wanted")
    if "formatVersion" in document:
        as_resume_state(document, "text")
    return document


def _raw_records(document: dict[str, Any]) -> dict[str, Any]:
    version = document.get("version", _VERSION)
    if version != _VERSION:
        raise StateFormatError(
            f"this resume state has version {version!r}; {_VERSION} is known here"
        )
    entries = document.get("entries")
    if not isinstance(entries, dict):
        raise StateFormatError("this is no resume state: its `entries` are missing or no object")
    return {key: record_of(key, entry) for key, entry in entries.items()}


def _check_pair(pair: Any) -> tuple[str, Any]:
    match pair:
        case [str(key), dict(record)]:
            return key, record
        case _:
            raise StateFormatError("each of `steps` is a pair of a key and a record")
