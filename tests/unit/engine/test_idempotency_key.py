"""The idempotency key of a step: what it identifies, and that it never changes."""

import asyncio
import re
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure import ResumeState, Step
from perdure.engine.call import idempotency_key
from perdure.errors import InvalidArgument, SnapshotFormatError
from tests.unit.engine.bodies import error_of, single, workflow


@pytest.mark.parametrize(
    ("call", "key"),
    [
        (("order-1", 1, "", "pay"), "4155471e1b6db8dee068576d7369dd9f"),
        (("order-1", 2, "", "pay"), "79f3fa46e0fceb5fe9be7441af629c9c"),
        (("bestellung-ä", 1, "1/both>/left", "pay#2"), "8637a1f41aa1788a543ce19c30cfb7fb"),
    ],
)
def test_the_key_of_a_call_never_changes(call: tuple[str, int, str, str], key: str) -> None:
    """Another key would repeat the payments of runs that were started before."""
    assert idempotency_key(*call) == key


# What the parts are made of: every separator that a form of the key could use.
texts = st.text('a1\0/>#%,:"[]\\~ é', max_size=6)
calls = st.tuples(texts, st.integers(1, 12), texts, texts)


@given(calls, calls)
def test_calls_that_differ_have_different_keys(one: Any, other: Any) -> None:
    """No id can imitate another run, branch, step or generation."""
    assert (idempotency_key(*one) == idempotency_key(*other)) == (one == other)


@given(calls)
def test_a_key_is_accepted_by_services_that_want_a_uuid(call: Any) -> None:
    """It is 32 hexadecimal digits, however long the ids are."""
    key = idempotency_key(call[0] * 500, *call[1:])
    assert re.fullmatch(r"[0-9a-f]{32}", key)
    assert UUID(key).hex == key


async def keys_of(body: Any, **options: Any) -> list[str]:
    """Return the keys of the steps of a run, in order."""
    keys: list[str] = []

    async def run(step: Step) -> None:
        await body(step, lambda: keys.append(step.idempotency_key))

    (await workflow(**options).run(run)).unwrap()
    return keys


async def test_each_call_in_each_branch_has_its_own_key() -> None:
    async def body(step: Step, note: Any) -> None:
        async def branch() -> None:
            await step("a", note)
            await step("a", note)

        await asyncio.gather(branch(), branch())
        await step("a", note)
        await step("b", note, key="k")
        await step.all({"1/a": note, "c": note})
        await step.race("r", {"x": lambda: step("a", note)})

    keys = await keys_of(body)
    assert len(keys) == len(set(keys)) == 9


def in_generation(generation: object) -> Any:
    """Return the snapshot of a run without steps."""
    snapshot: Any = workflow().snapshot()
    return {**snapshot, "metadata": {"workflowId": "order-1", "generation": generation}}


async def test_each_generation_has_its_own_keys() -> None:
    """A run that begins again pays again; absent means the first generation."""

    async def body(step: Step, note: Any) -> None:
        await step("pay", note)

    without: Any = {**in_generation(1), "metadata": {"workflowId": "order-1"}}
    snapshots = [without, *map(in_generation, (1, 2, 12))]
    keys = [(await keys_of(body, snapshot=snapshot))[0] for snapshot in snapshots]
    expected = [idempotency_key("order-1", n, "", "pay") for n in (1, 1, 2, 12)]
    assert keys == expected


async def test_a_resume_state_has_no_run_id_and_so_no_keys() -> None:
    """A run that resumes from one has an id of its own, and with it other keys."""

    async def body(step: Step, note: Any) -> None:
        await step("pay", note)

    first, second = [await keys_of(body, resume_state=ResumeState()) for _ in range(2)]
    assert first != second


async def test_a_snapshot_with_other_metadata_keeps_the_generation() -> None:
    first = workflow(snapshot=in_generation(3))
    assert (await first.run(single(lambda step: step("a", lambda: 1)))).ok
    metadata = first.snapshot(metadata={"by": "ana"}).get("metadata")
    assert metadata is not None
    assert (metadata["generation"], metadata["workflowId"]) == (3, "order-1")


def test_a_malformed_generation_is_refused() -> None:
    with pytest.raises(SnapshotFormatError, match=r"metadata\.generation"):
        workflow(snapshot=in_generation("2"))


def test_a_generation_cannot_be_set_as_metadata() -> None:
    with pytest.raises(InvalidArgument, match="without 'generation'"):
        workflow().snapshot(metadata={"generation": 2})


async def test_there_is_no_key_outside_a_step() -> None:
    """The error says where to use it."""

    async def body(step: Step) -> str:
        return step.idempotency_key

    assert "inside the step's function" in str(error_of(await workflow().run(body)))
