"""`Workflow`: one function over one snapshot, in this process."""

import asyncio
import json
import linecache
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest

from perdure import (
    Err,
    Ok,
    Result,
    ResumeState,
    Step,
    StepFailed,
    Workflow,
    merge_snapshots,
    parse_state,
    stringify_state,
)
from perdure.engine.fingerprint import definition_hash
from perdure.errors import (
    CodecError,
    InvalidArgument,
    SnapshotFormatError,
    SnapshotMismatch,
    StateFormatError,
)
from perdure.resume import ResumeEntry
from perdure.snapshot import Snapshot, validate_snapshot
from perdure.testing import TestClock

Body = Callable[..., Awaitable[Any]]


@dataclass
class User:
    name: str
    since: datetime


class Counted:
    """Steps a, b, c that succeed and d that fails, and how often each ran."""

    def __init__(self) -> None:
        self.ran: list[str] = []

    async def work(self, id: str) -> str:
        self.ran.append(id)
        if id == "d":
            raise ValueError("d failed")
        return id.upper()

    async def body(self, step: Step) -> None:
        for id in "abcd":
            await step(id, self.work, id)


async def taken(body: Body, **choice: Any) -> Snapshot:
    """The snapshot after one run."""
    workflow = Workflow("w")
    await workflow.run(body)
    return workflow.snapshot(**choice)


async def hello(step: Step) -> str:
    return await step("hello", lambda: "hello")


async def goodbye(step: Step) -> str:
    return await step("goodbye", lambda: "goodbye")


class TestRun:
    async def test_what_the_function_returns_is_ok(self) -> None:
        """Any value, and None when it returns nothing."""

        async def nothing(step: Step) -> None: ...

        assert await Workflow("w").run(hello) == Ok("hello")
        assert await Workflow("w").run(nothing) == Ok(None)

    async def test_a_result_passes_through(self) -> None:
        """A function may return `Ok` or `Err` itself."""

        async def decide(step: Step) -> Any:
            return Err("TOO_LATE", "cause") if await step("late", lambda: True) else Ok(1)

        workflow = Workflow("w")
        assert await workflow.run(decide) == Err("TOO_LATE", "cause")
        assert workflow.snapshot()["execution"]["status"] == "failed"

    async def test_what_it_raises_is_err(self) -> None:
        """Nothing is raised for what happens inside the function."""

        async def fail(step: Step) -> None:
            raise ValueError("no") from KeyError("why")

        result = await Workflow("w").run(fail)
        assert isinstance(result, Err)
        assert isinstance(result.error, ValueError)
        assert isinstance(result.cause, KeyError)

    async def test_what_is_no_exception_comes_out(self) -> None:
        """`KeyboardInterrupt` and its like are not caught."""

        class Stop(BaseException):
            pass

        async def stop(step: Step) -> None:
            raise Stop

        with pytest.raises(Stop):
            await Workflow("w").run(stop)

    async def test_cancelling_raises_and_keeps_the_state(self) -> None:
        """As Python expects; what was finished is in the snapshot, and another run goes on."""

        async def body(step: Step, deps: Any) -> str:
            await step("a", lambda: 1)
            await deps.gate.wait()
            return "through"

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
        assert await workflow.run(body, snapshot=snapshot) == Ok("through")

    async def test_a_workflow_may_run_many_times(self) -> None:
        """Each run begins from what the workflow was made with."""
        counted = Counted()
        workflow = Workflow("w")
        await workflow.run(counted.body)
        await workflow.run(counted.body)
        assert counted.ran == list("abcdabcd")

    async def test_runs_beside_each_other_do_not_mix(self) -> None:
        """Each has its own steps."""

        async def body(step: Step, deps: Any) -> list[int]:
            mine = await step("a", lambda: deps["n"])
            await asyncio.sleep(0)
            return [mine, await step("b", lambda: deps["n"])]

        workflow = Workflow("w")
        runs = await asyncio.gather(*(workflow.run(body, deps={"n": n}) for n in range(5)))
        assert runs == [Ok([n, n]) for n in range(5)]

    @pytest.mark.parametrize("fn", [5, None, lambda step: 1, print, hello(None)])  # type: ignore[arg-type]
    async def test_other_things_are_no_function(self, fn: Any) -> None:
        """The error says what a workflow function looks like."""
        with pytest.raises(InvalidArgument, match=r"^fn: expected an async function of"):
            await Workflow("w").run(fn)
        if asyncio.iscoroutine(fn):
            fn.close()

    async def test_a_function_of_other_parameters_is_refused(self) -> None:
        """It takes the step, or the step and the deps."""

        async def none() -> None: ...
        async def three(a: Any, b: Any, c: Any) -> None: ...
        async def any_number(*args: Any) -> int:
            return len(args)

        for fn in (none, three):
            with pytest.raises(InvalidArgument, match=r"^fn: "):
                await Workflow("w").run(fn)  # type: ignore[arg-type]
        assert await Workflow("w").run(any_number) == Ok(2)


