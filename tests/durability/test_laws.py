"""Nothing is seen before it is durable, and nothing is done twice, in programs of every shape.

Each test is a program that violated a law of the engine during development.
"""

import asyncio
import logging
import sqlite3
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest

from perdure import Runtime, Step, Worker, workflow
from perdure.errors import (
    AlreadyRunning,
    Cancelled,
    DriftError,
    NestedStep,
    RunFailed,
    RunOver,
    StoreError,
    StoreUnavailable,
    VersionMismatch,
)
from perdure.store import Entry, Message, Refusal, Verdict
from perdure.stores import MemoryStore, sqlite
from perdure.stores.sqlite import SqliteStore
from perdure.testing.clock import TestClock
from perdure.testing.faults import FaultyStore


class SlowStore(MemoryStore):
    """A store that takes a while to write, and knows which keys are durable."""

    def __init__(self, seconds: float = 0.1) -> None:
        super().__init__()
        self.seconds = seconds
        self.durable: list[str] = []

    async def append(self, entries: Sequence[Entry], /) -> Sequence[Verdict]:
        await asyncio.sleep(self.seconds)
        verdicts = await super().append(entries)
        self.durable += [entry.step for entry in entries]
        return verdicts


@pytest.fixture
async def debits(tmp_path: Path) -> AsyncIterator[tuple[SqliteStore, Callable[[], list[str]]]]:
    """Return a SQLite store with a table of debits, and a function that reads them."""
    path = tmp_path / "runs.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE debits (name TEXT)")

    def committed() -> list[str]:
        with closing(sqlite3.connect(path)) as connection:
            return [name for (name,) in connection.execute("SELECT name FROM debits ORDER BY 1")]

    async with sqlite(path) as store:
        yield store, committed


async def debit(transaction: Any, name: str) -> None:
    await transaction.execute("INSERT INTO debits VALUES (?)", (name,))


async def test_a_keyed_value_is_seen_only_when_it_is_durable() -> None:
    """A call that was cancelled during its write does not make the next call return too early."""
    store = SlowStore()
    observations: list[tuple[str, list[str]]] = []

    @workflow("w")
    async def w(step: Step) -> None:
        try:
            async with asyncio.timeout(0.03):
                await step("pay", lambda: "paid", key="pay")
        except TimeoutError:
            observations.append(
                (await step("pay", lambda: "again", key="pay"), list(store.durable))
            )

    assert (await Runtime(store, workflows=[w]).trigger(w)).status == "completed"
    assert observations == [("paid", ["pay"])]


async def test_a_branch_that_is_cancelled_as_its_record_becomes_durable_has_recorded_it() -> None:
    """Another branch, whose record was in the same write, continues first and cancels it."""
    executions: list[str] = []

    async def pay() -> str:
        executions.append("pay")
        return "paid"

    @workflow("w")
    async def w(step: Step) -> str:
        async def cancel() -> None:
            await step("second", lambda: None)
            paying.cancel()

        # The first write is that of one record; the next one has both others.
        branches = [asyncio.create_task(each) for each in (step("first", lambda: None), cancel())]
        paying = asyncio.create_task(step("pay", pay, key="pay"))
        await asyncio.wait([*branches, paying])
        assert paying.cancelled()
        return await step("pay", pay, key="pay")

    run = await Runtime(SlowStore(0.01), workflows=[w]).trigger(w, run_id="r")
    assert (run.output, executions) == ("paid", ["pay"])


async def first_of_two_children(step: Step) -> None:
    await step.result("ends", await step.start("first", waits_for_event))


async def second_of_two_children(step: Step) -> None:
    await step.start("first", waits_for_event)
    await step.result("ends", await step.start("second", waits_for_event))


@workflow("waits-for-event")
async def waits_for_event(step: Step) -> None:
    await step.wait_for_event("wait", "go")


