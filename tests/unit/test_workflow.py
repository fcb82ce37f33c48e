"""`Workflow`: one function over one snapshot, in this process."""

import asyncio
import json
from contextlib import suppress
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any, cast

import pytest

from perdure import Err, Ok, ResumeState, Step, Workflow, merge_snapshots
from perdure.engine.fingerprint import definition_hash
from perdure.errors import (
    CodecError,
    InvalidArgument,
    SnapshotFormatError,
    SnapshotMismatch,
    StateFormatError,
)
from perdure.snapshot import validate_snapshot
from perdure.testing import TestClock
from tests.unit.workflows import Body, Counted, User, goodbye, hello, snapshot_of


class TestRun:
    async def test_a_returned_value_is_ok(self) -> None:
        """It is `Ok(None)` if the function returns nothing."""

        async def nothing(step: Step) -> None: ...

        assert await Workflow("w").run(hello) == Ok("hello")
        assert await Workflow("w").run(nothing) == Ok(None)

    async def test_a_returned_result_is_the_result(self) -> None:
        """A function may return `Ok` or `Err`."""

        async def decide(step: Step) -> Any:
            return Err("TOO_LATE", "cause") if await step("late", lambda: True) else Ok(1)

        workflow = Workflow("w")
        assert await workflow.run(decide) == Err("TOO_LATE", "cause")
        assert workflow.snapshot()["execution"]["status"] == "failed"

    async def test_a_raised_exception_is_err(self) -> None:
        """The run does not raise it."""

        async def fail(step: Step) -> None:
            raise ValueError("no") from KeyError("why")

        result = await Workflow("w").run(fail)
        assert isinstance(result, Err)
        assert isinstance(result.error, ValueError)
        assert isinstance(result.cause, KeyError)

    async def test_a_base_exception_is_raised(self) -> None:
        """`KeyboardInterrupt` and the like are not caught."""

        class Stop(BaseException):
            pass

        async def stop(step: Step) -> None:
            raise Stop

        with pytest.raises(Stop):
            await Workflow("w").run(stop)

    async def test_a_cancelled_run_keeps_its_state(self) -> None:
        """The cancellation is raised, and another run can resume from the snapshot."""

        async def body(step: Step, deps: Any) -> str:
            await step("a", lambda: 1)
            await deps.gate.wait()
            return "resumed"

        workflow = Workflow("w", {"gate": asyncio.Event()})
        running = asyncio.ensure_future(workflow.run(body))
        await asyncio.sleep(0)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        snapshot = workflow.snapshot()
        assert list(snapshot["steps"]) == ["a"]
        assert snapshot["execution"]["status"] == "running"
        workflow.deps.gate.set()
        assert await workflow.run(body, snapshot=snapshot) == Ok("resumed")

    async def test_a_workflow_can_run_repeatedly(self) -> None:
        """Each run starts from the snapshot that the workflow was created with."""
        counted = Counted()
        workflow = Workflow("w")
        await workflow.run(counted.body)
        await workflow.run(counted.body)
        assert counted.ran == list("abcdabcd")

    async def test_concurrent_runs_are_independent(self) -> None:
        """Each has its own steps."""

        async def body(step: Step, deps: Any) -> list[int]:
            first = await step("a", lambda: deps["n"])
            await asyncio.sleep(0)
            return [first, await step("b", lambda: deps["n"])]

        workflow = Workflow("w")
        runs = await asyncio.gather(*(workflow.run(body, deps={"n": n}) for n in range(5)))
        assert runs == [Ok([n, n]) for n in range(5)]

    @pytest.mark.parametrize("fn", [5, None, lambda step: 1, print, hello(cast(Step, None))])
    async def test_a_workflow_function_must_be_async(self, fn: Any) -> None:
        """The error says what a workflow function looks like."""
        with pytest.raises(InvalidArgument, match=r"^fn: expected an async function of"):
            await Workflow("w").run(fn)
        if asyncio.iscoroutine(fn):
            fn.close()

    async def test_a_function_with_other_parameters_is_refused(self) -> None:
        """A workflow function takes the step, or the step and the deps."""

        async def none() -> None: ...
        async def three(a: Any, b: Any, c: Any) -> None: ...
        async def any_number(*args: Any) -> int:
            return len(args)

        functions: list[Any] = [none, three]
        for fn in functions:
            with pytest.raises(InvalidArgument, match=r"^fn: "):
                await Workflow("w").run(fn)
        assert await Workflow("w").run(any_number) == Ok(2)


