"""Finished runs are removed by the policies of their workflows, completely, and no others."""

import asyncio
from contextlib import suppress
from datetime import timedelta
from itertools import count
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from perdure import Client, Keep, Runtime, Step, Worker, workflow
from perdure.errors import AlreadyAnswered, InvalidArgument, MissingAbility, StoreError, TooLate
from perdure.insights import Insights, Tally
from perdure.operations import Operations
from perdure.retention import OVER
from perdure.runtime import maintenance, pruning
from perdure.runtime.maintenance import MAINTENANCE, POLICIES, read_input
from perdure.runtime.pruning import GRACE
from perdure.snapshot import RunStatus
from perdure.store import NewMessage, NewRun, Rest, Store
from perdure.stores import MemoryStore
from perdure.testing import FaultyStore, TestClock

DAY = timedelta(days=1)
ALL: tuple[RunStatus, ...] = (*OVER, "queued", "waiting", "paused", "suspended")


async def return_value(value: object = None) -> object:
    return value


async def decline() -> None:
    raise ConnectionError


def keeping(keep: Any, name: str = "order", **options: Any) -> Any:
    @workflow(name, keep=keep, **options)
    async def order(step: Step, ends: str) -> str:
        await step("reserve", return_value)
        if ends == "failed":
            await step("charge", decline)
        if ends == "waiting":
            await step.wait_for_event("go", "go")
        return "shipped"

    return order


def runtime_of(store: Any, *workflows: Any, **options: Any) -> Runtime:
    return Runtime(store, workflows=workflows, on_definition_change="ignore", **options)


async def maintain(runtime: Runtime) -> None:
    """Do what workers do once an hour."""
    await runtime.declare_retention()
    for _ in range(3):
        await runtime.sweep()


async def ids(store: Store, prefix: str = "") -> set[str]:
    return {run.id for run in await store.list(prefix=prefix, limit=1000)}


async def test_each_status_is_kept_for_its_own_time(store: MemoryStore, clock: TestClock) -> None:
    order = keeping(Keep(completed="2d", failed="4d"))
    runtime = runtime_of(store, order, clock=clock)
    for ends in ("completed", "failed", "waiting", "cancelled"):
        await runtime.trigger(order, "waiting" if ends == "cancelled" else ends, run_id=ends)
    await runtime.cancel("cancelled")
    remaining_ids: list[set[str]] = []
    for _ in range(6):
        await clock.advance("1d")
        await maintain(runtime)
        remaining_ids.append(await ids(store))
    kept_ids = {"waiting", "cancelled"}
    assert remaining_ids == [
        *[{"completed", "failed", *kept_ids}] * 2,
        *[{"failed", *kept_ids}] * 2,
        kept_ids,
        kept_ids,
    ]


async def test_workers_remove_old_runs() -> None:
    """On a store whose clock the test moves, under a worker that runs in real time."""
    clock = TestClock()
    store = MemoryStore(clock=clock)
    order = keeping(Keep(completed="2d"))
    await runtime_of(store, order, clock=clock).trigger(order, "completed", run_id="a")
    await clock.advance("3d")
    async with Worker(runtime_of(store, order)), asyncio.timeout(20):
        while await ids(store):
            await asyncio.sleep(0.01)


async def test_the_policy_of_a_runtime_applies_to_workflows_without_one(
    store: MemoryStore, clock: TestClock
) -> None:
    own, other = keeping(Keep(completed="9d"), "own"), keeping(None, "other")
    runtime = runtime_of(store, own, other, clock=clock, keep=Keep(completed="1d"))
    await runtime.trigger(own, "completed", run_id="own")
    await runtime.trigger(other, "completed", run_id="other")
    await Client(store, clock=clock).trigger("unknown", run_id="unknown")
    await clock.advance("3d")
    await maintain(runtime)
    assert await ids(store) == {"own", "unknown"}


statuses = st.sampled_from(ALL)
names = st.sampled_from(["a", "b", "c"])
hours = st.integers(0, 24 * 6)
spans = st.dictionaries(st.sampled_from(OVER), st.integers(1, 5))


