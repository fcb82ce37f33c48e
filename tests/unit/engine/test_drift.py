"""A record is never returned to a call that differs from the recorded one."""

from perdure import Ok, Step
from perdure.errors import DriftError, PerdureError
from perdure.events import StepStart
from tests.unit.engine.bodies import Body, error_of, single, workflow


async def drift(before: Body, after: Body) -> DriftError:
    """Return the error of a function that resumes another one's run; no step runs."""
    first = workflow()
    await first.run(before)
    events: list[object] = []
    resumed = workflow(
        snapshot=first.snapshot(), on_definition_change="ignore", on_event=events.append
    )
    error = error_of(await resumed.run(after))
    assert isinstance(error, DriftError)
    assert not any(isinstance(event, StepStart) for event in events)
    assert resumed.snapshot()["steps"] == first.snapshot()["steps"]
    return error


async def test_other_arguments_are_refused() -> None:
    """The error names the step, what was recorded and what was asked for."""

    async def fetch(id: str) -> str:
        return id

    error = await drift(
        single(lambda step: step("fetch", fetch, "1")),
        single(lambda step: step("fetch", fetch, "2")),
    )
    assert error.step == "fetch"
    assert error.recorded != error.asked
    for word in ("'fetch'", error.recorded, error.asked, "key=", "new version", "new step id"):
        assert word in str(error)


async def test_another_kind_of_step_is_refused() -> None:
    """The record of a step is not that of a sleep."""
    error = await drift(
        single(lambda step: step("x", lambda: 1)), single(lambda step: step.sleep("x", 0))
    )
    assert (error.recorded, error.asked) == ("step", "sleep")


async def test_calls_that_are_swapped_are_refused() -> None:
    """Two calls with one id do not get each other's values."""

    async def double(n: int) -> int:
        return 2 * n

    def calls(*numbers: int) -> Body:
        async def body(step: Step) -> list[int]:
            return [await step("double", double, n) for n in numbers]

        return body

    await drift(calls(1, 2), calls(2, 1))


async def test_a_drift_error_ends_the_run_even_if_it_is_caught() -> None:
    """No later step runs."""

    async def fetch(id: str) -> str:
        return id

    async def after(step: Step) -> str:
        try:
            return await step("fetch", fetch, "2")
        except PerdureError:
            return await step("other", fetch, "3")

    await drift(single(lambda step: step("fetch", fetch, "1")), after)


async def test_a_lambda_has_no_arguments_to_compare() -> None:
    """Its id is compared; the values it closes over may differ."""

    def returning(value: int) -> Body:
        return single(lambda step: step("x", lambda: value))

    first = workflow()
    await first.run(returning(1))
    again = workflow(snapshot=first.snapshot(), on_definition_change="ignore")
    assert await again.run(returning(2)) == Ok(1)


async def test_a_key_is_the_identity_whatever_the_arguments() -> None:
    """`key=` declares that it is the same call."""

    async def fetch(id: str) -> str:
        return id

    def keyed(id: str) -> Body:
        return single(lambda step: step("fetch", fetch, id, key="user"))

    first = workflow()
    await first.run(keyed("1"))
    again = workflow(snapshot=first.snapshot(), on_definition_change="ignore")
    assert await again.run(keyed("2")) == Ok("1")
