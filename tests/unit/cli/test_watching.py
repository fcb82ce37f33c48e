"""What `perdure watch` prints about a run while it changes."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from perdure import Runtime, Step, workflow
from perdure.cli.context import Settings
from perdure.cli.watching import Follower
from perdure.insights import Insights
from perdure.operations import Operations
from perdure.store import RunSummary
from perdure.stores import MemoryStore
from perdure.testing import FaultyStore

Change = Callable[[], Awaitable[object]]


class LateStore(FaultyStore):
    """Changes a run just after its summary was read, as another process may do."""

    def __init__(self, store: MemoryStore, *changes: Change) -> None:
        super().__init__(store)
        self.changes = [*changes]

    async def summaries(self, ids: Sequence[str], /) -> Sequence[RunSummary | None]:
        summaries: Sequence[RunSummary | None] = await self._pass("summaries", ids)
        if self.changes:
            await self.changes.pop(0)()
        return summaries


@workflow("order")
async def order(step: Step) -> str:
    await step("charge", lambda: 17)
    await step.wait_for_event("approval", "approved", timeout="3d")
    return await step("ship", lambda: "parcel 7")


async def nothing() -> None:
    """Leave the run as it is."""


async def waiting_run() -> tuple[MemoryStore, Change, Change]:
    """Create a run that waits; return also how to change and how to complete it."""
    memory = MemoryStore()
    runtime = Runtime(memory, workflows=[order], suspend_after=0)
    await runtime.trigger(order, run_id="r")

    async def approve() -> None:
        await runtime.signal("r", "approved")
        await runtime.resume("r")

    return memory, lambda: runtime.signal("r", "other"), approve


async def test_a_change_is_yielded_once() -> None:
    """Even if the run changed again after it was seen, before it was read."""
    memory, change, approve = await waiting_run()
    store = LateStore(memory, change, nothing, nothing, approve)
    revisions = [facts.run.revision async for facts in Insights(store).watch("r")]
    assert len({*revisions}) == len(revisions)


async def test_a_sentence_that_differs_only_in_durations_is_printed_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    memory, change, approve = await waiting_run()
    store = LateStore(memory, *[nothing, nothing, nothing, change] * 3, approve)
    assert await Follower(Settings(), Insights(store), "r").run() == "completed"
    printed = capsys.readouterr().out
    assert printed.count("Waiting for event") == 1
    assert [printed.count(f"✓ {name}") for name in ("charge", "ship")] == [1, 1]


@workflow("loop")
async def loop(step: Step, left: int) -> int:
    await step("turn", lambda: left)
    await step.sleep("pause", "1h")
    if left:
        await step.continue_as_new(left - 1)
    return left


@workflow("many")
async def many(step: Step) -> int:
    return len(await step.map("pack", [*range(250)], lambda number: number))


async def test_every_record_of_a_long_run_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    store: Any = MemoryStore()
    await Runtime(store, workflows=[many]).trigger(many, run_id="r")
    await Follower(Settings(), Insights(store), "r").run()
    assert capsys.readouterr().out.count("✓ pack") == 250


async def test_records_that_are_removed_and_made_again_are_printed_again(
    capsys: pytest.CaptureFixture[str],
) -> None:
    memory = MemoryStore()
    runtime = Runtime(memory, workflows=[loop], suspend_after=0)
    await runtime.trigger(loop, 1, run_id="r")

    printed: list[str] = []
    wakes = 0

    async def wake_when_printed() -> None:
        nonlocal wakes
        printed.extend(capsys.readouterr().out.splitlines())
        if sum("suspended" in line for line in printed) > wakes:
            wakes += 1
            await Operations(memory).wake("r", by="ana")
            await runtime.resume("r")
        store.changes.append(wake_when_printed)

    store = LateStore(memory, wake_when_printed)
    await Follower(Settings(), Insights(store), "r").run()
    printed.extend(capsys.readouterr().out.splitlines())
    turn = [["✓", "turn"], ["suspended", "Suspended"]]
    end = [["✓", "pause"], ["completed", "Completed"]]
    assert [line.split()[1:3] for line in printed] == [*turn, *turn, *end]
