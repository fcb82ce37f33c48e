"""Values that derive from a run's seed: what they identify, and that they never change."""

import asyncio
import random
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure import Ok, Step
from perdure.engine.values import derive
from perdure.errors import InvalidArgument, PerdureError
from tests.unit.engine.bodies import error_of, run, run_and_replay, single, workflow

SEED = "0123456789abcdef"


def with_metadata(**metadata: object) -> Any:
    """Return the snapshot of a run without steps."""
    return {**workflow().snapshot(), "metadata": metadata}


async def draw(step: Step) -> list[str]:
    return [str(step.random()), str(step.random()), str(step.uuid()), str(step.uuid("order"))]


async def test_the_values_of_a_seed_never_change() -> None:
    """Other values would contradict what runs that are under way have done with the first ones."""
    assert await run(draw, snapshot=with_metadata(seed=SEED)) == Ok(
        [
            "0.42019758204480995",
            "0.4239174324288807",
            "004b2de9-0fa7-495a-bd1f-dfc80e0fd471",
            "2c745368-7969-4a94-b144-5c3598a04ae7",
        ]
    )


async def test_the_values_of_a_run_without_a_seed_derive_from_its_id() -> None:
    async def body(step: Step) -> str:
        return str(step.uuid())

    snapshot = with_metadata(workflowId="steps:ä")
    assert await run(body, snapshot=snapshot) == Ok("1d59bb17-5b3b-449c-91e8-6f6990f42a8a")


parts = st.text('a1/>#%,:"[]\\~ é', max_size=6)
places = st.tuples(parts, st.integers(1, 12), parts, parts, parts)


@given(places, places)
def test_places_that_differ_have_different_values(one: Any, other: Any) -> None:
    assert (derive(*one) == derive(*other)) == (one == other)


async def test_a_replay_sees_the_same_values() -> None:
    first, replayed = await run_and_replay(draw)
    assert first == replayed


async def test_each_generation_has_its_own_values() -> None:
    first = await run(draw, snapshot=with_metadata(seed=SEED))
    second = await run(draw, snapshot=with_metadata(seed=SEED, generation=2))
    assert not set(first.unwrap()) & set(second.unwrap())


async def test_each_call_in_each_branch_has_its_own_values() -> None:
    async def body(step: Step) -> list[str]:
        async def branch() -> list[str]:
            return await draw(step)

        drawn = await asyncio.gather(branch(), branch())
        return [*drawn[0], *drawn[1], *await draw(step)]

    values = (await run(body)).unwrap()
    assert len(set(values)) == len(values) == 12


async def test_branches_that_finish_in_another_order_keep_their_values() -> None:
    async def body(step: Step) -> list[float]:
        async def branch() -> float:
            await asyncio.sleep(random.random() / 100)
            return step.random()

        return await asyncio.gather(*(branch() for _ in range(5)))

    first, replayed = await run_and_replay(body)
    assert first == replayed


async def test_a_named_uuid_belongs_to_its_name() -> None:
    """Other calls do not change it, and asking twice returns the same."""

    async def body(step: Step) -> bool:
        before = step.uuid("order")
        step.uuid()
        return before == step.uuid("order") != step.uuid("other")

    assert await run(body) == Ok(True)


async def test_a_uuid_is_of_version_4() -> None:
    async def body(step: Step) -> bool:
        uuids = [step.uuid() for _ in range(50)]
        return all(u.version == 4 and u.variant == UUID(int=0, version=4).variant for u in uuids)

    assert await run(body) == Ok(True)


async def test_random_numbers_are_spread_over_the_unit_interval() -> None:
    async def body(step: Step) -> bool:
        numbers = [step.random() for _ in range(2000)]
        return all(0 <= n < 1 for n in numbers) and abs(sum(numbers) / 2000 - 0.5) < 0.03

    assert await run(body) == Ok(True)


@pytest.mark.parametrize("draw", [Step.random, Step.uuid, Step.tag])
async def test_the_function_of_a_step_is_refused_with_the_alternative(draw: Any) -> None:
    error = error_of(await run(single(lambda step: step("draw", lambda: draw(step)))))
    assert isinstance(error, PerdureError)
    assert "inside the function of step 'draw'" in str(error)
    assert "in the workflow function" in str(error)


@pytest.mark.parametrize("name", ["~uuid", None, 7, "\ud800"])
async def test_a_name_that_a_uuid_cannot_have_is_refused(name: Any) -> None:
    async def body(step: Step) -> None:
        step.uuid(name)

    assert isinstance(error_of(await run(body)), InvalidArgument)


async def test_a_user_cannot_set_the_seed() -> None:
    with pytest.raises(InvalidArgument, match="without 'seed'"):
        workflow().snapshot(metadata={"seed": "mine"})


async def test_a_snapshot_with_other_metadata_keeps_the_seed() -> None:
    first = workflow(snapshot=with_metadata(seed=SEED))
    result = await first.run(draw)
    assert await run(draw, snapshot=first.snapshot(metadata={"mine": 1})) == result
