"""Resume states: their collection, their serialized forms and their persistence."""

import json
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest

from perdure import codec
from perdure.errors import InvalidArgument, StateFormatError, StepError
from perdure.events import StepCacheHit, StepComplete, StepStart, WorkflowStart
from perdure.keyvalue import MemoryKeyValue
from perdure.result import Err, Ok, Result
from perdure.resume import (
    ResumeEntry,
    ResumeState,
    ResumeStateCollector,
    StatePersistence,
    as_resume_state,
    deserialize_state,
    is_step_complete,
    parse_state,
    records_of,
    serialize_state,
    state_of,
    stringify_state,
)
from perdure.snapshot import new_snapshot, validate_snapshot

NOW = datetime(2030, 1, 1, tzinfo=UTC)

ERROR_WHY = {"type": "error", "errorName": "Error", "errorMessage": "why", "errorStack": "at …"}
VERSION_1: dict[str, Any] = {
    "version": 1,
    "entries": {
        "user:1": {"result": {"ok": True, "value": {"id": "1"}}},
        "posts:1": {
            "result": {"ok": False, "error": "NOPE", "cause": ERROR_WHY},
            "meta": {"origin": "result", "resultCause": ERROR_WHY},
        },
        "thrown": {
            "result": {
                "ok": False,
                "error": {
                    "type": "UNEXPECTED_ERROR",
                    "cause": {"type": "UNCAUGHT_EXCEPTION", "thrown": {}},
                },
                "cause": ERROR_WHY,
            },
            "meta": {"origin": "throw", "thrown": ERROR_WHY},
        },
        "causeless": {
            "result": {"ok": False, "error": {"type": "X"}},
            "meta": {"origin": "result"},
        },
    },
    "metadata": {"workflowId": "wf-123", "timestamp": 1},
}
KIND_RESUME_STATE: dict[str, Any] = {
    "kind": "ResumeState",
    "steps": [
        ["user:1", {"ok": True, "value": {"x": 1}}],
        [
            "b",
            {
                "ok": False,
                "error": "E",
                "cause": {"type": "error", "name": "Error", "message": "c", "stack": "at …"},
                "meta": {"origin": "result"},
            },
        ],
    ],
}


@dataclass
class User:
    name: str
    since: datetime


def complete(key: str, result: Result[Any, Any], origin: Any = None) -> StepComplete:
    return StepComplete(
        workflow="w", run_id="r", at=NOW, step=key, key=key, duration=timedelta(0), result=result,
        origin=origin,
    )  # fmt: skip


def hit(key: str, result: Result[Any, Any]) -> StepCacheHit:
    return StepCacheHit(workflow="w", run_id="r", at=NOW, step=key, key=key, result=result)


def state(**results: Result[Any, Any]) -> ResumeState:
    return ResumeState({key: ResumeEntry(result) for key, result in results.items()})


def results(state: ResumeState) -> dict[str, Result[Any, Any]]:
    return {key: entry.result for key, entry in state.steps.items()}


class TestCollector:
    def test_collects_finished_steps_in_order(self) -> None:
        """Successes and failures; other events are ignored."""
        collector = ResumeStateCollector()
        collector.handle_event(WorkflowStart(workflow="w", run_id="r", at=NOW))
        collector.handle_event(StepStart(workflow="w", run_id="r", at=NOW, step="z", key="z"))
        collector.handle_event(complete("b", Ok(1)))
        collector.handle_event(complete("a", Err("NOPE"), "result"))
        assert list(collector.resume_state().steps) == ["b", "a"]
        assert collector.resume_state().steps["a"].origin == "result"

    def test_the_state_of_a_resumed_run_contains_the_earlier_steps(self) -> None:
        """A replayed step is collected like one that ran."""
        collector = ResumeStateCollector()
        collector.handle_event(hit("first", Ok(1)))
        collector.handle_event(complete("second", Ok(2)))
        assert results(collector.resume_state()) == {"first": Ok(1), "second": Ok(2)}

    def test_a_repeated_step_keeps_its_position(self) -> None:
        """The last result counts, in the position of the first."""
        collector = ResumeStateCollector()
        for key, value in (("a", 1), ("b", 2), ("a", 3)):
            collector.handle_event(complete(key, Ok(value)))
        assert list(results(collector.resume_state()).items()) == [("a", Ok(3)), ("b", Ok(2))]

    def test_a_returned_state_does_not_change(self) -> None:
        """By later events or by `clear`."""
        collector = ResumeStateCollector()
        collector.handle_event(complete("a", Ok(1)))
        before = collector.resume_state()
        collector.handle_event(complete("b", Ok(2)))
        collector.clear()
        assert list(before.steps) == ["a"]
        assert list(collector.resume_state().steps) == []