class TestDeps:
    async def test_a_mapping_is_known_by_attribute_and_by_name(self) -> None:
        """And tells what it holds when asked for what it has not."""

        async def body(step: Step, deps: Any) -> list[Any]:
            with pytest.raises(AttributeError, match="it holds a, b"):
                deps.c  # noqa: B018
            return [deps.a, deps["b"], dict(deps)]

        assert await Workflow("w", {"a": 1, "b": 2}).run(body) == Ok([1, 2, {"a": 1, "b": 2}])

    async def test_it_is_frozen(self) -> None:
        """Neither the function nor the caller changes it during a run."""
        given = {"a": 1}
        workflow = Workflow("w", given)
        given["a"] = 2

        async def body(step: Step, deps: Any) -> int:
            with pytest.raises(AttributeError, match="read-only"):
                deps.a = 3
            return deps.a

        assert await workflow.run(body) == Ok(1)

    async def test_any_other_object_is_given_as_it_is(self) -> None:
        """A typed bundle of functions, for example."""
        bundle = SimpleNamespace(a=1)

        async def body(step: Step, deps: Any) -> bool:
            return deps is bundle

        assert await Workflow("w", bundle).run(body) == Ok(True)

    async def test_a_run_may_have_its_own(self) -> None:
        """For tests, or for one tenant."""

        async def body(step: Step, deps: Any) -> int:
            return deps.a

        workflow = Workflow("w", {"a": 1})
        assert await workflow.run(body, deps={"a": 2}) == Ok(2)
        assert await workflow.run(body) == Ok(1)