class TestDeps:
    async def test_a_mapping_can_be_read_by_attribute_and_by_key(self) -> None:
        """The error for an unknown attribute lists the known ones."""

        async def body(step: Step, deps: Any) -> list[Any]:
            with pytest.raises(AttributeError, match="it has a, b"):
                deps.c  # noqa: B018
            return [deps.a, deps["b"], dict(deps)]

        assert await Workflow("w", {"a": 1, "b": 2}).run(body) == Ok([1, 2, {"a": 1, "b": 2}])

    async def test_deps_are_read_only(self) -> None:
        """Neither the function nor the caller can change them during a run."""
        mapping = {"a": 1}
        workflow = Workflow("w", mapping)
        mapping["a"] = 2

        async def body(step: Step, deps: Any) -> Any:
            with pytest.raises(AttributeError, match="read-only"):
                deps.a = 3
            return deps.a

        assert await workflow.run(body) == Ok(1)

    async def test_any_other_object_is_passed_as_it_is(self) -> None:
        """An example is a typed object with functions."""
        bundle = SimpleNamespace(a=1)

        async def body(step: Step, deps: Any) -> bool:
            return deps is bundle

        assert await Workflow("w", bundle).run(body) == Ok(True)

    async def test_a_run_can_have_its_own_deps(self) -> None:
        """This is for tests, or for one tenant."""

        async def body(step: Step, deps: Any) -> Any:
            return deps.a

        workflow = Workflow("w", {"a": 1})
        assert await workflow.run(body, deps={"a": 2}) == Ok(2)
        assert await workflow.run(body) == Ok(1)


