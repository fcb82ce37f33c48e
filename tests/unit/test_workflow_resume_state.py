"""A `Workflow` that starts from a resume state."""

import asyncio
from datetime import UTC, datetime
from functools import partial
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
    parse_state,
    stringify_state,
)
from perdure.errors import StateFormatError
from perdure.resume import ResumeEntry
from tests.unit.workflows import Counted, User, hello, snapshot_of


async def test_run_with_state_returns_the_result_and_the_state() -> None:
    """It does so for a failed run too."""
    counted = Counted()
    result, state = await Workflow("w").run_with_state(counted.body)
    assert isinstance(result, Err)
    assert list(state.steps) == list("abcd")
    assert state.steps["a"].result == Ok("A")
    assert isinstance(state.steps["d"].result, Err)


async def test_recorded_steps_of_a_state_do_not_run() -> None:
    """Successes and failures are replayed, from the stringified state too."""
    counted = Counted()
    _, state = await Workflow("w").run_with_state(counted.body)
    counted.ran.clear()
    states = (state, parse_state(stringify_state(state)))
    for workflow in (Workflow("w", resume_state=each) for each in states):
        result = await workflow.run(counted.body)
        assert isinstance(result, Err)
        assert str(result.error) == "d failed"
    assert counted.ran == []


async def test_steps_that_are_removed_from_a_state_run_again() -> None:
    """This is how failed steps are retried."""
    counted = Counted()
    _, state = await Workflow("w").run_with_state(counted.body)
    completed = {key: entry for key, entry in state.steps.items() if entry.result.ok}
    counted.ran.clear()
    await Workflow("w").run(counted.body, resume_state=ResumeState(completed))
    assert counted.ran == ["d"]


async def test_the_state_of_a_resumed_run_has_all_steps() -> None:
    """Resuming and saving repeatedly loses nothing."""
    counted = Counted()
    _, state = await Workflow("w").run_with_state(counted.body)
    for _ in range(3):
        _, state = await Workflow("w").run_with_state(counted.body, resume_state=state)
    assert list(state.steps) == list("abcd")
    assert counted.ran == list("abcd")


async def test_parallel_branches_sleeps_and_races_are_restored() -> None:
    """The kind of a step and its branch do not matter."""
    ran: list[str] = []

    async def work(name: str) -> str:
        ran.append(name)
        return name

    async def body(step: Step) -> Any:
        async def line(name: str) -> str:
            return await step("x", partial(work, name))

        lines = await asyncio.gather(line("a"), line("b"))
        await step.sleep("nap", 0.001)
        return [*lines, *await step.race("race", {"only": lambda: line("c")})]

    result, state = await Workflow("w").run_with_state(body)
    again = await Workflow("w").run(body, resume_state=parse_state(stringify_state(state)))
    assert again == result == Ok(["a", "b", "only", "c"])
    assert ran == ["a", "b", "c"]


async def test_an_instance_is_restored_by_its_type() -> None:
    """The type is the return type of the step's function."""
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


async def test_the_error_of_an_err_is_restored_by_its_type() -> None:
    """The type is the return type of the step's function."""
    error = User("Ana", datetime(2030, 1, 1, tzinfo=UTC))

    async def find() -> Result[str, User]:
        return Err(error)

    async def body(step: Step) -> str:
        return await step("find", find)

    _, state = await Workflow("w").run_with_state(body)
    for each in (state, parse_state(stringify_state(state))):
        assert await Workflow("w").run(body, resume_state=each) == Err(error)


async def test_a_returned_exception_is_not_raised() -> None:
    """`Err(exception)` is restored as what the step returned."""

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
async def test_a_state_factory_is_called_once_per_run(is_async: bool) -> None:
    """It is not called before."""
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


async def test_a_state_factory_can_return_none() -> None:
    """Then the run starts from scratch."""
    assert await Workflow("w").run(hello, resume_state=lambda: None) == Ok("hello")


async def test_a_state_factory_that_returns_a_snapshot_is_refused() -> None:
    """A snapshot is not a resume state; the error names the right option."""
    snapshot: Any = await snapshot_of(hello)
    with pytest.raises(StateFormatError, match="snapshot="):
        await Workflow("w").run(hello, resume_state=lambda: snapshot)


class Declined(Exception):
    pass


async def test_an_exception_is_caught_by_its_class_after_a_resume() -> None:
    """A resume state in text form says which class it was, also for the members of a group."""
    ran: list[str] = []

    async def decline() -> None:
        ran.append("pay")
        raise ExceptionGroup("one", [Declined("no funds")])

    async def body(step: Step) -> str:
        caught = ""
        try:
            await step("pay", decline)
        except* Declined as group:
            caught = str(group.exceptions[0])
        return caught

    _, state = await Workflow("pay").run_with_state(body)
    resumed = parse_state(stringify_state(state))
    assert await Workflow("pay").run(body, resume_state=resumed) == Ok("no funds")
    assert ran == ["pay"]
