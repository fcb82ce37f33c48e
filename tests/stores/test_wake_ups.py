"""A write wakes a worker of its own process once, although the server announces it as well.

A signal does not wake it at all if the run comes with it.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import Any

import pytest

from perdure import Client, Runtime, Step, Worker, workflow
from perdure.store import Grant
from perdure.stores import postgres, redis

pytestmark = pytest.mark.server

RUNS = 5


@workflow("approval")
async def approval(step: Step) -> str:
    await step.wait_for_event("wait", "approved")
    return await step("work", lambda: "done")


@workflow("last")
async def last(step: Step) -> str:
    return await step("work", lambda: "done")


class Observed:
    """Counts the notifications of a store, and the runs of each claim.

    `is_ready` is set after the first claim that began while the worker was listening.
    """

    def __init__(self, store: Any) -> None:
        self.claims: list[int] = []
        self.notifications = 0
        self.is_ready = asyncio.Event()
        self._claim, self._listen = store.claim, store.notifications
        store.claim, store.notifications = self._counted_claim, self._counted_notifications

    async def _counted_claim(self, *arguments: Any, **options: Any) -> Sequence[Grant]:
        is_listening = self.notifications > 0
        grants: Sequence[Grant] = await self._claim(*arguments, **options)
        self.claims.append(len(grants))
        if is_listening:
            self.is_ready.set()
        return grants

    async def pause(self) -> None:
        """Wait until the worker claims no more, so that it has free slots."""
        claims = -1
        while claims != len(self.claims):
            claims = len(self.claims)
            await asyncio.sleep(0.1)

    async def _counted_notifications(self) -> AsyncIterator[None]:
        async for _ in self._listen():
            self.notifications += 1
            yield


@pytest.fixture(params=["postgres", "redis"])
def open_store(request: pytest.FixtureRequest) -> Callable[[], Any]:
    url = request.getfixturevalue(f"{request.param}_url")
    if request.param == "postgres":
        return partial(postgres, url)
    return partial(redis, url, namespace=request.getfixturevalue("redis_prefix"))


@pytest.mark.alone  # on a busy machine, what wakes the worker may come during its claim
async def test_a_new_run_is_one_wake_up_and_one_claim(open_store: Callable[[], Any]) -> None:
    """The run of another client comes last: nothing that was announced before it is missing."""
    async with open_store() as store, open_store() as other:
        runtime, observed = Runtime(store, workflows=[last]), Observed(store)
        async with Worker(runtime, poll="1h"):
            # The first notification is for what was due before.
            await observed.is_ready.wait()
            observed.claims.clear()
            observed.notifications = 0
            for _ in range(RUNS):
                run = await runtime.trigger(last, wait=False)
                assert await runtime.result(run) == "done"
            await runtime.result(await Client(other).trigger(last))
    assert observed.claims == [1] * (RUNS + 1)
    assert observed.notifications == RUNS + 1


async def test_a_signal_needs_neither_a_wake_up_nor_a_claim(open_store: Callable[[], Any]) -> None:
    """The run of another client comes last, and is the only one that is claimed."""
    async with open_store() as store, open_store() as other:
        runtime, observed = Runtime(store, workflows=[approval, last]), Observed(store)
        runs = [await runtime.trigger(approval, run_id=f"run-{n}") for n in range(RUNS)]
        async with Worker(runtime, poll="1h"):
            # The first notification is for what was due before.
            await observed.is_ready.wait()
            await observed.pause()
            observed.claims.clear()
            observed.notifications = 0
            for run in runs:
                await runtime.signal(run.id, "approved", wait=False)
                assert await runtime.result(run) == "done"
            await runtime.result(await Client(other).trigger(last))
    assert observed.claims == [1]
    assert observed.notifications == 1


async def test_no_run_is_missed_after_a_write_of_unknown_outcome(
    open_store: Callable[[], Any],
) -> None:
    """It may be committed later, so from then on the server's announcements count as well."""
    async with open_store() as store:
        backend = store._backend
        sender = backend.server if hasattr(backend, "server") else backend._notifications
        observed = Observed(store)
        listening = asyncio.create_task(consume(store.notifications()))
        async with asyncio.timeout(10):
            while not observed.notifications:
                await asyncio.sleep(0.01)
            with pytest.raises(TimeoutError), sender.announcing():
                raise TimeoutError
            # One for each of these, one for the failure, and more for what the server announces.
            enqueued = observed.notifications = 0
            while observed.notifications <= enqueued + 1:
                await Client(store).trigger("last")
                enqueued += 1
    await listening


async def consume(notifications: AsyncIterator[None]) -> None:
    async for _ in notifications:
        pass
