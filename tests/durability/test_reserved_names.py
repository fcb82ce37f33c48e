"""Names that begin with `~` belong to the engine; users' names do not collide with them."""

import pytest

from perdure import Runtime, Step, workflow
from perdure.errors import InvalidArgument
from perdure.stores.memory import MemoryStore
from perdure.testing import TestClock
from tests.durability.conftest import MakeRuntime


@workflow("nap")
async def nap(step: Step) -> str:
    await step.sleep("replay:nap", "1d")
    return str(await step.wait_for_event("cancel", "cancel"))


async def test_names_like_those_of_the_engine_are_the_users(
    make_runtime: MakeRuntime, clock: TestClock
) -> None:
    """A sleep `replay:…` and an event `cancel` are nothing special."""
    runtime = make_runtime(nap)
    run = await runtime.trigger(nap, run_id="r")
    assert [wait.id for wait in run.pending] == ["replay:nap"]
    assert await runtime.sweep() == []
    await clock.advance("1d")
    await runtime.resume("r")
    await runtime.signal("r", "cancel", "by ana")
    assert (await runtime.resume("r")).output == "by ana"


async def test_a_user_cannot_send_an_event_of_the_engine(
    make_runtime: MakeRuntime, store: MemoryStore
) -> None:
    """`signal(run, "~cancel")` is refused and sends nothing; `cancel` still works."""
    runtime = make_runtime(nap)
    await runtime.trigger(nap, run_id="r")
    with pytest.raises(InvalidArgument, match=r"event: .*does not begin with '~'"):
        await runtime.signal("r", "~cancel", "no reason")
    assert await store.inbox("r") == []
    assert (await runtime.cancel("r")).status == "cancelled"


@pytest.mark.parametrize("wait", [True, False])
async def test_a_user_cannot_create_a_run_of_the_engine(store: MemoryStore, wait: bool) -> None:
    """Nothing is written; the runs of the engine can be read."""
    runtime = Runtime(store, workflows=[nap])
    with pytest.raises(InvalidArgument, match=r"run_id: .*does not begin with '~'"):
        await runtime.trigger(nap, run_id="~log:x", wait=wait)
    assert await runtime.get_run("~log:x") is None
