"""Resume states: gathering them, their texts, and where they are kept."""

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
    def test_gathers_finished_steps_in_order(self) -> None:
        """Success and failure are gathered; other events are not."""
        collector = ResumeStateCollector()
        collector.handle_event(WorkflowStart(workflow="w", run_id="r", at=NOW))
        collector.handle_event(StepStart(workflow="w", run_id="r", at=NOW, step="z", key="z"))
        collector.handle_event(complete("b", Ok(1)))
        collector.handle_event(complete("a", Err("NOPE"), "result"))
        assert list(collector.resume_state().steps) == ["b", "a"]
        assert collector.resume_state().steps["a"].origin == "result"

    def test_a_resumed_runs_state_holds_the_earlier_steps_too(self) -> None:
        """A step that answers from its record is gathered like one that ran."""
        collector = ResumeStateCollector()
        collector.handle_event(hit("first", Ok(1)))
        collector.handle_event(complete("second", Ok(2)))
        assert results(collector.resume_state()) == {"first": Ok(1), "second": Ok(2)}

    def test_a_step_that_comes_again_keeps_its_place(self) -> None:
        """The last outcome counts, at the first one's place."""
        collector = ResumeStateCollector()
        for key, value in (("a", 1), ("b", 2), ("a", 3)):
            collector.handle_event(complete(key, Ok(value)))
        assert list(results(collector.resume_state()).items()) == [("a", Ok(3)), ("b", Ok(2))]

    def test_a_state_given_out_does_not_change(self) -> None:
        """What comes later, and `clear`, leave it as it is."""
        collector = ResumeStateCollector()
        collector.handle_event(complete("a", Ok(1)))
        before = collector.resume_state()
        collector.handle_event(complete("b", Ok(2)))
        collector.clear()
        assert list(before.steps) == ["a"]
        assert list(collector.resume_state().steps) == []


class TestText:
    def test_reads_and_writes_version_1(self) -> None:
        """The text format `{version, entries, metadata}` comes out as it went in."""
        read = parse_state(json.dumps(VERSION_1))
        assert json.loads(stringify_state(read, **VERSION_1["metadata"])) == VERSION_1

    def test_what_version_1_says(self) -> None:
        """A returned failure has its error and its cause, a raised one the exception."""
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
        """Other writers leave out a value that is undefined."""
        text = '{"version":1,"entries":{"a":{"result":{"ok":true}}}}'
        assert parse_state(text).steps["a"].result == Ok(None)

    def test_reads_and_writes_the_newer_form(self) -> None:
        """`{kind, steps}` comes out as it went in."""
        assert serialize_state(deserialize_state(KIND_RESUME_STATE)) == KIND_RESUME_STATE

    def test_parse_takes_both_forms(self) -> None:
        """The text says itself which it is."""
        read = parse_state(json.dumps(KIND_RESUME_STATE))
        assert results(read)["user:1"] == Ok({"x": 1})
        assert list(read.steps) == ["user:1", "b"]

    def test_no_cause_is_omitted(self) -> None:
        """A failure without a cause has none afterwards either, and not the text "undefined"."""
        failed = state(a=Err("E"))
        (_, record) = serialize_state(failed)["steps"][0]
        assert "cause" not in record
        assert deserialize_state(serialize_state(failed)).steps["a"].result == Err("E", None)
        assert parse_state(stringify_state(failed)).steps["a"].result == Err("E", None)

    @pytest.mark.parametrize(
        "value",
        [NOW, Decimal("1.10"), {1, 2}, (1, "a"), b"\xff", {"~datetime": "x"}, {1: 2}, None, 2**70],
    )
    def test_values_that_json_lacks_come_back(self, value: object) -> None:
        """A value is tagged where JSON has no form for it."""
        gathered = state(a=Ok(value), b=Err(value))
        for copy in (
            parse_state(stringify_state(gathered)),
            deserialize_state(json.loads(json.dumps(serialize_state(gathered)))),
        ):
            assert results(copy) == {"a": Ok(value), "b": Err(value)}

    def test_a_typed_value_comes_back_by_its_type(self) -> None:
        """An object with fields is kept so that the step's return type rebuilds it."""
        user = User("Ana", NOW)
        for copy in (state(a=Ok(user)), parse_state(stringify_state(state(a=Ok(user))))):
            record = records_of(copy)["a"]
            assert record.get("typed")
            assert codec.decode(record.get("value"), User, typed=True) == user

    def test_a_raised_exception_comes_back(self) -> None:
        """With its class, its arguments and its causes."""
        error = KeyError("x")
        error.__cause__ = ValueError("below")
        gathered = ResumeState({"a": ResumeEntry(Err(error, error.__cause__), "throw")})
        for copy in (
            parse_state(stringify_state(gathered)),
            deserialize_state(serialize_state(gathered)),
        ):
            result = copy.steps["a"].result
            assert isinstance(result, Err)
            assert isinstance(result.error, KeyError)
            assert result.error.args == ("x",)
            assert isinstance(result.cause, ValueError)
            assert copy.steps["a"].origin == "throw"

    def test_an_exception_of_an_unknown_class_keeps_its_name(self) -> None:
        """Where its class is declared, it comes back as that, also through a second text."""

        class PaymentDeclined(Exception):
            pass

        _, seen = codec.prepare_error(PaymentDeclined("no funds"), ())
        gathered = ResumeState({"a": ResumeEntry(Err(seen, seen.__cause__), "throw")})
        for _ in range(2):
            gathered = parse_state(stringify_state(gathered))
        record = records_of(gathered)["a"]
        assert not record["ok"]
        assert record["cause"] is not None
        back = codec.decode_cause(record["cause"], [PaymentDeclined])
        assert isinstance(back, PaymentDeclined)
        assert back.args == ("no funds",)

    def test_metadata_are_kept(self) -> None:
        """Whatever is passed by name stands in the text."""
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
    def test_what_is_no_state_is_an_error(self, text: str) -> None:
        """Nothing but `StateFormatError` comes of a text that holds no state."""
        with pytest.raises(StateFormatError):
            parse_state(text)

    def test_a_snapshots_text_is_told_apart(self) -> None:
        """The error says which option takes a snapshot."""
        with pytest.raises(StateFormatError, match="snapshot="):
            parse_state(json.dumps(new_snapshot(now=NOW)))