@settings(max_examples=60, deadline=None)
@given(
    runs=st.lists(st.tuples(names, statuses, hours), max_size=30),
    policies=st.dictionaries(names, spans),
)
async def test_policies_agree_with_a_model(
    runs: list[tuple[str, RunStatus, int]], policies: dict[str, dict[Any, int]]
) -> None:
    """Only finished runs, by their workflow's policy, and never before a day has passed."""
    clock = TestClock()
    store = MemoryStore(clock=clock)
    expected: set[str] = set()
    for hour in range(24 * 6, -1, -1):
        for number, (name, status, age) in enumerate(runs):
            if age == hour:
                await store.enqueue([new_run(f"{number}", name, status)])
                days = policies.get(name, {}).get(status)
                is_old = days is not None and timedelta(hours=age) > timedelta(days=days) + GRACE
                expected |= set() if is_old else {f"{number}"}
        await clock.advance("1h" if hour else "1s")
    chosen = [keeping(Keep(**_days(each)), name) for name, each in policies.items()]
    await maintain(runtime_of(store, *chosen, clock=clock))
    assert await ids(store) == expected


def _days(spans: dict[str, int]) -> Any:
    return {status: timedelta(days=days) for status, days in spans.items()}


def new_run(id: str, workflow: str, status: RunStatus) -> NewRun:
    snapshot = b'{"formatVersion":1,"steps":{},"execution":{"status":"running","lastUpdated":""}}'
    return NewRun(id, workflow, snapshot, rest=Rest(status))


@workflow("part")
async def part(step: Step, n: int) -> int:
    await step.wait_for_event("go", "go")
    return n


def mapping(keep: Any) -> Any:
    @workflow("map", keep=keep)
    async def map_all(step: Step) -> list[Any]:
        return await step.map_runs("parts", part, [1, 2], on_error="collect")

    return map_all


async def cancelled_map(store: Any, clock: TestClock, run_id: str = "m") -> Runtime:
    """Leave a run that was cancelled while its children reported to a log, some days ago."""
    map_all = mapping(Keep(cancelled="2d"))
    runtime = runtime_of(store, map_all, part, clock=clock)
    await runtime.trigger(map_all, run_id=run_id)
    await runtime.cancel(run_id)
    await runtime.sweep()
    assert await ids(store, "~log:")
    await clock.advance("3d")
    return runtime


@pytest.mark.parametrize("run_id", ["m", "a/1/b", "x" * 512, "ü'\"🎉"])
async def test_the_log_of_a_run_is_removed_with_it(
    store: MemoryStore, clock: TestClock, run_id: str
) -> None:
    runtime = await cancelled_map(store, clock, run_id)
    await maintain(runtime)
    assert await ids(store, "~log:") == set()
    assert run_id not in await ids(store)


async def test_the_log_of_a_run_that_is_kept_stays(store: MemoryStore, clock: TestClock) -> None:
    await cancelled_map(store, clock)
    await maintain(runtime_of(store, mapping(Keep(cancelled="9d")), clock=clock))
    assert await ids(store, "~log:")
    assert "m" in await ids(store)


@pytest.mark.parametrize("how", ["by hand", "by an operator", "by age"])
async def test_deleting_a_run_deletes_its_log(
    store: MemoryStore, clock: TestClock, how: str
) -> None:
    runtime = await cancelled_map(store, clock)
    operations = Operations(store, clock=clock)
    if how == "by hand":
        await runtime.delete("m")
    elif how == "by an operator":
        await operations.delete("m", by="ana")
    else:
        assert await operations.prune("2d", workflow="map", by="ana", why="old") == 1
    assert await ids(store, "~log:") == set()
    assert "m" not in await ids(store)


async def test_deleting_a_run_deletes_many_logs(
    store: MemoryStore, clock: TestClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pruning, "_PAGE", 2)

    @workflow("maps")
    async def maps(step: Step) -> None:
        await step.all(*(step.map_runs(f"parts {n}", part, [1]) for n in range(5)))

    runtime = runtime_of(store, maps, part, clock=clock)
    await runtime.trigger(maps, run_id="m")
    assert len(await ids(store, "~log:")) == 5
    await runtime.delete("m")
    assert await ids(store, "~log:") == set()


