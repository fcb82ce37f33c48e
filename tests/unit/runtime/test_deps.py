"""Dependencies of a runtime: when they are entered and left, by which task, and what fails."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from typing import Any

import anyio
import pytest

from perdure import Runtime, Step, Worker, workflow
from perdure.errors import InvalidArgument
from perdure.stores import MemoryStore


class Pool:
    """A context manager that can be entered again, and notes what happens to it."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.tasks: list[object] = []
        self.entering = asyncio.Event()
        self.may_enter = asyncio.Event()
        self.may_enter.set()

    async def __aenter__(self) -> "Pool":
        self.entering.set()
        self.tasks.append(asyncio.current_task())
        await self.may_enter.wait()
        self.log.append("entered")
        return self

    async def __aexit__(self, *_: object) -> None:
        self.tasks.append(asyncio.current_task())
        self.log.append("left")


@workflow("use")
async def use(step: Step[Pool], name: str) -> str:
    await step("use", lambda: step.deps.log.append(name))
    return name


@pytest.fixture
async def pool() -> Pool:
    return Pool()


@pytest.fixture
def runtime(pool: Pool) -> Runtime:
    return Runtime(MemoryStore(), workflows=[use], deps=pool)


async def test_a_call_that_drives_a_run_enters_and_leaves(runtime: Runtime, pool: Pool) -> None:
    await runtime.trigger(use, "a")
    await runtime.trigger(use, "b")
    assert pool.log == ["entered", "a", "left", "entered", "b", "left"]


async def test_an_entered_runtime_is_shared_by_its_calls(runtime: Runtime, pool: Pool) -> None:
    async with runtime, runtime:
        await asyncio.gather(runtime.trigger(use, "a"), runtime.trigger(use, "b"))
    assert pool.log == ["entered", "a", "b", "left"]


async def test_one_task_enters_and_leaves(runtime: Runtime, pool: Pool) -> None:
    """A cancel scope must be left by the task that entered it."""
    first = asyncio.create_task(runtime.__aenter__())
    await first
    await asyncio.create_task(runtime.trigger(use, "a"))
    await runtime.__aexit__()
    entered, left = pool.tasks
    assert entered is left
    assert entered not in (first, asyncio.current_task())


async def test_a_run_outlives_the_block_that_entered(runtime: Runtime, pool: Pool) -> None:
    """It is left after the last run has ended."""
    has_begun, may_end = asyncio.Event(), asyncio.Event()

    @workflow("long")
    async def long(step: Step[Pool]) -> None:
        has_begun.set()
        await may_end.wait()
        step.deps.log.append("ends")

    async with runtime:
        run = asyncio.create_task(runtime.trigger(long))
        await has_begun.wait()
    may_end.set()
    await run
    assert pool.log == ["entered", "ends", "left"]


async def test_calls_that_drive_nothing_do_not_enter(runtime: Runtime, pool: Pool) -> None:
    run = await runtime.trigger(use, "a", run_id="r", wait=False)
    assert await runtime.get_run(run.id)
    await runtime.cancel(run.id)
    await runtime.resume(run.id)
    assert await runtime.sweep() == []
    assert pool.log == []


async def test_cancelling_the_first_caller_does_not_harm_the_second(
    runtime: Runtime, pool: Pool
) -> None:
    pool.may_enter.clear()
    first = asyncio.create_task(runtime.trigger(use, "a"))
    second = asyncio.create_task(runtime.trigger(use, "b"))
    await pool.entering.wait()
    first.cancel()
    await asyncio.wait([first])
    pool.may_enter.set()
    assert (await second).output == "b"
    assert first.cancelled()
    assert pool.log == ["entered", "b", "left"]


async def test_cancelling_the_only_caller_stops_entering(runtime: Runtime, pool: Pool) -> None:
    pool.may_enter.clear()
    only = asyncio.create_task(runtime.trigger(use, "a", run_id="r"))
    await pool.entering.wait()
    only.cancel()
    with pytest.raises(asyncio.CancelledError):
        await only
    assert pool.log == []
    assert await runtime.get_run("r") is None