class TestSnapshots:
    def test_records_are_those_of_a_snapshot(self) -> None:
        """Each record is valid in a snapshot, a failure without a cause too."""
        gathered = state(a=Ok(1), b=Err("E"), c=Err("E", ValueError("x")))
        snapshot = new_snapshot(now=NOW)
        snapshot["steps"] = records_of(gathered)
        assert validate_snapshot(snapshot).errors == ()
        assert results(state_of(snapshot))["b"] == Err("E", None)

    def test_a_snapshot_becomes_a_state_and_back(self) -> None:
        """Everything that is recorded of a step comes along."""
        snapshot = new_snapshot(now=NOW)
        snapshot["steps"] = {
            "a": {"ok": True, "value": {"x": 1}, "typed": True, "at": "2030-01-01T00:00:00.000Z"},
            "a#2": {"ok": True, "value": 2, "at": "2030-01-01T00:00:00.000Z", "branch": "2",
                    "call": "a", "args": "f00"},
        }  # fmt: skip
        assert records_of(state_of(snapshot)) == snapshot["steps"]
        assert records_of(parse_state(stringify_state(state_of(snapshot)))) == snapshot["steps"]


class TestGuards:
    def test_is_step_complete_asks_a_state(self) -> None:
        """Success and failure both are complete; no state holds no step."""
        gathered = state(a=Ok(1), b=Err("E"))
        answers = [is_step_complete(gathered, key) for key in "abc"]
        assert answers == [True, True, False]
        assert not is_step_complete(None, "a")

    def test_is_step_complete_guards_an_event(self) -> None:
        """With one argument it tells whether an event is the end of a step."""
        assert is_step_complete(complete("a", Ok(1)))
        assert not is_step_complete(WorkflowStart(workflow="w", run_id="r", at=NOW))

    def test_a_state_and_none_pass(self) -> None:
        """`as_resume_state` gives back what is one, or nothing."""
        gathered = state(a=Ok(1))
        assert as_resume_state(gathered) is gathered
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
    def test_anything_else_says_what_to_do(self, value: object, hint: str) -> None:
        """The error names the option or the function that takes such a thing."""
        with pytest.raises(StateFormatError, match=hint):
            as_resume_state(value)

    def test_a_state_of_other_things_is_refused(self) -> None:
        """The steps of a state are entries by key."""
        with pytest.raises(InvalidArgument, match="steps"):
            ResumeState(5)  # type: ignore[arg-type]
        with pytest.raises(InvalidArgument, match="'a'"):
            ResumeState({"a": Ok(1)})  # type: ignore[dict-item]


class TestPersistence:
    async def test_keeps_states_by_run(self) -> None:
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
        """No state is no error."""
        persistence = StatePersistence(MemoryKeyValue())
        assert await persistence.load("wf-1") is None
        assert await persistence.load_raw("wf-1") is None

    async def test_a_damaged_state_is_no_missing_state(self) -> None:
        """What cannot be read is an error: a run must not begin anew without a word."""
        kv = MemoryKeyValue()
        await kv.set("workflow:state:wf-1", "{")
        with pytest.raises(StateFormatError):
            await StatePersistence(kv).load("wf-1")

    async def test_a_star_in_the_prefix_is_a_star(self) -> None:
        """The prefix stands for itself."""
        kv = MemoryKeyValue()
        await StatePersistence(kv, "a*").save("1", state())
        await StatePersistence(kv, "ab").save("2", state())
        assert await StatePersistence(kv, "a*").list() == ["1"]

    async def test_refuses_what_it_cannot_use(self) -> None:
        """Each parameter is named in its error."""
        with pytest.raises(InvalidArgument, match="kv"):
            StatePersistence(5)  # type: ignore[arg-type]
        persistence = StatePersistence(MemoryKeyValue())
        with pytest.raises(InvalidArgument, match="run_id"):
            await persistence.load("")
        with pytest.raises(StateFormatError, match="state"):
            await persistence.save("wf-1", None)  # type: ignore[arg-type]