class TestSnapshot:
    async def test_a_snapshot_is_valid_json(self) -> None:
        """This holds before the first run and after a failure."""
        fresh = Workflow("w")
        for snapshot in (fresh.snapshot(), await snapshot_of(Counted().body)):
            assert validate_snapshot(snapshot).errors == ()
            assert json.loads(json.dumps(snapshot)) == snapshot

    async def test_a_snapshot_has_the_status_of_the_run(self) -> None:
        """It is running, completed or failed, with the times."""
        clock = TestClock()
        workflow = Workflow("w", clock=clock)
        assert workflow.snapshot()["execution"] == {
            "status": "running", "lastUpdated": "2030-01-01T00:00:00.000Z",
        }  # fmt: skip
        await clock.advance("1s")
        await workflow.run(hello)
        assert workflow.snapshot()["execution"] == {
            "status": "completed",
            "lastUpdated": "2030-01-01T00:00:01.000Z",
            "completedAt": "2030-01-01T00:00:01.000Z",
        }
        await workflow.run(Counted().body)
        assert workflow.snapshot()["execution"]["status"] == "failed"

    @pytest.mark.parametrize(
        ("options", "keys"),
        [
            ({}, "abcd"),
            ({"include": "completed"}, "abc"),
            ({"include": "failed"}, "d"),
            ({"limit": 2}, "ab"),
            ({"limit": 0}, ""),
            ({"since": "b"}, "cd"),
            ({"since": "unknown"}, "abcd"),
            ({"since": "a", "limit": 1}, "b"),
            ({"since": "a", "include": "failed", "limit": 1}, "d"),
        ],
    )
    async def test_options_select_the_steps_of_a_snapshot(
        self, options: dict[str, Any], keys: str
    ) -> None:
        """The limit is applied after the other options."""
        assert "".join((await snapshot_of(Counted().body, **options))["steps"]) == keys

    async def test_metadata_of_the_caller_is_kept_beside_that_of_the_engine(self) -> None:
        """A resumed run has both."""
        workflow = Workflow("w")
        await workflow.run(hello)
        engine_metadata = workflow.snapshot()["metadata"]
        assert set(engine_metadata) == {"definitionHash", "workflowId"}
        snapshot = workflow.snapshot(
            metadata={"user": "123", "when": datetime(2030, 1, 1, tzinfo=UTC)}
        )
        assert snapshot["metadata"]["user"] == "123"
        assert json.loads(json.dumps(snapshot)) == snapshot
        resumed = Workflow("w", snapshot=snapshot)
        await resumed.run(hello)
        assert resumed.snapshot()["metadata"] == snapshot["metadata"]

    async def test_a_snapshot_has_only_the_warnings_of_its_steps(self) -> None:
        """Those of steps that were left out are left out too."""

        async def body(step: Step) -> None:
            await step("fine", lambda: 1)
            await step("lossy", lambda: User("Ana", datetime(2030, 1, 1, tzinfo=UTC)))

        workflow = Workflow("w")
        await workflow.run(body)
        assert len(workflow.snapshot()["warnings"]) > 0
        assert "warnings" not in workflow.snapshot(limit=1)

    async def test_a_resumed_run_keeps_the_order_of_steps(self) -> None:
        """Restored steps come first, new ones after them."""
        counted = Counted()
        first = await snapshot_of(counted.body, include="completed")
        reordered: Any = {**first, "steps": {key: first["steps"][key] for key in ("c", "a")}}
        resumed = Workflow("w", snapshot=reordered)
        await resumed.run(counted.body)
        assert list(resumed.snapshot()["steps"]) == ["c", "a", "b", "d"]

    async def test_since_returns_a_delta(self) -> None:
        """It has the steps recorded after a step, to be merged into an earlier snapshot."""
        workflow = Workflow("w")
        await workflow.run(Counted().body)
        base, delta = workflow.snapshot(limit=2), workflow.snapshot(since="b")
        assert merge_snapshots(base, delta) == workflow.snapshot()

    async def test_a_record_that_does_not_fit_the_return_type_ends_the_run(self) -> None:
        """The error names the step, and no later step runs."""
        foreign: Any = {
            "formatVersion": 1,
            "steps": {"user": {"ok": True, "value": {"name": 5}}},
            "execution": {"status": "running", "lastUpdated": "2030-01-01T00:00:00.000Z"},
        }

        async def fetch() -> User:
            raise AssertionError("the step is recorded")

        async def body(step: Step) -> None:
            with suppress(CodecError):
                await step("user", fetch)
            await step("after", fetch)

        result = await Workflow("w", snapshot=foreign).run(body)
        assert isinstance(result, Err)
        assert str(result.error).startswith("the record of step 'user' cannot be read")

    async def test_a_snapshot_of_another_writer_is_read(self) -> None:
        """Records need only an outcome; the step's return type restores the value."""
        foreign: Any = {
            "formatVersion": 1,
            "steps": {
                "user": {"ok": True, "value": {"name": "Ana", "since": "2030-01-01T00:00:00Z"}},
                "empty": {"ok": True},
                "gone": {
                    "ok": False,
                    "error": "GONE",
                    "cause": {"type": "thrown", "stringRepresentation": "GONE"},
                },
            },
            "execution": {"status": "running", "lastUpdated": "2030-01-01T00:00:00.000Z"},
        }

        async def fetch() -> User:
            raise AssertionError("the step is recorded")

        async def empty() -> object:
            raise AssertionError("the step is recorded")

        async def body(step: Step) -> list[Any]:
            values: list[Any] = [await step("user", fetch), await step("empty", empty)]
            return [*values, await step("gone", fetch)]

        workflow = Workflow("w", snapshot=foreign)
        assert await workflow.run(body) == Err("GONE", "GONE")
        user = User("Ana", datetime(2030, 1, 1, tzinfo=UTC))
        events: list[Any] = []
        await Workflow("w", snapshot=foreign, on_event=events.append).run(body)
        assert [event.result for event in events[1:3]] == [Ok(user), Ok(None)]

    async def test_reserved_fields_are_ignored_and_those_of_records_are_kept(self) -> None:
        """A later version may write them into a run that this one continues."""
        fields = {"by": "ana", "spent": {"usd": 1}, "streams": ["tokens"]}
        counted = Counted()
        workflow = Workflow("w")
        await workflow.run(counted.body)
        snapshot: Any = workflow.snapshot()
        for record in snapshot["steps"].values():
            record.update(fields)
        snapshot["execution"] |= {"started": ["a"]}
        assert validate_snapshot(snapshot).valid
        resumed = Workflow("w", snapshot=snapshot)
        await resumed.run(counted.body)
        assert counted.ran == list("abcd")
        assert resumed.snapshot()["steps"] == snapshot["steps"]