async def test_a_caller_waits_until_the_previous_entry_was_left() -> None:
    log: list[str] = []
    leaving, may_leave = asyncio.Event(), asyncio.Event()

    @asynccontextmanager
    async def opened() -> AsyncGenerator[list[str]]:
        log.append("entered")
        yield log
        leaving.set()
        await may_leave.wait()
        log.append("left")

    runtime = Runtime(MemoryStore(), deps=opened)
    first = asyncio.create_task(_enter(runtime))
    await leaving.wait()
    first.cancel()
    await asyncio.wait([first])
    second = asyncio.create_task(_enter(runtime))
    await asyncio.sleep(0.01)
    may_leave.set()
    await second
    assert log == ["entered", "left", "entered", "left"]


async def _enter(runtime: Runtime) -> None:
    async with runtime:
        pass


async def test_a_failed_entry_harms_no_run_and_is_tried_again() -> None:
    attempts: list[int] = []

    @asynccontextmanager
    async def opened() -> AsyncGenerator[int]:
        attempts.append(1)
        if len(attempts) == 1:
            raise ConnectionError("no route to the database")
        yield len(attempts)

    @workflow("count")
    async def count(step: Step[int]) -> int:
        return step.deps

    runtime = Runtime(MemoryStore(), workflows=[count], deps=opened)
    waiting = await runtime.trigger(count, run_id="r", wait=False)
    with pytest.raises(ConnectionError, match="no route"):
        await runtime.resume("r")
    assert await runtime.get_run("r") == waiting
    assert (await runtime.resume("r")).output == 2


async def test_each_waiting_caller_receives_the_error_of_entering() -> None:
    @asynccontextmanager
    async def opened() -> AsyncGenerator[None]:
        await asyncio.sleep(0)
        raise ConnectionError("no route")
        yield

    runtime = Runtime(MemoryStore(), workflows=[use], deps=opened)
    calls = (runtime.trigger(use, name) for name in "abc")
    errors = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(error) for error in errors] == [ConnectionError] * 3


async def test_a_worker_does_not_start_without_them(caplog: pytest.LogCaptureFixture) -> None:
    """It would claim runs that it cannot drive."""

    @asynccontextmanager
    async def opened() -> AsyncGenerator[None]:
        raise ConnectionError("no route")
        yield

    runtime = Runtime(MemoryStore(), workflows=[use], deps=opened)
    await runtime.trigger(use, "a", run_id="r", wait=False)
    with pytest.raises(ConnectionError, match="no route"):
        async with Worker(runtime):
            pass
    with pytest.raises(ConnectionError, match="no route"):
        await Worker(runtime).serve()
    run = await runtime.get_run("r")
    assert run is not None
    assert run.status == "queued"


async def test_a_worker_holds_them_while_it_works(runtime: Runtime, pool: Pool) -> None:
    async with Worker(runtime) as worker:
        for name in "ab":
            run = await runtime.trigger(use, name, wait=False)
            while not (stored_run := await runtime.get_run(run.id)) or not stored_run.over:
                await asyncio.sleep(0.001)
        # The run is over for others before the worker is done with it.
        while worker.running:
            await asyncio.sleep(0.001)
    assert pool.log == ["entered", "a", "b", "left"]


async def test_an_error_of_leaving_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    @asynccontextmanager
    async def opened() -> AsyncGenerator[Pool]:
        yield Pool()
        raise ConnectionError("reset by peer")

    run = await Runtime(MemoryStore(), deps=opened).trigger(use, "a")
    assert run.output == "a"
    (record,) = caplog.records
    assert "failed on exit" in record.message
    assert record.exc_info
    assert isinstance(record.exc_info[1], ConnectionError)


async def test_they_may_contain_a_task_group(caplog: pytest.LogCaptureFixture) -> None:
    @asynccontextmanager
    async def opened() -> AsyncGenerator[Pool]:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(anyio.sleep_forever)
            yield Pool()
            tasks.cancel_scope.cancel()

    runtime = Runtime(MemoryStore(), deps=opened)
    await asyncio.gather(runtime.trigger(use, "a"), runtime.trigger(use, "b"))
    assert not caplog.records


