"""An answer at every point of a run: the reply to the caller and the record of the run agree."""

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

import pytest

from perdure import AlreadyAnswered, Client, Runtime, Step, TooLate, workflow
from perdure.operations import Operations
from perdure.snapshot.acts import acts_of
from perdure.snapshot.asks import is_ask, token_of
from perdure.snapshot.format import open_waits
from perdure.stores.memory import MemoryStore
from perdure.testing import TestClock
from perdure.testing.faults import FaultyStore

RUN = "asks"


async def work(n: int) -> int:
    return n


async def check_token(request: Any) -> None:
    assert request.token


async def is_done(task: asyncio.Task[Any]) -> bool:
    """Return whether a branch has ended, after it could answer from its record."""
    done, _ = await asyncio.wait([task], timeout=0)
    return bool(done)


@workflow("expires")
async def expires(step: Step) -> str:
    answer = await step.approval("ask", "Go?", timeout="1h", remind="40m", notify=check_token)
    await step("after", work, 1)
    return "expired" if answer.expired else answer.by


@workflow("races a sleep")
async def races(step: Step) -> str:
    winner, _ = await step.race("r", step.sleep("s", "1h"), step.approval("ask", "Go?"))
    await step("after", work, 1)
    return str(winner)


@workflow("is cancelled in a block")
async def times_out(step: Step) -> str:
    async def asks() -> str:
        return (await step.approval("ask", "Go?")).by

    async def sleeps() -> None:
        await step.sleep("s", "1h")
        raise TimeoutError

    try:
        async with asyncio.TaskGroup() as group:
            task = group.create_task(asks())
            group.create_task(sleeps())
    except ExceptionGroup:
        await step("after", work, 1)
        return "late"
    return task.result()


@workflow("ends first")
async def ends_first(step: Step) -> str:
    task = asyncio.create_task(step.approval("ask", "Go?"))
    await step.sleep("s", "1h")
    return task.result().by if await is_done(task) else "ended"


@workflow("fails first")
async def fails_first(step: Step) -> str:
    task = asyncio.create_task(step.approval("ask", "Go?"))
    await step.sleep("s", "1h")
    if await is_done(task):
        return task.result().by
    raise ValueError("no")


@workflow("begins again", deadline="1d")
async def begins_again(step: Step, n: int) -> str:
    if n:
        return "again"
    task = asyncio.create_task(step.approval("ask", "Go?"))
    await step.sleep("s", "1h")
    if not await is_done(task):
        await step.continue_as_new(1)
    return task.result().by


@workflow("rewound")
async def rewound(step: Step) -> str:
    await step("before", work, 1)
    return (await step.approval("ask", "Go?")).by


async def wait_an_hour(runtime: Runtime, clock: TestClock) -> None:
    for _ in range(6):
        await clock.advance(timedelta(minutes=20))
        await runtime.sweep()


async def cancel(runtime: Runtime, clock: TestClock) -> None:
    await Client(runtime.store, clock=clock).cancel(RUN)


async def operate(runtime: Runtime, clock: TestClock) -> None:
    operations = Operations(runtime.store, clock=clock)
    await operations.cancel(RUN, by="ops")


async def wake(runtime: Runtime, clock: TestClock) -> None:
    await Operations(runtime.store, clock=clock).wake(RUN, by="ops")
    await runtime.sweep()


async def wake_all(runtime: Runtime, clock: TestClock) -> None:
    """End all waits, so that branches end at once."""
    await Operations(runtime.store, clock=clock).wake(RUN, by="ops")
    await clock.advance(timedelta(minutes=2))
    await runtime.sweep()


Ending = Callable[[Runtime, TestClock], Awaitable[None]]

ENDINGS: list[tuple[Any, Any, Ending]] = [
    (expires, None, wait_an_hour),
    (expires, None, wake),
    (expires, None, cancel),
    (expires, None, operate),
    (races, None, wait_an_hour),
    (times_out, None, wait_an_hour),
    (ends_first, None, wait_an_hour),
    (ends_first, None, wake_all),
    (fails_first, None, wake_all),
    (races, None, wake_all),
    (times_out, None, wake_all),
    (fails_first, None, wait_an_hour),
    (begins_again, 0, wait_an_hour),
]


