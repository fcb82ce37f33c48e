"""A run as users see it."""

from perdure import Runtime, Step, workflow
from perdure.stores import MemoryStore


@workflow("nap")
async def nap(step: Step) -> None:
    await step.sleep("night", "8h")


async def test_the_repr_of_a_run_shows_the_fields_that_are_set() -> None:
    run = await Runtime(MemoryStore()).trigger(nap, run_id="1")
    text = repr(run)
    assert text.startswith("Run(id='1', workflow='nap', version=1, status='suspended', ")
    assert "pending=(Wait(id='night', wake_at=" in text
    assert not [name for name in ("error", "tags", "token", "rollback") if f"{name}=" in text]