async def test_dependencies_that_fail_during_use_are_logged_at_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The runs continue with what they have; the next use enters again."""
    entries: list[asyncio.Event] = []

    async def fail_when(broken: asyncio.Event) -> None:
        await broken.wait()
        raise ConnectionError("reset by peer")

    @asynccontextmanager
    async def opened() -> AsyncGenerator[Pool]:
        entries.append(asyncio.Event())
        async with asyncio.TaskGroup() as tasks:
            watch = tasks.create_task(fail_when(entries[-1]))
            yield Pool()
            watch.cancel()

    runtime = Runtime(MemoryStore(), deps=opened)
    async with runtime:
        entries[0].set()
        while not caplog.records:
            await asyncio.sleep(0)
        assert (await runtime.trigger(use, "a")).output == "a"
    assert (await runtime.trigger(use, "b")).output == "b"
    assert [record.message for record in caplog.records] == [
        "the deps of a runtime failed while in use"
    ]
    assert len(entries) == 2


async def test_dependencies_that_end_by_themselves_are_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    @asynccontextmanager
    async def opened() -> AsyncGenerator[None]:
        with anyio.move_on_after(0.001):
            yield

    async with Runtime(MemoryStore(), deps=opened):
        while not caplog.records:
            await asyncio.sleep(0.001)
    assert "ended while they were in use" in caplog.text


def test_runs_end_before_they_are_left_when_the_loop_closes() -> None:
    """`asyncio.run` cancels all tasks at once."""
    pool: list[Pool] = []
    has_begun = asyncio.Event()

    @workflow("long")
    async def long(step: Step[Pool]) -> None:
        has_begun.set()
        try:
            await asyncio.sleep(60)
        finally:
            for _ in range(20):  # it is cancelled by the loop and by the run
                with suppress(asyncio.CancelledError):
                    await asyncio.sleep(0.001)
            step.deps.log.append("run ended")

    async def main() -> None:
        pool.append(Pool())
        runtime = Runtime(MemoryStore(), workflows=[long], deps=pool[0])
        runs.add(asyncio.create_task(runtime.trigger(long)))
        await has_begun.wait()

    runs: set[object] = set()
    asyncio.run(main())
    assert pool[0].log == ["entered", "run ended", "left"]


def test_a_runtime_that_was_not_left_does_not_block_the_end_of_the_loop() -> None:
    pool: list[Pool] = []

    async def main() -> None:
        pool.append(Pool())
        await Runtime(MemoryStore(), deps=pool[0]).__aenter__()

    asyncio.run(main())
    assert pool[0].log == ["entered", "left"]


def test_each_event_loop_has_its_own() -> None:
    loops: list[Any] = []

    @asynccontextmanager
    async def opened() -> AsyncGenerator[Pool]:
        loops.append(asyncio.get_running_loop())
        yield Pool()

    runtime = Runtime(MemoryStore(), workflows=[use], deps=opened)
    for name in "ab":
        asyncio.run(runtime.trigger(use, name))
    assert len(set(loops)) == 2


async def test_a_context_manager_that_can_be_entered_once_is_explained() -> None:
    @asynccontextmanager
    async def opened() -> AsyncGenerator[Pool]:
        yield Pool()

    runtime = Runtime(MemoryStore(), deps=opened())
    await runtime.trigger(use, "a")
    with pytest.raises((RuntimeError, AttributeError)) as raised:
        await runtime.trigger(use, "b")
    assert "pass a function that returns a new one" in "".join(raised.value.__notes__)


async def test_a_mapping_is_read_by_attribute() -> None:
    @workflow("read")
    async def read(step: Step) -> int:
        return int(step.deps.limit)

    run = await Runtime(MemoryStore(), deps={"limit": 7}).trigger(read)
    assert run.output == 7


async def test_a_callable_object_is_a_value() -> None:
    class Mailer:
        def __call__(self) -> str:
            return "sent"

    @workflow("send")
    async def send(step: Step[Mailer]) -> str:
        return step.deps()

    assert (await Runtime(MemoryStore(), deps=Mailer()).trigger(send)).output == "sent"


async def _coroutine() -> None: ...


async def _generator() -> AsyncGenerator[None]:
    yield


@pytest.mark.parametrize("wrong", [_coroutine, _generator, lambda required: Pool()])
def test_a_function_that_returns_no_context_manager_is_refused(wrong: object) -> None:
    with pytest.raises(InvalidArgument, match="deps: expected a value, an async context manager"):
        Runtime(MemoryStore(), deps=wrong)


async def test_a_function_that_returns_a_plain_value_is_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"deps\(\): expected an async context manager"):
        await Runtime(MemoryStore(), deps=lambda: 7).trigger(use, "a")