@pytest.mark.parametrize(
    ("before", "after", "signalled", "problem"),
    [
        (
            lambda step: step.wait_for_event("wait", "go"),
            lambda step: step.wait_for_event("wait", "come"),
            "r",
            "step 'wait' is waiting for event 'go', and .* asks to wait for event 'come'; use new",
        ),
        (
            lambda step: step.wait_for_event("wait", "go"),
            lambda step: step.sleep("wait", "1d"),
            "r",
            "is waiting for event 'go', and the function now asks to wait for a time",
        ),
        (
            first_of_two_children,
            second_of_two_children,
            "r/1/first",
            "is waiting for the end of run 'r/1/first', and .* of run 'r/1/second'",
        ),
    ],
)
async def test_a_wait_is_not_continued_by_another_call(
    before: Callable[[Step], Any], after: Callable[[Step], Any], signalled: str, problem: str
) -> None:
    """The answer to the wait would be returned to a call that did not ask for it."""
    store = MemoryStore()

    @workflow("w")
    async def first(step: Step) -> Any:
        return await before(step)

    @workflow("w")
    async def second(step: Step) -> Any:
        return await after(step)

    await Runtime(store, workflows=[first, waits_for_event]).trigger(first, run_id="r")
    runtime = Runtime(store, workflows=[second, waits_for_event])
    await Worker(runtime).run_until_idle()
    await runtime.signal(signalled, "go", wait=False)
    await Worker(runtime).run_until_idle()
    with pytest.raises(DriftError, match=problem):
        await runtime.result("r", timeout=10)


async def test_a_broken_run_raises_no_failure_that_is_not_recorded() -> None:
    """A step that fails after the run was broken raises what broke it."""

    class Refusing(MemoryStore):
        async def append(self, entries: Sequence[Entry], /) -> Sequence[Verdict]:
            raise StoreError("refused")

    observations: list[BaseException] = []
    failing = asyncio.Event()

    @workflow("w")
    async def w(step: Step) -> None:
        async def pay() -> None:
            try:
                await failing.wait()
            finally:
                raise ValueError("declined")

        async def branch() -> None:
            try:
                await step("pay", pay)
            except Exception as error:
                observations.append(error)
                raise

        await asyncio.gather(branch(), step("other", failing.set))

    with pytest.raises(StoreError, match="refused"):
        await Runtime(Refusing(), workflows=[w]).trigger(w)
    assert [str(error) for error in observations] == ["refused"]


async def test_a_broken_run_is_not_suspended_over_a_committed_transaction(
    debits: tuple[SqliteStore, Callable[[], list[str]]],
) -> None:
    """The reply to COMMIT is lost while another branch waits: the run is released, not settled."""
    real, committed = debits

    @workflow("pay")
    async def pay(step: Step) -> None:
        await asyncio.gather(
            step.transaction("debit", debit, "ana"), step.wait_for_event("approval", "approved")
        )

    faulty: Any = FaultyStore(real, fail_at=1, how="after", verbs={"transact"})
    with pytest.raises(StoreUnavailable):
        await Runtime(faulty, workflows=[pay], suspend_after=0.05).trigger(pay, run_id="r")
    runtime = Runtime(real, workflows=[pay], suspend_after=0.05)
    assert [step.key for step in (await runtime.resume("r")).history] == ["debit"]
    await runtime.signal("r", "approved")
    assert committed() == ["ana"]


@pytest.mark.parametrize("how", ["wait_for", "wait", "group"])
async def test_a_run_is_not_suspended_during_a_transaction(
    debits: tuple[SqliteStore, Callable[[], list[str]]], how: str
) -> None:
    """This holds whatever the function of the transaction awaits."""
    store, committed = debits
    starts: list[str] = []

    async def slow(transaction: Any) -> None:
        starts.append(how)
        await debit(transaction, "ana")
        match how:
            case "wait_for":
                await asyncio.wait_for(asyncio.sleep(0.3), 5)
            case "wait":
                await asyncio.wait([asyncio.ensure_future(asyncio.sleep(0.3))])
            case _:
                async with asyncio.TaskGroup() as group:
                    group.create_task(asyncio.sleep(0.3))

    @workflow("pay")
    async def pay(step: Step) -> None:
        await asyncio.gather(step.transaction("debit", slow), step.sleep("nap", "1d"))

    run = await Runtime(store, workflows=[pay], suspend_after=0.05).trigger(pay)
    assert (run.status, [step.key for step in run.history]) == ("suspended", ["debit"])
    assert (starts, committed()) == ([how], ["ana"])