class TestUnknownSteps:
    async def resumed(self, body: Body, **options: Any) -> Any:
        snapshot = await snapshot_of(hello)
        workflow = Workflow("w", on_definition_change="ignore", **options)
        return await workflow.run(body, snapshot=snapshot)

    async def test_unknown_steps_are_logged_by_default(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        """The log names the recorded steps that a completed run did not call."""
        assert await self.resumed(goodbye) == Ok("goodbye")
        assert "recorded steps: hello" in caplog.text

    async def test_unknown_steps_can_be_an_error(self) -> None:
        """`SnapshotMismatch` is raised."""
        with pytest.raises(SnapshotMismatch, match="hello") as raised:
            await self.resumed(goodbye, on_unknown_steps="error")
        assert raised.value.kind == "unknown_steps"

    async def test_unknown_steps_can_be_ignored(self, caplog: pytest.LogCaptureFixture) -> None:
        """Nothing is logged."""
        assert await self.resumed(goodbye, on_unknown_steps="ignore") == Ok("goodbye")
        assert caplog.text == ""

    async def test_steps_that_are_called_are_known(self) -> None:
        """A run that calls all recorded steps raises nothing."""
        assert await self.resumed(hello, on_unknown_steps="error") == Ok("hello")

    async def test_a_failed_run_is_not_checked(self) -> None:
        """It may not have reached the steps yet."""

        async def fail(step: Step) -> None:
            raise ValueError

        assert isinstance(await self.resumed(fail, on_unknown_steps="error"), Err)


class TestDefinitionChange:
    async def resumed(self, **options: Any) -> Any:
        async def changed(step: Step) -> str:
            return await step("hello", lambda: "hello!")

        return await Workflow("w", snapshot=await snapshot_of(hello), **options).run(changed)

    async def test_a_changed_definition_is_logged_by_default(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        """The log has the recorded hash, and recorded steps are replayed."""
        assert await self.resumed() == Ok("hello")
        assert "another definition" in caplog.text
        assert definition_hash(hello) in caplog.text

    async def test_a_changed_definition_can_be_an_error(self) -> None:
        """`SnapshotMismatch` is raised before the function is called."""

        async def changed(step: Step) -> None:
            raise AssertionError("the function was called")

        workflow = Workflow("w", snapshot=await snapshot_of(hello), on_definition_change="error")
        with pytest.raises(SnapshotMismatch) as raised:
            await workflow.run(changed)
        assert raised.value.kind == "definition_hash"

    async def test_a_changed_definition_can_be_ignored(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Nothing is logged."""
        assert await self.resumed(on_definition_change="ignore") == Ok("hello")
        assert caplog.text == ""

    async def test_the_same_function_is_not_a_change(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Neither is a snapshot without a hash, from another writer."""
        snapshot = await snapshot_of(hello)
        await Workflow("w", snapshot=snapshot, on_definition_change="error").run(hello)
        del snapshot["metadata"]
        await Workflow("w", snapshot=snapshot, on_definition_change="error").run(goodbye)
        assert "definition" not in caplog.text


class TestCache:
    async def test_steps_with_a_key_are_cached_across_runs(self) -> None:
        """Steps without a key run each time."""
        ran: list[str] = []

        async def body(step: Step) -> None:
            await step("keyed", lambda: ran.append("keyed"), key="k")
            await step("plain", lambda: ran.append("plain"))

        cache: dict[str, Any] = {}
        workflow = Workflow("w", cache=cache)
        await workflow.run(body)
        await workflow.run(body)
        assert ran == ["keyed", "plain", "plain"]
        assert set(cache) == {"k"}

    async def test_errors_are_cached(self) -> None:
        """Error and cause are returned until the key is deleted."""
        calls: list[int] = []

        async def find() -> Any:
            calls.append(1)
            return Err("NOT_FOUND", KeyError("x"))

        async def body(step: Step) -> Any:
            return await step("find", find, key="user:999")

        cache: dict[str, Any] = {}
        workflow = Workflow("w", cache=cache)
        results = [await workflow.run(body), await workflow.run(body)]
        for result in results:
            assert isinstance(result, Err)
            assert result.error == "NOT_FOUND"
            assert isinstance(result.cause, KeyError)
        assert len(calls) == 1
        del cache["user:999"]
        await workflow.run(body)
        assert len(calls) == 2

    async def test_a_step_can_have_its_own_ttl(self) -> None:
        """The step runs again after that time."""
        clock = TestClock()
        ran: list[int] = []

        async def body(step: Step) -> None:
            await step("x", lambda: ran.append(1), key="k", ttl="1h")

        workflow = Workflow("w", cache={}, clock=clock)
        for pause in ("30m", "29m", "1m"):
            await workflow.run(body)
            await clock.advance(pause)
        await workflow.run(body)
        assert len(ran) == 2

    async def test_concurrent_calls_with_one_key_run_once(self) -> None:
        """This holds for a cache that is slow to return nothing."""
        ran: list[int] = []

        class SlowCache:
            def __init__(self) -> None:
                self.entries: dict[str, Any] = {}

            async def get(self, key: str) -> Any:
                await asyncio.sleep(0.001)
                return self.entries.get(key)

            async def set(self, key: str, record: Any) -> None:
                self.entries[key] = record

            async def delete(self, key: str) -> None:
                del self.entries[key]

        async def body(step: Step) -> None:
            await asyncio.gather(*(step("x", lambda: ran.append(1), key="k") for _ in range(3)))

        await Workflow("w", cache=SlowCache()).run(body)
        assert ran == [1]

    async def test_a_cached_value_is_in_the_snapshot(self) -> None:
        """The snapshot can be resumed without the cache."""
        ran: list[int] = []

        async def work() -> int:
            ran.append(1)
            return len(ran)

        async def body(step: Step) -> int:
            return await step("x", work, key="k")

        workflow = Workflow("w", cache={})
        await workflow.run(body)
        await workflow.run(body)
        assert await Workflow("w", snapshot=workflow.snapshot()).run(body) == Ok(1)
        assert ran == [1]


class TestOptions:
    async def test_an_option_of_a_run_overrides_that_of_the_workflow(self) -> None:
        """Every option can be passed to either."""
        snapshot = await snapshot_of(hello)
        workflow = Workflow("w", snapshot=snapshot)
        events: list[Any] = []
        await workflow.run(hello, on_event=events.append)
        assert [event.type for event in events][1] == "step_cache_hit"
        events.clear()
        await workflow.run(hello, snapshot=None, on_event=events.append)
        assert [event.type for event in events][1] == "step_start"

    async def test_an_unknown_option_is_refused(self) -> None:
        """The error names it and lists the known ones."""
        with pytest.raises(InvalidArgument, match=r"^resumeState: expected .*resume_state"):
            Workflow("w", resumeState=None)  # type: ignore[call-overload]  # an unknown option
        with pytest.raises(InvalidArgument, match=r"^retries: expected"):
            await Workflow("w").run(hello, retries=3)  # type: ignore[call-arg]  # an unknown option

    async def test_a_snapshot_and_a_resume_state_exclude_each_other(self) -> None:
        """This holds for options of the workflow and of the run."""
        snapshot = await snapshot_of(hello)
        with pytest.raises(InvalidArgument, match="resume_state"):
            Workflow("w", snapshot=snapshot, resume_state=ResumeState())
        with pytest.raises(InvalidArgument, match="resume_state"):
            await Workflow("w", snapshot=snapshot).run(hello, resume_state=ResumeState())

    async def test_a_snapshot_passed_as_a_resume_state_is_refused(self) -> None:
        """The same holds the other way round; the error names the right option."""
        with pytest.raises(SnapshotFormatError, match="resume_state="):
            Workflow("w", snapshot=ResumeState())  # type: ignore[call-overload]  # the wrong type
        with pytest.raises(StateFormatError, match="snapshot="):
            Workflow("w", resume_state=await snapshot_of(hello))  # type: ignore[call-overload]  # the wrong type

    async def test_a_snapshot_is_validated_when_it_is_passed(self) -> None:
        """The error lists every problem."""
        invalid: Any = {"formatVersion": 2, "steps": {}}
        with pytest.raises(SnapshotFormatError) as raised:
            Workflow("w", snapshot=invalid)
        assert len(raised.value.errors) >= 2