class TestSnapshot:
    async def test_it_is_valid_plain_json(self) -> None:
        """At any time, and after a failure."""
        fresh = Workflow("w")
        for snapshot in (fresh.snapshot(), await taken(Counted().body)):
            assert validate_snapshot(snapshot).errors == ()
            assert json.loads(json.dumps(snapshot)) == snapshot

    async def test_it_tells_how_far_the_run_is(self) -> None:
        """Running, completed or failed, with the times."""
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
        ("choice", "keys"),
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
    async def test_its_options(self, choice: dict[str, Any], keys: str) -> None:
        """The limit counts what is left after the others."""
        assert "".join((await taken(Counted().body, **choice))["steps"]) == keys

    async def test_metadata(self) -> None:
        """The user's stands beside what the engine keeps there itself."""
        workflow = Workflow("w")
        await workflow.run(hello)
        own = workflow.snapshot()["metadata"]
        assert set(own) == {"definitionHash", "workflowId"}
        chosen = workflow.snapshot(
            metadata={"user": "123", "when": datetime(2030, 1, 1, tzinfo=UTC)}
        )
        assert chosen["metadata"]["user"] == "123"
        assert json.loads(json.dumps(chosen)) == chosen
        resumed = Workflow("w", snapshot=chosen)
        await resumed.run(hello)
        assert resumed.snapshot()["metadata"] == chosen["metadata"]

    async def test_warnings_go_with_their_steps(self) -> None:
        """Only those of steps that are in it."""

        async def body(step: Step) -> None:
            await step("fine", lambda: 1)
            await step("lossy", lambda: User("Ana", datetime(2030, 1, 1, tzinfo=UTC)))

        workflow = Workflow("w")
        await workflow.run(body)
        assert len(workflow.snapshot()["warnings"]) > 0
        assert "warnings" not in workflow.snapshot(limit=1)

    async def test_a_restored_run_keeps_the_order(self) -> None:
        """Steps of before come first, new ones after them."""
        counted = Counted()
        first = await taken(counted.body, include="completed")
        reordered: Any = {**first, "steps": {key: first["steps"][key] for key in ("c", "a")}}
        resumed = Workflow("w", snapshot=reordered)
        await resumed.run(counted.body)
        assert list(resumed.snapshot()["steps"]) == ["c", "a", "b", "d"]

    async def test_since_makes_a_delta(self) -> None:
        """What was recorded after a step, to be merged into what was saved before."""
        workflow = Workflow("w")
        await workflow.run(Counted().body)
        base, delta = workflow.snapshot(limit=2), workflow.snapshot(since="b")
        assert merge_snapshots(base, delta) == workflow.snapshot()

    async def test_a_record_that_does_not_fit_its_step_is_told(self) -> None:
        """The error names the step, and no later step runs."""
        foreign: Any = {
            "formatVersion": 1,
            "steps": {"user": {"ok": True, "value": {"name": 5}}},
            "execution": {"status": "running", "lastUpdated": "2030-01-01T00:00:00.000Z"},
        }

        async def fetch() -> User:
            raise AssertionError("is recorded")

        async def body(step: Step) -> None:
            with suppress(CodecError):
                await step("user", fetch)
            await step("after", fetch)

        result = await Workflow("w", snapshot=foreign).run(body)
        assert isinstance(result, Err)
        assert str(result.error).startswith("the record of step 'user' cannot be read")

    async def test_another_writers_snapshot(self) -> None:
        """Records with nothing but an outcome answer too, by the step's return type."""
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
            raise AssertionError("is recorded")

        async def body(step: Step) -> list[Any]:
            found = [await step("user", fetch), await step("empty", lambda: None)]
            return [*found, await step("gone", fetch)]

        workflow = Workflow("w", snapshot=foreign)
        assert await workflow.run(body) == Err("GONE", "GONE")
        user = User("Ana", datetime(2030, 1, 1, tzinfo=UTC))
        events: list[Any] = []
        await Workflow("w", snapshot=foreign, on_event=events.append).run(body)
        assert [event.result for event in events[1:3]] == [Ok(user), Ok(None)]


class TestUnknownSteps:
    async def resumed(self, body: Body, reaction: Any) -> Any:
        snapshot = await taken(hello)
        workflow = Workflow("w", on_unknown_steps=reaction, on_definition_change="ignore")
        return await workflow.run(body, snapshot=snapshot)

    async def test_warn(self, caplog: pytest.LogCaptureFixture) -> None:
        """By default the log names the recorded steps that a completed run never touched."""
        assert await self.resumed(goodbye, "warn") == Ok("goodbye")
        assert "recorded steps: hello" in caplog.text

    async def test_error(self) -> None:
        """The mismatch is raised."""
        with pytest.raises(SnapshotMismatch, match="hello") as raised:
            await self.resumed(goodbye, "error")
        assert raised.value.kind == "unknown_steps"

    async def test_ignore(self, caplog: pytest.LogCaptureFixture) -> None:
        """Not a word."""
        assert await self.resumed(goodbye, "ignore") == Ok("goodbye")
        assert caplog.text == ""

    async def test_touched_steps_are_known(self) -> None:
        """Nothing happens when all are asked for."""
        assert await self.resumed(hello, "error") == Ok("hello")

    async def test_a_run_that_fails_may_not_have_come_there_yet(self) -> None:
        """Only a completed run tells."""

        async def fail(step: Step) -> None:
            raise ValueError

        assert isinstance(await self.resumed(fail, "error"), Err)