async def test_parallel_transactions_of_one_id_have_a_record_each(
    debits: tuple[SqliteStore, Callable[[], list[str]]],
) -> None:
    """A key is reserved when a call begins, so that two branches never share one."""
    store, committed = debits

    @workflow("pay")
    async def pay(step: Step) -> None:
        async def branch(name: str) -> None:
            await step.transaction("debit", debit, name)

        await asyncio.gather(branch("ana"), branch("ben"))
        await step.sleep("nap", 0.1)

    runtime = Runtime(store, workflows=[pay], suspend_after=0)
    run = await runtime.trigger(pay, run_id="r")
    assert {step.key for step in run.history} == {"debit", "debit#2"}
    await asyncio.sleep(0.1)
    assert (await runtime.resume("r")).status == "completed"
    assert committed() == ["ana", "ben"]


async def test_a_cancelled_transaction_is_rolled_back_or_recorded(
    debits: tuple[SqliteStore, Callable[[], list[str]]],
) -> None:
    """A timeout in the workflow function cancels the work of a transaction, but never a commit."""
    store, committed = debits

    @workflow("pay")
    async def pay(step: Step) -> int:
        for n in range(30):
            try:
                async with asyncio.timeout(n / 5000):
                    await step.transaction("debit", debit, f"{n:02}")
            except TimeoutError:
                await step("too late", lambda: None)
        await step.transaction("debit", debit, "last")
        return 0

    run = await Runtime(store, workflows=[pay]).trigger(pay)
    kinds = [step.kind for step in run.history]
    assert "step" in kinds, "none was cancelled"
    assert len(committed()) == kinds.count("transaction") > 0


async def test_tasks_of_a_store_are_not_branches() -> None:
    """Branches are numbered in order of creation, however many tasks the store starts."""

    class Spawning(MemoryStore):
        async def append(self, entries: Sequence[Entry], /) -> Sequence[Verdict]:
            await asyncio.gather(asyncio.sleep(0.001))
            return await super().append(entries)

    @workflow("w")
    async def w(step: Step) -> None:
        async def branch() -> None:
            await step("y", lambda: 1)

        for _ in range(3):
            await step("x", lambda: 1)
            await asyncio.gather(branch(), branch())

    runtime = Runtime(Spawning(), workflows=[w])
    runs = await asyncio.gather(*(runtime.trigger(w) for _ in range(10)))
    paths = {tuple(sorted(step.branch for step in run.history if step.branch)) for run in runs}
    assert paths == {("1", "2", "3", "4", "5", "6")}


@pytest.mark.skipif(not hasattr(asyncio, "eager_task_factory"), reason="Python 3.12 and newer")
async def test_eager_tasks_keep_their_branch() -> None:
    """A task that runs before its factory returns belongs to the branch it was created as."""
    charged: list[tuple[str, str]] = []

    @workflow("w")
    async def w(step: Step) -> None:
        async def charge(what: str) -> None:
            await asyncio.sleep(0.01)
            charged.append((what, step.idempotency_key))

        async def branch() -> None:
            await step("a", charge, "a")
            await step("b", charge, "b")

        await asyncio.gather(branch(), branch())
        await step.sleep("nap", 0.1)

    loop = asyncio.get_running_loop()
    loop.set_task_factory(asyncio.eager_task_factory)  # type: ignore[attr-defined]
    try:
        runtime = Runtime(MemoryStore(), workflows=[w], suspend_after=0)
        await runtime.trigger(w, run_id="r")
        await asyncio.sleep(0.1)
        assert (await runtime.resume("r")).status == "completed"
    finally:
        loop.set_task_factory(None)
    assert len(charged) == len(set(charged)) == 4


async def test_waits_with_similar_ids_in_different_branches_are_different() -> None:
    """The wait "1/nap" of the function and the wait "nap" of branch 1 both end."""

    @workflow("w")
    async def w(step: Step) -> str:
        async def branch() -> None:
            await step.sleep("nap", 0.05)

        await asyncio.gather(asyncio.create_task(branch()), step.sleep("1/nap", 0.1))
        return "done"

    assert (await Runtime(MemoryStore(), workflows=[w]).trigger(w)).output == "done"