class TestText:
    def test_reads_and_writes_version_1(self) -> None:
        """The format `{version, entries, metadata}` is unchanged by a round trip."""
        read = parse_state(json.dumps(VERSION_1))
        assert json.loads(stringify_state(read, **VERSION_1["metadata"])) == VERSION_1

    def test_failures_of_version_1(self) -> None:
        """A returned failure has an error and a cause, a raised one the exception."""
        read = parse_state(json.dumps(VERSION_1))
        assert read.steps["user:1"].result == Ok({"id": "1"})
        posts = read.steps["posts:1"]
        assert isinstance(posts.result, Err)
        assert posts.result.error == "NOPE"
        assert isinstance(posts.result.cause, StepError)
        assert (posts.result.cause.name, posts.result.cause.message) == ("Error", "why")
        assert read.steps["thrown"].origin == "throw"
        assert read.steps["causeless"].result == Err({"type": "X"}, None)

    def test_a_missing_value_is_none(self) -> None:
        """Other writers omit a value that is undefined."""
        text = '{"version":1,"entries":{"a":{"result":{"ok":true}}}}'
        assert parse_state(text).steps["a"].result == Ok(None)

    def test_reads_and_writes_the_newer_form(self) -> None:
        """The format `{kind, steps}` is unchanged by a round trip."""
        assert serialize_state(deserialize_state(KIND_RESUME_STATE)) == KIND_RESUME_STATE

    def test_parse_accepts_both_forms(self) -> None:
        """They are distinguished by their fields."""
        read = parse_state(json.dumps(KIND_RESUME_STATE))
        assert results(read)["user:1"] == Ok({"x": 1})
        assert list(read.steps) == ["user:1", "b"]

    def test_a_missing_cause_stays_missing(self) -> None:
        """It does not become the string "undefined"."""
        failed = state(a=Err("E"))
        (_, record) = serialize_state(failed)["steps"][0]
        assert "cause" not in record
        assert deserialize_state(serialize_state(failed)).steps["a"].result == Err("E", None)
        assert parse_state(stringify_state(failed)).steps["a"].result == Err("E", None)

    @pytest.mark.parametrize(
        "value",
        [NOW, Decimal("1.10"), {1, 2}, (1, "a"), b"\xff", {"~datetime": "x"}, {1: 2}, None, 2**70],
    )
    def test_types_that_json_lacks_are_restored(self, value: object) -> None:
        """Their values are tagged."""
        original = state(a=Ok(value), b=Err(value))
        for copy in (
            parse_state(stringify_state(original)),
            deserialize_state(json.loads(json.dumps(serialize_state(original)))),
        ):
            assert results(copy) == {"a": Ok(value), "b": Err(value)}

    def test_a_typed_value_is_restored_by_its_type(self) -> None:
        """An object with fields is stored so that the step's return type can rebuild it."""
        user = User("Ana", NOW)
        for copy in (state(a=Ok(user)), parse_state(stringify_state(state(a=Ok(user))))):
            record = records_of(copy)["a"]
            assert record.get("typed")
            assert codec.decode(record.get("value"), User, typed=True) == user

    def test_a_raised_exception_is_restored(self) -> None:
        """With its class, arguments and causes."""
        error = KeyError("x")
        error.__cause__ = ValueError("below")
        original = ResumeState({"a": ResumeEntry(Err(error, error.__cause__), "throw")})
        for copy in (
            parse_state(stringify_state(original)),
            deserialize_state(serialize_state(original)),
        ):
            result = copy.steps["a"].result
            assert isinstance(result, Err)
            assert isinstance(result.error, KeyError)
            assert result.error.args == ("x",)
            assert isinstance(result.cause, ValueError)
            assert copy.steps["a"].origin == "throw"

    def test_an_exception_of_an_unknown_class_keeps_its_name(self) -> None:
        """It is restored where its class is declared, even after two round trips."""

        class PaymentDeclined(Exception):
            pass

        _, visible, _ = codec.prepare_error(PaymentDeclined("no funds"), codec.NOWHERE)
        original = ResumeState({"a": ResumeEntry(Err(visible, visible.__cause__), "throw")})
        for _ in range(2):
            original = parse_state(stringify_state(original))
        record: Any = records_of(original)["a"]
        assert not record["ok"]
        assert record["cause"] is not None
        restored = codec.decode_cause(record["cause"], codec.ErrorScope([PaymentDeclined]))
        assert isinstance(restored, PaymentDeclined)
        assert restored.args == ("no funds",)

    def test_metadata_are_stored(self) -> None:
        """Keyword arguments become the document's metadata."""
        text = stringify_state(state(), workflow_id="wf-123", tries=[1])
        assert json.loads(text)["metadata"] == {"workflow_id": "wf-123", "tries": [1]}
        assert "metadata" not in json.loads(stringify_state(state()))

    @pytest.mark.parametrize(
        "text",
        [
            "", "nonsense", "[]", "{}", "null", '{"version":1}', '{"version":2,"entries":{}}',
            '{"entries":[]}', '{"entries":{"a":1}}', '{"entries":{"a":{}}}',
            '{"entries":{"a":{"result":{"ok":1}}}}', '{"entries":{"a":{"result":{"ok":false}}}}',
            '{"entries":{"a":{"result":{"ok":false,"error":1,"cause":{"type":"odd"}}}}}',
            '{"entries":{"a":{"result":{"ok":false,"error":1,"cause":5}}}}',
            '{"entries":{"a":{"result":{"ok":true,"value":{"~datetime":"x"}}}}}',
            '{"kind":"ResumeState"}', '{"kind":"ResumeState","steps":[1]}',
            '{"kind":"ResumeState","steps":[["a",{"ok":"yes"}]]}',
            '{"kind":"ResumeState","steps":[["a",{"ok":false,"error":1,"cause":3}]]}',
            '{"kind":"ResumeState","steps":[["a",{"ok":false,"error":1,"meta":3}]]}',
        ],
    )  # fmt: skip
    def test_an_invalid_string_is_an_error(self, text: str) -> None:
        """Always a `StateFormatError`."""
        with pytest.raises(StateFormatError):
            parse_state(text)

    def test_a_snapshot_is_recognized(self) -> None:
        """The error names the option that accepts a snapshot."""
        with pytest.raises(StateFormatError, match="snapshot="):
            parse_state(json.dumps(new_snapshot(now=NOW)))