async def test_a_policy_that_changes_midway_leaves_no_log_without_its_run(
    store: MemoryStore, clock: TestClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(maintenance, "AT_A_TIME", -1.0)
    order = keeping(Keep(completed="1d"))
    await runtime_of(store, order, clock=clock).trigger(order, "completed")
    await cancelled_map(store, clock)
    for days in (9, 2):
        runtime = runtime_of(store, order, mapping(Keep(cancelled=f"{days}d")), clock=clock)
        await runtime.declare_retention()
        await runtime.sweep()
    assert "m" not in await ids(store)
    assert await ids(store, "~log:") == set()


async def test_a_crash_never_leaves_a_log_without_its_run() -> None:
    """At each store call of the removal; another process completes it."""
    for number in count(1):
        clock = TestClock()
        store = MemoryStore(clock=clock)
        await (await cancelled_map(store, clock)).declare_retention()
        faulty = FaultyStore(store, fail_at=number, error=StoreError, stays_down=True)
        runtime = runtime_of(faulty, mapping(Keep(cancelled="2d")), clock=clock)
        with suppress(StoreError):
            await runtime.sweep()
        assert "m" in await ids(store) or not await ids(store, "~log:"), number
        await clock.advance("1h")
        await maintain(runtime_of(store, mapping(Keep(cancelled="2d")), clock=clock))
        assert (await ids(store, "~log:"), "m" in await ids(store)) == (set(), False), number
        if not faulty.failed:
            break
    assert number > 5


async def test_a_reused_id_sees_nothing_of_the_old_run(every_store: Store) -> None:
    """Neither its records nor its events nor its log."""
    runtime = runtime_of(every_store, keeping(None), part)
    await runtime.trigger("order", "waiting", run_id="r")
    await runtime.signal("r", "go")
    await runtime.signal("r", "other", dedup_id="1")
    operations = Operations(every_store)
    await operations.prune(0, by="ana", why="old")
    assert await runtime.get_run("r") is None
    run = await runtime.trigger("order", "waiting", run_id="r")
    assert (run.status, len(run.history)) == ("waiting", 1)
    assert await runtime.signal("r", "other", dedup_id="1")


async def test_a_reused_id_does_not_see_the_children_of_the_old_run(
    store: MemoryStore, clock: TestClock
) -> None:
    """They are kept longer than their parent, and have the ids that its new children get."""
    results = iter(range(100))

    async def draw() -> int:
        return next(results)

    @workflow("child")
    async def child(step: Step, n: int) -> int:
        return await step("draw", draw)

    @workflow("parent", keep=Keep(completed="1d"))
    async def parent(step: Step) -> list[int]:
        called = await step.call("call", child, 1)
        return [called, *await step.map_runs("many", child, [1, 2])]

    runtime = runtime_of(store, parent, child, clock=clock)
    outputs = []
    for _ in range(2):
        await runtime.trigger(parent, run_id="p", wait=False)
        for _ in range(8):
            await runtime.sweep()
        outputs.append(await runtime.result("p"))
        await clock.advance("2d")
        await maintain(runtime)
        assert await ids(store) == {"p/1/call", "p/1/many/0", "p/1/many/1"}
    assert outputs == [[0, 1, 2], [3, 4, 5]]


async def test_a_log_without_its_run_is_removed(store: MemoryStore, clock: TestClock) -> None:
    """A store by another program, or an earlier version, may have left one."""
    runtime = await cancelled_map(store, clock)
    await store.delete("m")
    await maintain(runtime)
    assert await ids(store, "~log:") == set()


class TestResult:
    """`keep="result"`."""

    async def test_the_steps_of_a_completed_run_are_dropped(self, store: MemoryStore) -> None:
        order = keeping("result")
        runtime = runtime_of(store, order)
        run = await runtime.trigger(order, "completed", run_id="r")
        assert (run.status, run.output, run.history) == ("completed", "shipped", ())
        snapshot = await store.load("r")
        assert snapshot is not None
        assert snapshot["steps"] == {}

    async def test_the_id_stays_idempotent(self, store: MemoryStore) -> None:
        order = keeping("result")
        runtime = runtime_of(store, order)
        await runtime.trigger(order, "completed", run_id="r")
        assert (await runtime.trigger(order, "completed", run_id="r")).output == "shipped"
        assert await runtime.result("r") == "shipped"

    async def test_a_run_that_failed_keeps_its_steps_and_can_be_retried(
        self, store: MemoryStore
    ) -> None:
        order = keeping("result")
        runtime = runtime_of(store, order)
        run = await runtime.trigger(order, "failed", run_id="r")
        assert [step.key for step in run.history] == ["reserve", "charge"]
        assert (await runtime.retry("r")).status == "failed"

    @pytest.mark.parametrize("is_late", [False, True], ids=["answered", "expired"])
    async def test_a_later_answer_is_told_about_the_first(
        self, store: MemoryStore, clock: TestClock, is_late: bool
    ) -> None:
        @workflow("asks", keep="result")
        async def asks(step: Step) -> str:
            return (await step.approval("ship", "Ship?", timeout="1d")).by or "nobody"

        runtime = runtime_of(store, asks, clock=clock)
        (wait,) = (await runtime.trigger(asks, run_id="r")).pending
        if is_late:
            await clock.advance("2d")
        else:
            await runtime.approve(wait.token, by="ana", note="fine")
        (run,) = await runtime.sweep()
        assert (run.output, run.history) == ("nobody" if is_late else "ana", ())
        refusal = TooLate if is_late else AlreadyAnswered
        with pytest.raises(refusal, match="has expired at" if is_late else "by ana"):
            await runtime.approve(wait.token, by="eve")

    async def test_it_costs_no_write(self) -> None:
        class Counting(MemoryStore):
            writes = 0

            async def append(self, entries: Any, /) -> Any:
                self.writes += len(entries)
                return await super().append(entries)

        counted = []
        for keep in (None, "result"):
            store, order = Counting(), keeping(keep)
            await runtime_of(store, order).trigger(order, "completed")
            counted.append(store.writes)
        assert counted[0] == counted[1]

    async def test_a_parent_gets_the_result_of_such_a_child(
        self, store: MemoryStore, clock: TestClock
    ) -> None:
        order = keeping("result")

        @workflow("parent")
        async def parent(step: Step) -> str:
            ref = await step.start("child", order, "completed")
            return await step.result("result", ref)

        runtime = runtime_of(store, order, parent, clock=clock)
        await runtime.trigger(parent, run_id="p", wait=False)
        for _ in range(5):
            await runtime.sweep()
        assert await runtime.result("p") == "shipped"

    async def test_steps_are_dropped_if_the_process_dies_after_the_outcome(
        self, store: MemoryStore, clock: TestClock
    ) -> None:
        """The outcome of a child is stored, then its parent is told, then the child is settled."""
        order = keeping("result")

        @workflow("parent")
        async def parent(step: Step) -> str:
            return str(await step.call("child", order, "completed"))

        await runtime_of(store, order, parent, clock=clock).trigger(parent, run_id="p")
        dying = FaultyStore(store, fail_at=1, verbs={"send"}, error=StoreError, stays_down=True)
        await runtime_of(dying, order, parent, clock=clock).sweep()
        stored = await store.load("p/1/child")
        assert stored is not None
        assert (stored["execution"]["status"], [*stored["steps"]]) == ("completed", ["reserve"])
        runtime = runtime_of(store, order, parent, clock=clock)
        for _ in range(3):
            await clock.advance("1h")
            await runtime.sweep()
        assert await runtime.result("p") == "shipped"
        stored = await store.load("p/1/child")
        assert stored is not None
        assert stored["steps"] == {}

    async def test_a_child_that_is_still_open_is_cancelled(
        self, store: MemoryStore, clock: TestClock
    ) -> None:
        @workflow("leaves", keep="result")
        async def leaves(step: Step) -> str:
            await step.start("child", part, 1)
            return "done"

        runtime = runtime_of(store, leaves, part, clock=clock)
        await runtime.trigger(leaves, run_id="p")
        for _ in range(3):
            await runtime.sweep()
        child = await runtime.get_run("p/1/child")
        assert child is not None
        assert child.status == "cancelled"


async def policies(store: Store) -> dict[str, Any]:
    return {
        name: each.spans
        for name, each in read_input(await store.load(MAINTENANCE)).policies.items()
    }


class TestDeployments:
    """Which policy counts if deployments disagree."""

    async def test_a_lower_version_changes_nothing(
        self, store: MemoryStore, clock: TestClock
    ) -> None:
        new = runtime_of(store, keeping(Keep(completed="9d"), version=2), clock=clock)
        old = runtime_of(store, keeping(Keep(completed="1d")), clock=clock)
        await maintain(new)
        await maintain(old)
        assert await policies(store) == {"order": {"completed": 9 * 86400.0}}

    async def test_of_one_version_the_one_that_started_last_counts(
        self, store: MemoryStore, clock: TestClock
    ) -> None:
        for days in (9, 3, 5):
            await maintain(runtime_of(store, keeping(Keep(completed=f"{days}d")), clock=clock))
            assert await policies(store) == {"order": {"completed": days * 86400.0}}

    async def test_a_deleted_policy_removes_no_more_runs(
        self, store: MemoryStore, clock: TestClock
    ) -> None:
        old, new = keeping(Keep(completed="2d")), keeping(None)
        await maintain(runtime_of(store, old, clock=clock))
        runtime = runtime_of(store, new, clock=clock)
        await maintain(runtime)
        await runtime.trigger(new, "completed", run_id="r")
        await clock.advance("9d")
        await maintain(runtime)
        assert await ids(store) == {"r"}
        assert (await Insights(store, clock=clock).retention()).rows == ()

    async def test_a_worker_without_policies_creates_nothing(self, store: MemoryStore) -> None:
        await runtime_of(store, keeping(None)).declare_retention()
        assert await store.load(MAINTENANCE) is None

    async def test_a_message_that_cannot_be_read_is_dropped(
        self, store: MemoryStore, clock: TestClock
    ) -> None:
        runtime = runtime_of(store, keeping(Keep(completed="2d")), clock=clock)
        await maintain(runtime)
        await store.send([NewMessage(MAINTENANCE, POLICIES, b"[1]")])
        await runtime.sweep()
        assert await store.inbox(MAINTENANCE) == []
        assert await policies(store) == {"order": {"completed": 2 * 86400.0}}

    async def test_a_policy_that_is_declared_twice_is_written_once(
        self, store: MemoryStore
    ) -> None:
        runtime = runtime_of(store, keeping(Keep(completed="2d")))
        for _ in range(3):
            await runtime.declare_retention()
        assert await store.inbox(MAINTENANCE) == []

    async def test_a_store_that_cannot_remove_runs_is_refused(self) -> None:
        store = FaultyStore(MemoryStore())
        store.capabilities = replace(store.capabilities, maintenance=False)
        with pytest.raises(MissingAbility, match="keep="):
            await runtime_of(store, keeping(Keep(completed="2d"))).declare_retention()


class TestOperators:
    """What an operator sees and does."""

    async def test_a_dry_run_counts_by_workflow_and_status(
        self, store: MemoryStore, clock: TestClock
    ) -> None:
        order = keeping(Keep(completed="2d", failed="4d"))
        runtime = runtime_of(store, order, clock=clock)
        await runtime.declare_retention()
        for number in range(3):
            await runtime.trigger(order, "completed", run_id=f"{number}")
        await runtime.trigger(order, "failed", run_id="failed")
        await clock.advance("3d")
        retention = await Insights(store, clock=clock).retention()
        assert [
            (row.workflow, row.status, row.kept_for, row.removable) for row in retention.rows
        ] == [
            ("order", "completed", 2 * DAY, Tally(3)),
            ("order", "failed", 4 * DAY, Tally(0)),
        ]
        operations = Operations(store, clock=clock)
        assert await operations.prune(dry_run=True, by="ana") == 3
        assert len(await ids(store)) == 4

    async def test_prune_follows_the_policies(self, store: MemoryStore, clock: TestClock) -> None:
        order = keeping(Keep(completed="2d", failed="4d"))
        runtime = runtime_of(store, order, clock=clock)
        await runtime.declare_retention()
        for ends in ("completed", "failed"):
            await runtime.trigger(order, ends, run_id=ends)
        await clock.advance("9d")
        operations = Operations(store, clock=clock)
        assert await operations.prune(statuses=["failed"], by="ana", why="old") == 1
        assert await ids(store) == {"completed"}
        assert await operations.prune(workflow="other", by="ana", why="old") == 0
        assert await operations.prune(by="ana", why="old") == 1

    async def test_a_status_that_is_not_over_is_refused(self, store: MemoryStore) -> None:
        statuses: Any = ["paused"]
        with pytest.raises(InvalidArgument, match="not over"):
            await Operations(store).prune("1d", statuses=statuses, by="ana")