async def test_a_step_beside_a_failing_branch_is_not_recorded_as_failed() -> None:
    """It was interrupted because the run ended: a retry runs it again."""
    down = True
    go = asyncio.Event()

    @workflow("w")
    async def w(step: Step) -> list[str]:
        async def charge() -> str:
            go.set()
            if down:
                raise ConnectionError("down")
            return "charged"

        async def report() -> str:
            try:
                await go.wait()
                await asyncio.sleep(0.2 if down else 0)
            except asyncio.CancelledError as error:
                raise RuntimeError("interrupted") from error
            return "reported"

        return list(await asyncio.gather(step("charge", charge), step("report", report)))

    runtime = Runtime(MemoryStore(), workflows=[w])
    run = await runtime.trigger(w, run_id="r")
    assert (run.status, [step.key for step in run.history]) == ("failed", ["charge"])
    down = False
    assert (await runtime.retry("r")).output == ["charged", "reported"]


@pytest.mark.parametrize("form", ["named", "positional"])
async def test_a_retry_runs_the_step_that_made_a_race_fail(form: str) -> None:
    """Both the failure of the race and the one inside it ended the run."""
    down = True

    @workflow("w")
    async def w(step: Step) -> Any:
        async def pay() -> str:
            if down:
                raise ConnectionError("down")
            return "paid"

        if form == "named":
            return (await step.race("first", {"pay": lambda: step("pay", pay)}))[1]
        return (await step.race("first", step.sleep("late", 60), step("pay", pay)))[1]

    runtime = Runtime(MemoryStore(), workflows=[w])
    assert (await runtime.trigger(w, run_id="r")).status == "failed"
    down = False
    assert (await runtime.retry("r")).output == "paid"


@pytest.mark.parametrize("where", ["in the handler", "after it"])
async def test_a_handled_failure_is_not_run_again(where: str) -> None:
    """The function has already acted on it, and that is recorded."""
    executed_steps: list[str] = []
    bug = True

    @workflow("w")
    async def w(step: Step) -> str:
        async def card() -> None:
            executed_steps.append("card")
            raise ValueError("declined")

        async def invoice() -> None:
            executed_steps.append("invoice")
            if bug and where == "in the handler":
                raise RuntimeError("no printer")

        try:
            await step("card", card)
        except ValueError:
            await step("invoice", invoice)
        if bug and where == "after it":
            raise RuntimeError("a bug in the function itself")
        return "done"

    runtime = Runtime(MemoryStore(), workflows=[w])
    assert (await runtime.trigger(w, run_id="r")).status == "failed"
    bug = False
    assert (await runtime.retry("r")).output == "done"
    assert executed_steps.count("card") == 1


async def _named(step: Step, event: str) -> object:
    """Race branches by name."""
    thunks = {
        "event": lambda: step.wait_for_event("approval", event),
        "timeout": lambda: step.sleep("timeout", 0.2),
    }
    return (await step.race("race", thunks))[0]


async def _positional(step: Step, event: str) -> object:
    """Race calls that were made by the caller of the race, not in its branches."""
    wait, timeout = step.wait_for_event("approval", event), step.sleep("timeout", 0.2)
    return ("event", "timeout")[(await step.race("race", wait, timeout))[0]]


async def _nested(step: Step, event: str) -> object:
    """Race calls against a race and parallel calls that were made by the caller, too."""
    inner = step.race("inner", step.wait_for_event("approval", event), step.sleep("long", 60))
    both = step.all(inner, step.sleep("longer", 90))
    return ("event", "timeout")[(await step.race("race", both, step.sleep("timeout", 0.2)))[0]]


RACES = [_named, _positional, _nested]
every_race = pytest.mark.parametrize("race", RACES, ids=lambda race: race.__name__[1:])
Race = Callable[[Step, str], Coroutine[Any, Any, object]]