class TestSnapshots:
    def test_records_are_valid_in_a_snapshot(self) -> None:
        """This includes the record of a failure without a cause."""
        original = state(a=Ok(1), b=Err("E"), c=Err("E", ValueError("x")))
        snapshot = new_snapshot(now=NOW)
        snapshot["steps"] = records_of(original)
        assert validate_snapshot(snapshot).errors == ()
        assert results(state_of(snapshot))["b"] == Err("E", None)

    def test_the_steps_of_a_snapshot_are_restored_from_a_state(self) -> None:
        """With all fields of their records."""
        snapshot = new_snapshot(now=NOW)
        snapshot["steps"] = {
            "a": {"ok": True, "value": {"x": 1}, "typed": True, "at": "2030-01-01T00:00:00.000Z"},
            "a#2": {"ok": True, "value": 2, "at": "2030-01-01T00:00:00.000Z", "branch": "2",
                    "call": "a", "args": "f00"},
        }  # fmt: skip
        assert records_of(state_of(snapshot)) == snapshot["steps"]
        assert records_of(parse_state(stringify_state(state_of(snapshot)))) == snapshot["steps"]


class TestGuards:
    def test_is_step_complete_with_a_state_and_a_key(self) -> None:
        """Successes and failures are complete; `None` contains no step."""
        original = state(a=Ok(1), b=Err("E"))
        answers = [is_step_complete(original, key) for key in "abc"]
        assert answers == [True, True, False]
        assert not is_step_complete(None, "a")

    def test_is_step_complete_with_an_event(self) -> None:
        """With one argument, it returns whether an event is the end of a step."""
        assert is_step_complete(complete("a", Ok(1)))
        assert not is_step_complete(WorkflowStart(workflow="w", run_id="r", at=NOW))

    def test_a_state_and_none_are_accepted(self) -> None:
        """`as_resume_state` returns them unchanged."""
        original = state(a=Ok(1))
        assert as_resume_state(original) is original
        assert as_resume_state(None) is None

    @pytest.mark.parametrize(
        ("value", "hint"),
        [
            (new_snapshot(now=NOW), "snapshot="),
            (KIND_RESUME_STATE, "deserialize_state"),
            ("{}", "parse_state"),
            (5, "ResumeStateCollector"),
        ],
    )
    def test_other_objects_are_refused_with_a_hint(self, value: object, hint: str) -> None:
        """The error names the option or function that accepts such an object."""
        with pytest.raises(StateFormatError, match=hint):
            as_resume_state(value)

    def test_a_state_contains_only_entries(self) -> None:
        """Under string keys."""
        with pytest.raises(InvalidArgument, match="steps"):
            ResumeState(5)  # type: ignore[arg-type]
        with pytest.raises(InvalidArgument, match="'a'"):
            ResumeState({"a": Ok(1)})  # type: ignore[dict-item]