class AnsweringStore(FaultyStore):
    """Answers the open question of the run before a store call of the process that executes it."""

    def __init__(self, store: MemoryStore, at: int) -> None:
        super().__init__(store)
        self._at = at
        self._client = Client(store, clock=TestClock())
        self.token = ""
        self.accepted: bool | None = None

    async def _pass(self, verb: str, *arguments: Any, **options: Any) -> Any:
        if len(self.calls) + 1 == self._at:
            await self.answer()
        return await super()._pass(verb, *arguments, **options)

    async def answer(self) -> None:
        snapshot = await self._client.store.load(RUN)
        waits = [] if snapshot is None else [each for each in open_waits(snapshot) if is_ask(each)]
        if not waits:
            return
        self.token = token_of(RUN, waits[0])
        try:
            await self._client.approve(self.token, by="ana")
        except TooLate:
            self.accepted = False
        else:
            self.accepted = True


def is_answered(snapshot: Any) -> bool:
    """Return whether a run has recorded the answer, as that of its wait or as an act."""
    answers = [record.get("answer") for record in snapshot["steps"].values()]
    acts = [act for act in acts_of(snapshot.get("metadata")) if "answers" in act]
    return bool(acts) or any(each and not each.get("expired") for each in answers)


async def live(definition: Any, payload: Any, ending: Ending, at: int) -> AnsweringStore:
    clock = TestClock()
    store = AnsweringStore(MemoryStore(clock=clock), at)
    runtime = Runtime(store, workflows=[definition], suspend_after=0, clock=clock)
    await runtime.trigger(definition, payload, run_id=RUN)
    await ending(runtime, clock)
    for _ in range(5):
        await runtime.sweep()
    return store


@pytest.mark.parametrize(("definition", "payload", "ending"), ENDINGS)
async def test_the_caller_and_the_record_agree_at_every_store_call(
    definition: Any, payload: Any, ending: Ending
) -> None:
    calls = len((await live(definition, payload, ending, 0)).calls)
    outcomes = set()
    for at in range(1, calls + 1):
        store = await live(definition, payload, ending, at)
        outcomes.add(store.accepted)
        snapshot: Any = await store.load(RUN)
        assert is_answered(snapshot) is bool(store.accepted), (at, store.calls[at - 1])
        if store.accepted is not None:
            refusal = AlreadyAnswered if store.accepted else TooLate
            with pytest.raises(refusal):
                await Client(store).approve(store.token, by="bob")
    assert True in outcomes


async def test_an_answer_in_time_wins_a_race() -> None:
    for at in range(1, len((await live(races, None, wait_an_hour, 0)).calls) + 1):
        store = await live(races, None, wait_an_hour, at)
        run = await Runtime(store, workflows=[races]).get_run(RUN)
        assert run is not None
        assert run.output == ("1" if store.accepted else "0")


async def test_a_rewind_closes_a_question_before_it_asks_again(
    store: MemoryStore, clock: TestClock
) -> None:
    runtime = Runtime(store, workflows=[rewound], clock=clock)
    run = await runtime.trigger(rewound, run_id=RUN)
    (first,) = run.pending
    await Operations(store, clock=clock).rewind(RUN, "before", by="ops", why="again")
    await runtime.sweep()
    (second,) = (await runtime.get_run(RUN)).pending  # type: ignore[union-attr]  # it exists
    assert second.token != first.token
    with pytest.raises(TooLate, match="does not wait for this answer"):
        await runtime.approve(first.token, by="ana")
    await runtime.approve(second.token, by="bob")
    await runtime.sweep()
    assert await runtime.result(RUN) == "bob"


async def test_an_answer_just_before_a_rewind_is_recorded(
    store: MemoryStore, clock: TestClock
) -> None:
    runtime = Runtime(store, workflows=[rewound], clock=clock)
    (wait,) = (await runtime.trigger(rewound, run_id=RUN)).pending
    client = Client(store, clock=clock)
    await client.approve(wait.token, by="ana", note="yes")
    await Operations(store, clock=clock).rewind(RUN, "before", by="ops", why="again")
    with pytest.raises(AlreadyAnswered, match="by ana"):
        await client.approve(wait.token, by="bob")