@every_race
async def test_a_race_swallows_no_event(race: Race) -> None:
    """An event that arrives while the winner is recorded is available to the next wait."""

    @workflow("w")
    async def w(step: Step) -> tuple[object, Any]:
        winner = await race(step, "approved")
        return winner, await step.wait_for_event("late approval", "approved", timeout=1)

    runtime = Runtime(SlowStore(0.1), workflows=[w], suspend_after=10)
    run = asyncio.create_task(runtime.trigger(w, run_id="r"))
    await asyncio.sleep(0.25)
    assert await runtime.signal("r", "approved", "by ana", wait=False)
    assert (await run).output in [("timeout", "by ana"), ("event", None)]


@every_race
async def test_an_event_that_a_race_did_not_use_survives_a_suspension(race: Race) -> None:
    """The next wait receives it, even in another process."""
    store = SlowStore(0.1)

    @workflow("w")
    async def w(step: Step) -> tuple[object, Any]:
        winner = await race(step, "approved")
        await step.sleep("nap", 2)
        return winner, await step.wait_for_event("late approval", "approved", timeout=1)

    runtime = Runtime(store, workflows=[w], suspend_after=0.3)
    run = asyncio.create_task(runtime.trigger(w, run_id="r"))
    await asyncio.sleep(0.25)
    assert await runtime.signal("r", "approved", "by ana", wait=False)
    assert not (await run).over
    await asyncio.sleep(2.1)
    again = await Runtime(store, workflows=[w]).resume("r")
    assert again.output in [("timeout", "by ana"), ("event", None)]


async def test_tasks_below_a_race_end_with_it() -> None:
    """They must not receive events later. `asyncio.wait` does not cancel them."""

    @workflow("w")
    async def w(step: Step) -> tuple[str, Any]:
        async def loser() -> None:
            waiting = asyncio.create_task(step.wait_for_event("inside", "go"))
            await asyncio.wait([waiting])

        winner, _ = await step.race("race", {"slow": loser, "quick": lambda: step("a", lambda: 1)})
        return winner, await step.wait_for_event("after", "go", timeout=5)

    runtime = Runtime(MemoryStore(), workflows=[w])
    run = await runtime.trigger(w, run_id="r")
    assert [wait.id for wait in run.pending] == ["after"]
    signalled = await runtime.signal("r", "go", "seen")
    assert signalled.run is not None
    assert signalled.run.output == ("quick", "seen")


@pytest.mark.parametrize("always_replay", [False, True], ids=["straight", "always_replay"])
@pytest.mark.parametrize("form", ["named", "positional", "nested"])
async def test_an_event_of_a_wait_that_ended_with_the_winner_is_not_lost(
    form: str, always_replay: bool
) -> None:
    """Both waits are recorded, and the function sees the value of one: the other event stays."""

    @workflow("w")
    async def w(step: Step) -> tuple[Any, Any]:
        first, second = (partial(step.wait_for_event, id, id) for id in "xy")
        match form:
            case "named":
                await step.race("race", {"x": first, "y": second})
            case "positional":
                await step.race("race", first(), second())
            case _:
                await step.race("race", first(), step.race("inner", step.all(second())))
        return tuple([await step.wait_for_event(f"late {id}", id, timeout=0) for id in "xy"])

    runtime = Runtime(MemoryStore(), workflows=[w], always_replay=always_replay)
    await runtime.trigger(w, run_id="r", wait=False)
    for event in "xy":
        await runtime.signal("r", event, f"{event} seen", wait=False)
    run = await runtime.resume("r")
    while not run.over:
        run = await runtime.resume("r")
    assert run.output == (None, "y seen")


async def test_a_replay_of_a_race_starts_no_loser() -> None:
    """A wait that lost does not receive an event that is sent after the race."""

    @workflow("w")
    async def w(step: Step) -> tuple[int, Any]:
        losing = step.wait_for_event("inside", "go")
        winner, _ = await step.race("race", losing, step("quick", lambda: 1))
        return winner, await step.wait_for_event("after", "go")

    runtime = Runtime(MemoryStore(), workflows=[w], always_replay=True)
    run = await runtime.trigger(w, run_id="r")
    for _ in range(3):  # after the step, and after the race
        [run] = await runtime.sweep() or [run]
    assert [wait.id for wait in run.pending] == ["after"]
    signalled = await runtime.signal("r", "go", "seen")
    assert signalled.run is not None
    assert (await runtime.resume("r")).output == (1, "seen")