class TestPersistence:
    async def test_stores_states_by_run_id(self) -> None:
        """Save, load, list and delete, under the prefix."""
        kv = MemoryKeyValue()
        persistence = StatePersistence(kv)
        await persistence.save("wf-1", state(a=Ok(1)), user_id="u")
        await kv.set("workflow:other", "x")
        assert await kv.keys() == ["workflow:state:wf-1", "workflow:other"]
        loaded = await persistence.load("wf-1")
        assert loaded is not None
        assert results(loaded) == {"a": Ok(1)}
        raw = await persistence.load_raw("wf-1")
        assert raw is not None
        assert raw["metadata"] == {"user_id": "u"}
        assert await persistence.list() == ["wf-1"]
        assert [await persistence.delete("wf-1"), await persistence.delete("wf-1")] == [True, False]

    async def test_a_missing_state_is_none(self) -> None:
        """It is not an error."""
        persistence = StatePersistence(MemoryKeyValue())
        assert await persistence.load("wf-1") is None
        assert await persistence.load_raw("wf-1") is None

    @pytest.mark.parametrize("text", ["{", "", "null"])
    async def test_a_damaged_state_is_not_missing(self, text: str) -> None:
        """It is an error: otherwise the run would silently start over."""
        kv = MemoryKeyValue()
        await kv.set("workflow:state:wf-1", text)
        with pytest.raises(StateFormatError):
            await StatePersistence(kv).load("wf-1")
        with pytest.raises(StateFormatError):
            await StatePersistence(kv).load_raw("wf-1")

    async def test_a_star_in_the_prefix_is_not_a_wildcard(self) -> None:
        """Only keys with exactly this prefix are listed."""
        kv = MemoryKeyValue()
        await StatePersistence(kv, "a*").save("1", state())
        await StatePersistence(kv, "ab").save("2", state())
        assert await StatePersistence(kv, "a*").list() == ["1"]

    async def test_invalid_arguments_are_refused(self) -> None:
        """The error names the parameter."""
        with pytest.raises(InvalidArgument, match="kv"):
            StatePersistence(5)  # type: ignore[arg-type]
        persistence = StatePersistence(MemoryKeyValue())
        with pytest.raises(InvalidArgument, match="run_id"):
            await persistence.load("")
        with pytest.raises(StateFormatError, match="state"):
            await persistence.save("wf-1", None)  # type: ignore[arg-type]