def defined(source: str) -> Any:
    """The hash of a function with this source."""
    space: dict[str, Any] = {}
    name = f"<source {hash(source)}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    exec(compile(source, name, "exec"), space)
    return definition_hash(space["body"])


class TestDefinition:
    PLAIN = "async def body(step):\n    return await step('a', work, 1)\n"

    @pytest.mark.parametrize(
        "source",
        [
            "async def body(step):\n    # why\n    return await step('a', work, 1)  # because\n",
            "async def body(step):\n    'What it does.'\n    return await step('a', work, 1)\n",
            "async def body(\n  step,\n):\n\n  return await step(\n    'a', work, 1,\n  )\n",
            'async def body(step):\n  return (await step("a", work, 1))\n',
        ],
        ids=["comments", "docstring", "layout", "quotes"],
    )
    def test_what_does_not_count(self, source: str) -> None:
        """Comments, docstrings and formatting leave the definition as it is."""
        assert defined(source) == defined(self.PLAIN)

    @pytest.mark.parametrize(
        "source",
        [
            "async def body(step):\n    return await step('b', work, 1)\n",
            "async def body(step):\n    return await step('a', work, 2)\n",
            "async def body(step):\n    await step('a', work, 1)\n",
        ],
    )
    def test_what_counts(self, source: str) -> None:
        """Any change of the code."""
        assert defined(source) != defined(self.PLAIN)

    def test_a_function_without_source(self) -> None:
        """Its compiled code stands in; two alike are the same."""
        spaces: list[dict[str, Any]] = [{}, {}, {}]
        for space, value in zip(spaces, (1, 1, 2), strict=True):
            exec(f"async def body(step): return {value}", space)
        one, same, other = (definition_hash(space["body"]) for space in spaces)
        assert (one == same, one == other) == (True, False)

    async def resumed(self, reaction: Any) -> Any:
        ran: list[str] = []

        async def changed(step: Step) -> str:
            ran.append("changed")
            return await step("hello", lambda: "hello!")

        workflow = Workflow("w", snapshot=await taken(hello), on_definition_change=reaction)
        return await workflow.run(changed), ran

    async def test_warn(self, caplog: pytest.LogCaptureFixture) -> None:
        """By default the log tells both hashes, and recorded steps answer as they did."""
        result, _ = await self.resumed("warn")
        assert result == Ok("hello")
        assert "another definition" in caplog.text
        assert definition_hash(hello) in caplog.text

    async def test_error(self) -> None:
        """The mismatch is raised before the function is called."""
        with pytest.raises(SnapshotMismatch) as raised:
            await self.resumed("error")
        assert raised.value.kind == "definition_hash"

    async def test_ignore(self, caplog: pytest.LogCaptureFixture) -> None:
        """Not a word."""
        await self.resumed("ignore")
        assert caplog.text == ""

    async def test_the_same_function_is_no_change(self, caplog: pytest.LogCaptureFixture) -> None:
        """Nor is a snapshot without a hash, from another writer."""
        snapshot = await taken(hello)
        await Workflow("w", snapshot=snapshot, on_definition_change="error").run(hello)
        del snapshot["metadata"]
        await Workflow("w", snapshot=snapshot, on_definition_change="error").run(goodbye)
        with caplog.at_level(logging.WARNING):
            assert "definition" not in caplog.text