class ShyInbox(MemoryStore):
    """A store whose inbox cannot be read at times."""

    unreadable = 0

    async def inbox(self, id: str, /, **page: Any) -> Sequence[Message]:
        if self.unreadable:
            self.unreadable -= 1
            raise StoreUnavailable("for a moment")
        return await super().inbox(id, **page)


async def test_a_wait_does_not_time_out_if_its_event_was_delivered() -> None:
    """This holds with a timeout of zero, and when the inbox cannot currently be read."""
    store = ShyInbox()

    @workflow("w")
    async def w(step: Step) -> list[Any]:
        async def work() -> None:
            for n in (1, 2):
                await runtime.signal(step.run_id, "go", n, wait=False)

        await step("work", work)
        first = await step.wait_for_event("at once", "go", timeout=0)
        store.unreadable = 2
        return [first, await step.wait_for_event("later", "go", timeout=0.05)]

    runtime = Runtime(store, workflows=[w], suspend_after=10)
    assert (await runtime.trigger(w)).output == [1, 2]


async def test_a_wait_that_is_cancelled_as_its_event_arrives_leaves_it_to_the_next() -> None:
    """The event arrives in the same iteration of the event loop in which the wait is cancelled."""
    reading, gate = asyncio.Event(), asyncio.Event()

    class Gated(MemoryStore):
        readers = 0

        async def inbox(self, id: str, /, **page: Any) -> Sequence[Message]:
            self.readers += 1
            if self.readers == 2:  # the check for a cancel, and the wait
                reading.set()
            await gate.wait()
            return await super().inbox(id, **page)

    async def send() -> None:
        await runtime.signal("r", "go", "seen", wait=False)

    @workflow("w")
    async def w(step: Step) -> Any:
        first = asyncio.create_task(step.wait_for_event("first", "go", timeout=5))
        await step("send", send)
        await reading.wait()
        gate.set()
        first.cancel()
        await asyncio.wait([first])
        return await step.wait_for_event("second", "go", timeout=1)

    runtime = Runtime(Gated(), workflows=[w], suspend_after=10)
    assert (await runtime.trigger(w, run_id="r")).output == "seen"


Work = Callable[[], Coroutine[Any, Any, Any]]


async def _gather(*work: Work) -> None:
    await asyncio.gather(*(each() for each in work))


async def _group(*work: Work) -> None:
    async with asyncio.TaskGroup() as group:
        for each in work:
            group.create_task(each())


async def _wait(*work: Work) -> None:
    await asyncio.wait([asyncio.ensure_future(each()) for each in work])


async def _wait_for(*work: Work) -> None:
    await asyncio.gather(*(asyncio.wait_for(each(), 3600) for each in work))


async def _as_completed(*work: Work) -> None:
    for each in asyncio.as_completed([each() for each in work]):
        await each


async def _shield(*work: Work) -> None:
    await asyncio.gather(*(asyncio.shield(each()) for each in work))


async def _anyio(*work: Work) -> None:
    async with anyio.create_task_group() as group:
        for each in work:
            group.start_soon(each)


async def _event(*work: Work) -> None:
    done = asyncio.Event()

    async def first() -> None:
        await _gather(*work)
        done.set()

    task = asyncio.create_task(first())
    await done.wait()
    await task


async def _queue(*work: Work) -> None:
    queue: asyncio.Queue[None] = asyncio.Queue()

    async def work_and_put(each: Work) -> None:
        await each()
        await queue.put(None)

    tasks = [asyncio.create_task(work_and_put(each)) for each in work]
    for _ in tasks:
        await queue.get()


async def _semaphore(*work: Work) -> None:
    semaphore = asyncio.Semaphore(1)

    async def one(each: Work) -> None:
        async with semaphore:
            await each()

    await asyncio.gather(*(one(each) for each in work))


async def _generator(*work: Work) -> None:
    async def values() -> AsyncIterator[Any]:
        for each in work:
            yield await each()

    async for _ in values():
        pass


