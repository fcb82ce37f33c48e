"""Insights: what an operator can find out about runs, from the store alone."""

from typing import Any

import pytest

from perdure import Retry, Runtime, Step, workflow
from perdure.insights import MASK, Insights, InvalidQuery, Redact, to_json
from perdure.stores import MemoryStore
from perdure.testing import TestClock


class CarrierDown(Exception):
    """The carrier's service is unavailable."""


async def ship() -> None:
    raise CarrierDown("503 from carrier")


@workflow("order")
async def order(step: Step, payload: dict[str, Any]) -> None:
    await step("charge", lambda: "receipt 17")
    if "approved" not in payload:
        await step.wait_for_event("approval", "approved", timeout="3d")
    await step("ship", ship, retry=Retry(2, delay=0))


@pytest.fixture
async def insights(clock: TestClock) -> Insights:
    """Return insights into a store with a waiting and a failed order."""
    store = MemoryStore(clock=clock)
    runtime = Runtime(store, workflows=[order], clock=clock, suspend_after=0)
    await runtime.trigger(order, {"total": 250, "iban": "DE12"}, run_id="order-1")
    await runtime.trigger(order, {"total": 40, "approved": True}, run_id="order-2")
    return Insights(store, clock=clock)


async def test_one_sentence_explains_why_a_run_makes_no_progress(insights: Insights) -> None:
    answer = await insights.why("order-2")
    assert answer.sentence == (
        'Step "ship" failed after 2 attempts with CarrierDown: 503 from carrier. '
        "Nothing will happen until the run is retried."
    )


async def test_the_sentence_counts_the_time(insights: Insights, clock: TestClock) -> None:
    await clock.advance("2d")
    answer = await insights.why("order-1")
    assert answer.sentence == 'Waiting for event "approved" for 2 days; times out in 1 day.'


async def test_runs_are_found_by_their_header_and_their_payload(insights: Insights) -> None:
    failed = await insights.runs("status:failed workflow:order since:24h error:carrier")
    large = await insights.runs("payload.total:>100")
    assert [run.id for run in failed.runs] == ["order-2"]
    assert [run.id for run in large.runs] == ["order-1"]


async def test_a_mistake_in_a_query_is_explained(insights: Insights) -> None:
    with pytest.raises(InvalidQuery, match="did you mean 'status'") as caught:
        await insights.runs("order- statos:failed")
    assert caught.value.position == 7


async def test_a_run_is_shown_with_its_steps_and_its_error(insights: Insights) -> None:
    facts = await insights.run("order-2")
    steps = await insights.steps("order-2")
    assert [(step.name, step.ok) for step in steps.steps] == [("charge", True), ("ship", False)]
    assert facts.error is not None
    assert facts.error.frames[-1].function == "ship"


async def test_failures_are_grouped(insights: Insights) -> None:
    (group,) = (await insights.errors("24h")).groups
    assert (group.workflow, group.step, group.type) == ("order", "ship", "CarrierDown")
    assert [run.id for run in (await insights.runs(group.query)).runs] == ["order-2"]


async def test_secrets_are_not_shown_and_not_found(insights: Insights) -> None:
    assert (await insights.run("order-1")).payload == {"total": 250, "iban": MASK}
    assert (await insights.runs("payload.iban:DE12")).runs == ()


async def test_what_is_secret_can_be_chosen(clock: TestClock) -> None:
    store = MemoryStore(clock=clock)
    runtime = Runtime(store, workflows=[order], clock=clock, suspend_after=0)
    await runtime.trigger(order, {"total": 1, "iban": "DE12"}, run_id="order-1")
    insights = Insights(store, redact=Redact(names=(), paths=("payload.total",)), clock=clock)
    assert (await insights.run("order-1")).payload == {"total": MASK, "iban": "DE12"}


async def test_answers_are_json_for_programs(insights: Insights) -> None:
    data = to_json(await insights.why("order-2"))
    assert data["facts"] == {"steps": ["ship"], "error": "CarrierDown"}