class TestResumeState:
    async def test_run_with_state(self) -> None:
        """The result together with the state, also when the run failed."""
        counted = Counted()
        result, state = await Workflow("w").run_with_state(counted.body)
        assert isinstance(result, Err)
        assert list(state.steps) == list("abcd")
        assert state.steps["a"].result == Ok("A")
        assert isinstance(state.steps["d"].result, Err)

    async def test_a_state_answers(self) -> None:
        """Success and failure, at creation or per run, also through its text."""
        counted = Counted()
        _, state = await Workflow("w").run_with_state(counted.body)
        counted.ran.clear()
        states = (state, parse_state(stringify_state(state)))
        for workflow in (Workflow("w", resume_state=each) for each in states):
            assert str((await workflow.run(counted.body)).error) == "d failed"  # type: ignore[union-attr]
        assert counted.ran == []

    async def test_failed_steps_left_out_run_again(self) -> None:
        """What is not in the state is not done."""
        counted = Counted()
        _, state = await Workflow("w").run_with_state(counted.body)
        done = {key: entry for key, entry in state.steps.items() if entry.result.ok}
        counted.ran.clear()
        await Workflow("w").run(counted.body, resume_state=ResumeState(done))
        assert counted.ran == ["d"]

    async def test_the_state_of_a_resumed_run_is_whole(self) -> None:
        """Save after resume loses nothing, however often."""
        counted = Counted()
        _, state = await Workflow("w").run_with_state(counted.body)
        for _ in range(3):
            _, state = await Workflow("w").run_with_state(counted.body, resume_state=state)
        assert list(state.steps) == list("abcd")
        assert counted.ran == list("abcd")

    async def test_parallel_branches_sleeps_and_races_come_back(self) -> None:
        """Whatever kind of step it is and whichever branch it belongs to."""
        ran: list[str] = []

        async def body(step: Step) -> Any:
            async def line(name: str) -> str:
                return await step("x", lambda: ran.append(name) or name)

            lines = await asyncio.gather(line("a"), line("b"))
            await step.sleep("nap", 0.001)
            return [*lines, *await step.race("race", {"only": lambda: line("c")})]

        result, state = await Workflow("w").run_with_state(body)
        again = await Workflow("w").run(body, resume_state=parse_state(stringify_state(state)))
        assert again == result == Ok(["a", "b", "only", "c"])
        assert ran == ["a", "b", "c"]

    async def test_classes_come_back(self) -> None:
        """A dataclass that a step gave, by the step's return type."""
        user = User("Ana", datetime(2030, 1, 1, tzinfo=UTC))
        calls: list[int] = []

        async def fetch() -> User:
            calls.append(1)
            return user

        async def body(step: Step) -> User:
            return await step("user", fetch)

        _, state = await Workflow("w").run_with_state(body)
        for each in (state, parse_state(stringify_state(state))):
            assert await Workflow("w").run(body, resume_state=each) == Ok(user)
        assert calls == [1]

    async def test_the_errors_of_results_come_back(self) -> None:
        """By the step's return type, as values do."""
        error = User("Ana", datetime(2030, 1, 1, tzinfo=UTC))

        async def find() -> Result[str, User]:
            return Err(error)

        async def body(step: Step) -> str:
            return await step("find", find)

        _, state = await Workflow("w").run_with_state(body)
        for each in (state, parse_state(stringify_state(state))):
            assert await Workflow("w").run(body, resume_state=each) == Err(error)

    async def test_a_returned_exception_is_no_raised_one(self) -> None:
        """`Err(exception)` is what the step returned, and is so again."""

        async def body(step: Step) -> list[Any]:
            try:
                await step("find", lambda: Err(ValueError("bad")))
            except StepFailed as failed:
                return [type(failed.error).__name__, str(failed.error), failed.cause]
            return []

        result, state = await Workflow("w").run_with_state(body)
        assert result == Ok(["ValueError", "bad", None])
        for each in (state, parse_state(stringify_state(state))):
            assert await Workflow("w").run(body, resume_state=each) == result

    @pytest.mark.parametrize("is_async", [False, True])
    async def test_a_factory_is_called_once_per_run(self, is_async: bool) -> None:
        """And not before."""
        calls: list[int] = []
        state = ResumeState({"hello": ResumeEntry(Ok("from the state"))})

        def load() -> Any:
            calls.append(1)
            return asyncio.sleep(0, state) if is_async else state

        workflow = Workflow("w", resume_state=load)
        assert calls == []
        assert await workflow.run(hello) == Ok("from the state")
        assert await workflow.run(hello) == Ok("from the state")
        assert calls == [1, 1]

    async def test_a_factory_may_find_nothing(self) -> None:
        """Then the run begins anew."""
        assert await Workflow("w").run(hello, resume_state=lambda: None) == Ok("hello")

    async def test_a_factory_that_gives_something_else_is_told(self) -> None:
        """A snapshot is no resume state."""
        snapshot = await taken(hello)
        with pytest.raises(StateFormatError, match="snapshot="):
            await Workflow("w").run(hello, resume_state=lambda: snapshot)  # type: ignore[arg-type,return-value]