JOINS = [
    _gather, _group, _wait, _wait_for, _as_completed, _shield, _anyio, _event, _queue, _semaphore,
    _generator,
]  # fmt: skip


@pytest.mark.parametrize("always_replay", [False, True], ids=["straight", "always_replay"])
@pytest.mark.parametrize("join", JOINS, ids=lambda join: join.__name__[1:])
async def test_a_run_leaves_memory_however_its_branches_are_joined(
    join: Callable[..., Coroutine[Any, Any, None]],
    always_replay: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is suspended at once and without a warning when the joins of asyncio and anyio wait for
    branches.
    """
    clock = TestClock()

    @workflow("w")
    async def w(step: Step) -> str:
        async def branch(name: str) -> None:
            await step("before", lambda: name)
            await step.sleep("nap", "1h")

        await join(lambda: branch("a"), lambda: branch("b"))
        return "done"

    runtime = Runtime(
        MemoryStore(clock=clock),
        workflows=[w],
        clock=clock,
        suspend_after=1,
        always_replay=always_replay,
    )
    run = await runtime.trigger(w, run_id="r")
    for _ in range(20):
        if run.over:
            break
        assert run.status == "suspended"
        await clock.advance("1h")
        run = await runtime.resume("r")
    assert run.output == "done"
    assert "does not recognize" not in caplog.text


async def test_a_task_that_outlives_its_run_can_record_nothing() -> None:
    """A completed run stays completed."""
    refused: list[BaseException] = []

    @workflow("w")
    async def w(step: Step) -> str:
        async def leave() -> str:
            async def late() -> None:
                await asyncio.sleep(0.05)
                with pytest.raises((RunOver, NestedStep)) as caught:
                    await step("late", lambda: 1)
                refused.append(caught.value)

            tasks.append(asyncio.create_task(late()))
            return "left"

        return await step("leave", leave)

    tasks: list[asyncio.Task[None]] = []
    runtime = Runtime(MemoryStore(), workflows=[w])
    async with Worker(runtime):
        run = await runtime.trigger(w)
        await asyncio.gather(*tasks)
        after = await runtime.get_run(run.id)
    assert len(refused) == 1
    assert after is not None
    assert (after.status, after.output, len(after.history)) == ("completed", "left", 1)


async def test_each_sleeping_branch_costs_the_same() -> None:
    """An entry contains the waits that changed, not all of them."""

    class Counting(MemoryStore):
        written = 0

        async def append(self, entries: Sequence[Entry], /) -> Sequence[Verdict]:
            self.written += sum(len(entry.data) for entry in entries if entry.rest is None)
            return await super().append(entries)

    @workflow("w")
    async def w(step: Step, n: int) -> int:
        async def branch(i: int) -> int:
            await step("before", lambda: i)
            await step.sleep("nap", 0.2)
            return await step("value", lambda: i)

        return sum(await asyncio.gather(*(branch(i) for i in range(n))))

    costs = []
    for n in (100, 1000):
        store = Counting()
        assert (await Runtime(store, workflows=[w]).trigger(w, n)).output == n * (n - 1) // 2
        costs.append(store.written / n)
    # Each wait may be written when it begins and when it ends; writing all of them with each entry
    # would cost ten times as much.
    assert costs[1] < costs[0] * 2


async def test_a_run_that_is_too_large_fails_once() -> None:
    """Its records together exceed the limit: it fails with a short error, and is not retried."""
    ran: list[int] = []

    @workflow("w")
    async def w(step: Step) -> None:
        async def part() -> str:
            ran.append(1)
            return "x" * 4_000_000

        for _ in range(6):
            await step("part", part)

    runtime = Runtime(MemoryStore(), workflows=[w], lease_ttl=0.2)
    async with Worker(runtime, poll=0.01) as worker:
        await runtime.trigger(w, run_id="r", wait=False)
        await asyncio.sleep(0.6)
    run = await runtime.get_run("r")
    assert run is not None
    assert (run.status, len(ran), worker.counters.claimed) == ("failed", 6, 1)
    assert "6 records together are more than the store takes" in str(run.error)
    with pytest.raises(RunFailed, match="cannot be retried"):
        await runtime.retry("r")


async def test_an_old_worker_leaves_a_newer_run_alone() -> None:
    """It never migrates a run to an older version: a process with the newer definition continues
    it.
    """
    store = MemoryStore()

    @workflow("w", version=2)
    async def new(step: Step) -> str:
        await step.wait_for_event("go", "go")
        return "new"

    @workflow("w", version=1, migrate=lambda snapshot, version: snapshot)
    async def old(step: Step) -> str:
        return "old"

    await Runtime(store, workflows=[new]).trigger(new, run_id="r")
    before = await store.load("r")
    with pytest.raises(VersionMismatch, match="newer definition"):
        await Runtime(store, workflows=[old]).resume("r")
    assert before is not None
    after = await store.load("r")
    assert after is not None
    assert after.get("metadata") == before.get("metadata")
    newer = Runtime(store, workflows=[new])
    assert (await newer.signal("r", "go")).run is not None


async def test_a_failed_run_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """The log record has level ERROR, and names workflow, run and step, with a traceback."""

    @workflow("shop")
    async def shop(step: Step) -> None:
        async def charge() -> None:
            raise ValueError("declined")

        await step("charge", charge)

    await Runtime(MemoryStore(), workflows=[shop]).trigger(shop, run_id="order-1")
    [record] = [record for record in caplog.records if record.levelno == logging.ERROR]
    message = record.getMessage()
    assert all(part in message for part in ("'shop'", "'order-1'", "'charge'", "declined"))
    assert record.exc_info is not None


async def test_a_retry_of_a_run_that_another_process_owns_is_refused() -> None:
    """It does not return the failed run as if it had been retried."""

    @workflow("w")
    async def w(step: Step) -> None:
        raise ValueError("no")

    store = MemoryStore()
    runtime = Runtime(store, workflows=[w])
    await runtime.trigger(w, run_id="r")
    snapshot = await store.load("r")
    assert snapshot is not None

    class Owned(MemoryStore):
        async def acquire(self, requests: Any, /) -> Any:
            return [Refusal(request.id, "owned", "another") for request in requests]

    owned = Owned()
    await owned.save("r", snapshot)
    with pytest.raises(AlreadyRunning):
        await Runtime(owned, workflows=[w]).retry("r")


async def test_an_event_of_a_race_that_another_race_cancels_is_not_lost() -> None:
    """Both branches have ended when the outer race is replayed; the inner one has no verdict."""

    @workflow("nested-races")
    async def nested(step: Step) -> object:
        async def inner() -> object:
            await asyncio.sleep(0)
            return await step.race("inner", step.wait_for_event("first", "go"))

        await step.race("outer", inner(), step("quick", lambda: 1))
        return await step.wait_for_event("second", "go", timeout=0)

    runtime = Runtime(MemoryStore(), workflows=[nested], always_replay=True)
    await runtime.trigger(nested, run_id="t", wait=False)
    await runtime.signal("t", "go", "here", wait=False)
    for _ in range(10):
        await runtime.sweep()
    run = await runtime.get_run("t")
    assert run is not None
    assert run.output == "here"


async def test_a_cancelled_run_keeps_a_transaction_whose_reply_was_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stored from memory, it would lose the record, and what was committed could not be undone."""

    @workflow("pay")
    async def pay(step: Step) -> None:
        async def charge(_: object) -> None:
            active_runs.append(step._run)

        await step.transaction("pay", charge)

    async def lose_reply(*arguments: Any) -> None:
        await commit(*arguments)
        active_runs[0].stop(Cancelled("run", "enough"))
        raise StoreUnavailable("the connection was lost")

    active_runs: list[Any] = []
    async with sqlite(tmp_path / "runs.db") as store:
        commit = store.transact
        monkeypatch.setattr(store, "transact", lose_reply)
        runtime = Runtime(store, workflows=[pay])
        with pytest.raises(StoreUnavailable):
            await runtime.trigger(pay, run_id="run")
        stored = await store.load("run")
    assert stored is not None
    assert [*stored["steps"]] == ["pay"]