class TestCache:
    async def test_it_lives_across_runs_for_steps_with_a_key(self) -> None:
        """The key is asked for; steps without one run each time."""
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
        """With error, cause and origin, until the key is deleted."""
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

    async def test_a_step_has_its_own_ttl(self) -> None:
        """After it, the step runs again."""
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

    async def test_two_at_once_run_once(self) -> None:
        """Also when the cache takes its time to say that it has nothing."""
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

    async def test_what_the_cache_answered_is_in_the_snapshot(self) -> None:
        """So the snapshot is whole without the cache."""
        ran: list[int] = []

        async def body(step: Step) -> int:
            return await step("x", lambda: ran.append(1) or len(ran), key="k")

        workflow = Workflow("w", cache={})
        await workflow.run(body)
        await workflow.run(body)
        assert await Workflow("w", snapshot=workflow.snapshot()).run(body) == Ok(1)
        assert ran == [1]


class TestOptions:
    async def test_a_run_overrides_the_workflow(self) -> None:
        """Every option can be given here or there."""
        snapshot = await taken(hello)
        workflow = Workflow("w", snapshot=snapshot)
        counted: list[Any] = []
        await workflow.run(hello, on_event=counted.append)
        assert [event.type for event in counted][1] == "step_cache_hit"
        counted.clear()
        await workflow.run(hello, snapshot=None, on_event=counted.append)
        assert [event.type for event in counted][1] == "step_start"

    async def test_an_unknown_option_is_never_ignored(self) -> None:
        """It is named, with those there are."""
        with pytest.raises(InvalidArgument, match=r"^resumeState: expected .*resume_state"):
            Workflow("w", resumeState=None)  # type: ignore[call-overload]
        with pytest.raises(InvalidArgument, match=r"^retries: expected"):
            await Workflow("w").run(hello, retries=3)  # type: ignore[call-arg]

    async def test_a_snapshot_and_a_state_exclude_each_other(self) -> None:
        """Wherever they were given."""
        snapshot = await taken(hello)
        with pytest.raises(InvalidArgument, match="resume_state"):
            Workflow("w", snapshot=snapshot, resume_state=ResumeState())
        with pytest.raises(InvalidArgument, match="resume_state"):
            await Workflow("w", snapshot=snapshot).run(hello, resume_state=ResumeState())

    async def test_one_in_the_others_place_is_told(self) -> None:
        """The error names the option it belongs to."""
        with pytest.raises(SnapshotFormatError, match="resume_state="):
            Workflow("w", snapshot=ResumeState())  # type: ignore[call-overload]
        with pytest.raises(StateFormatError, match="snapshot="):
            Workflow("w", resume_state=await taken(hello))  # type: ignore[call-overload]

    async def test_a_snapshot_is_validated(self) -> None:
        """When it is given, with every problem."""
        with pytest.raises(SnapshotFormatError) as raised:
            Workflow("w", snapshot={"formatVersion": 2, "steps": {}})  # type: ignore[typeddict-item]
        assert len(raised.value.errors) >= 2
