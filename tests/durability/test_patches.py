"""`step.patched` keeps one answer: through crashes, replays, retries and operators' verbs."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from datetime import timedelta
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perdure import Gate, Runtime, Step, durable, workflow
from perdure.operations import Operations
from perdure.snapshot import Snapshot, open_waits
from perdure.stores import MemoryStore
from perdure.testing import TestClock, explore_crashes

MakeRuntime = Callable[..., Runtime]


async def return_value(value: object = None) -> object:
    return value


@workflow("order")
async def order_before(step: Step) -> str:
    await step("reserve", return_value)
    await step.wait_for_event("paid", "paid")
    return "old"


@workflow("order")
async def order(step: Step) -> str:
    await step("reserve", return_value)
    if is_new := step.patched("check"):
        await step("check", return_value)
    await step.wait_for_event("paid", "paid")
    await step("ship", return_value)
    assert step.patched("check") == is_new
    return "new" if is_new else "old"


async def test_a_run_that_waits_ahead_of_the_patch_keeps_the_old_code(store: MemoryStore) -> None:
    await Runtime(store, workflows=[order_before]).trigger(order_before, run_id="o")
    runtime = Runtime(store, workflows=[order], on_definition_change="ignore")
    assert (await runtime.resume("o")).status == "waiting"
    await runtime.signal("o", "paid")
    run = await runtime.get_run("o")
    assert run is not None
    assert run.output == "old"


@pytest.mark.parametrize("always_replay", [False, True])
async def test_there_is_one_answer_whatever_crashes(always_replay: bool) -> None:
    report = await explore_crashes(order, events={"paid": None}, always_replay=always_replay)
    assert report.crashes > 5


@workflow("parallel")
async def parallel(step: Step) -> list[bool]:
    async def part(name: str) -> bool:
        await step(name, return_value)
        is_new = step.patched("check")
        await step(f"{name} 2", return_value)
        assert step.patched("check") == is_new
        return is_new

    return [*await asyncio.gather(part("a"), part("b"))]


@pytest.mark.parametrize("always_replay", [False, True])
async def test_there_is_one_answer_in_each_branch(always_replay: bool) -> None:
    """With crashes, a branch may have been past the place before the answer was written."""
    await explore_crashes(parallel, always_replay=always_replay, compare="shape")


async def test_an_answer_costs_no_write() -> None:
    class Counting(MemoryStore):
        writes = 0

        async def append(self, entries: Any, /) -> Any:
            self.writes += len(entries)
            return await super().append(entries)

    @workflow("plain")
    async def plain(step: Step) -> None:
        await step("a", return_value)

    @workflow("asks")
    async def asks(step: Step) -> None:
        step.patched("check")
        await step("a", return_value)
        step.patched("again")

    stores = [Counting(), Counting()]
    await Runtime(stores[0], workflows=[plain]).trigger(plain)
    await Runtime(stores[1], workflows=[asks]).trigger(asks)
    assert stores[0].writes == stores[1].writes


async def test_a_failure_that_is_retried_is_not_ahead(store: MemoryStore) -> None:
    async def fail() -> None:
        raise ConnectionError

    @workflow("fix")
    async def before(step: Step) -> None:
        await step("a", return_value)
        await step("b", fail)

    @workflow("fix")
    async def after(step: Step) -> str:
        await step("a", return_value)
        if step.patched("fixed"):
            return "fixed"
        await step("b", fail)
        return "old"

    await Runtime(store, workflows=[before]).trigger(before, run_id="r")
    runtime = Runtime(store, workflows=[after], on_definition_change="ignore")
    assert (await runtime.retry("r")).output == "fixed"


async def _ignore(_: object) -> None:
    return None


async def _is_patched_after(before: Callable[[Step], Any], store: MemoryStore) -> bool:
    """Return the answer after a question that a person has answered, in a later activation."""

    @workflow("asks")
    async def asks(step: Step) -> bool:
        await before(step)
        await step.wait_for_event("go", "go")
        return step.patched("x")

    runtime = Runtime(store, workflows=[asks])
    (wait,) = (await runtime.trigger(asks, run_id="r")).pending
    await runtime.approve(wait.token)
    assert (await runtime.resume("r")).status == "waiting"
    await runtime.signal("r", "go")
    return await runtime.result("r")  # type: ignore[no-any-return]  # a bool


QUESTIONS: dict[str, Callable[[Step], Any]] = {
    "told": lambda step: step.approval("ask", "Go?", notify=_ignore),
    "a gate": lambda step: step("work", return_value, approve=Gate("Go?", notify=_ignore)),
    "a gate with a key": lambda step: step("work", return_value, key="k", approve="Go?"),
}


@pytest.mark.parametrize("question", QUESTIONS)
async def test_what_belongs_to_an_answered_question_is_not_ahead(
    store: MemoryStore, question: str
) -> None:
    assert await _is_patched_after(QUESTIONS[question], store)


@pytest.mark.parametrize("always_replay", [False, True])
async def test_there_is_one_answer_after_a_gate_whatever_crashes(always_replay: bool) -> None:
    @workflow("gated")
    async def gated(step: Step) -> bool:
        await step("work", return_value, key="k", approve="Go?")
        is_patched = step.patched("x")
        await step("after", return_value)
        return is_patched

    answers = {"~approve:k": lambda client, wait: client.approve(wait.token)}
    report = await explore_crashes(gated, answers=answers, always_replay=always_replay)
    assert report.crashes > 10


async def test_a_step_that_waits_for_its_approval_is_ahead(store: MemoryStore) -> None:
    @workflow("gated")
    async def before(step: Step) -> str:
        await step("work", return_value, approve="Go?")
        return "old"

    @workflow("gated")
    async def after(step: Step) -> str:
        is_new = step.patched("x")
        await step("work", return_value, approve="Go?")
        return "new" if is_new else "old"

    (wait,) = (await Runtime(store, workflows=[before]).trigger(before, run_id="r")).pending
    runtime = Runtime(store, workflows=[after], on_definition_change="ignore")
    await runtime.approve(wait.token)
    assert (await runtime.resume("r")).output == "old"


async def test_a_retry_keeps_the_answer(store: MemoryStore) -> None:
    """The function acted on it, although the only record that came after it is dropped."""
    answers: list[bool] = []
    broken = [True]

    async def charge() -> None:
        if broken:
            raise ConnectionError

    @workflow("retried")
    async def retried(step: Step) -> None:
        answers.append(step.patched("x"))
        await step("charge", charge)

    runtime = Runtime(store, workflows=[retried])
    snapshot = await _failed_after_false(runtime, retried)
    await store.save("r", snapshot)
    broken.clear()
    assert (await runtime.retry("r")).status == "completed"
    assert answers[-1] is False


async def _failed_after_false(runtime: Runtime, retried: Any) -> Snapshot:
    """Return a failed run with the answer False whose only record is the failure."""
    await runtime.trigger(retried, run_id="source")
    snapshot = await runtime.store.load("source")
    assert snapshot is not None
    (name,) = [name for name in snapshot["metadata"] if name.startswith("~patch:")]
    snapshot["metadata"][name] = {"patched": False}
    return snapshot


async def test_continue_as_new_forgets_the_answers(store: MemoryStore) -> None:
    @workflow("loop")
    async def before(step: Step, n: int) -> None:
        await step("a", return_value)
        await step.wait_for_event("go", "go")

    @workflow("loop")
    async def after(step: Step, n: int) -> bool:
        is_new = step.patched("x")
        await step("a", return_value)
        await step.wait_for_event("go", "go")
        if n:
            assert not is_new
            await step.continue_as_new(0)
        return is_new

    await Runtime(store, workflows=[before]).trigger(before, 1, run_id="r")
    runtime = Runtime(store, workflows=[after], on_definition_change="ignore")
    await runtime.signal("r", "go")
    result = await runtime.signal("r", "go")
    assert result.run is not None
    assert result.run.output is True


@workflow("rewound")
async def rewound(step: Step) -> list[bool]:
    answers = [step.patched("first")]
    await step("a", return_value)
    await step("b", return_value)
    answers.append(step.patched("second"))
    await step("c", return_value)
    return answers


@workflow("rewound")
async def rewound_before(step: Step) -> None:
    for name in ("a", "b", "c"):
        await step(name, return_value)
    await step.wait_for_event("stop", "stop")


async def finished_old_run(store: MemoryStore) -> Runtime:
    """Return a runtime with the new code and a run `r` that both patches answered with False."""
    await Runtime(store, workflows=[rewound_before]).trigger(rewound_before, run_id="r")
    runtime = Runtime(store, workflows=[rewound], on_definition_change="ignore")
    assert (await runtime.resume("r")).output == [False, False]
    return runtime


@pytest.mark.parametrize(
    ("at", "expected"), [("c", [False, True]), ("b", [False, True]), ("a", [True, True])]
)
async def test_a_rewind_forgets_answers_on_which_nothing_depends(
    store: MemoryStore, at: str, expected: list[bool]
) -> None:
    """The old run was past all of it when it was asked, so that its answers hold for all."""
    runtime = await finished_old_run(store)
    await runtime.store.load("r")
    await Operations(store).rewind("r", at, by="ana")
    assert (await runtime.resume("r")).output == expected


@pytest.mark.parametrize(("at", "expected"), [("c", [True, True]), ("b", [True, True])])
async def test_a_rewound_run_of_the_new_code_answers_as_before(
    store: MemoryStore, at: str, expected: list[bool]
) -> None:
    runtime = Runtime(store, workflows=[rewound])
    await runtime.trigger(rewound, run_id="r")
    await Operations(store).rewind("r", at, by="ana")
    assert (await runtime.resume("r")).output == expected


async def test_a_fork_has_the_answers_on_which_its_records_depend(store: MemoryStore) -> None:
    runtime = await finished_old_run(store)
    operations = Operations(store)
    for at, expected in (("c", [False, True]), ("a", [True, True]), (None, [True, True])):
        outcome = await operations.fork("r", at=at, by="ana")
        assert (await runtime.resume(outcome.run_id)).output == expected


async def test_a_plain_durable_run_is_asked_the_same(store: MemoryStore) -> None:
    answers: list[bool] = []

    async def before(step: Step) -> None:
        await step("a", return_value)
        raise asyncio.CancelledError

    async def after(step: Step) -> bool:
        answers.append(step.patched("x"))
        await step("a", return_value)
        return step.patched("y")

    with suppress(asyncio.CancelledError):
        await durable.run(None, before, id="d", store=store)
    result = await durable.run(None, after, id="d", store=store)
    assert (answers, result.unwrap()) == ([False], True)


# A model of the answers over random programs.


class Op(NamedTuple):
    """A line of a program: a step, a sleep, a patch, or parts that run at once."""

    kind: str
    id: str
    parts: tuple[tuple["Op", ...], ...] = ()


Program = tuple[Op, ...]


def programs(depth: int = 2) -> st.SearchStrategy[Program]:
    kinds = st.sampled_from(["step", "step", "step", "sleep"])
    leaf = st.builds(Op, kinds, st.just(""), st.just(()))
    ops = leaf
    if depth:
        parts = st.lists(programs(depth - 1), min_size=1, max_size=3).map(tuple)
        ops = leaf | st.builds(Op, st.sampled_from(["gather", "race"]), st.just(""), parts)
    return st.lists(ops, min_size=1, max_size=4).map(tuple)


def numbered(program: Program, prefix: str = "s") -> Program:
    """Return the program with an id for each line."""
    return tuple(
        Op(op.kind, id, tuple(numbered(part, f"{id}.{i}.") for i, part in enumerate(op.parts)))
        for id, op in ((f"{prefix}{n}", op) for n, op in enumerate(program))
    )


def with_patches(program: Program) -> Program:
    """Return the program with a patch before each line, and one at the end."""
    edited: list[Op] = []
    for op in program:
        parts = tuple(with_patches(part) for part in op.parts)
        edited += [Op("patch", f"before {op.id}"), op._replace(parts=parts)]
    return (*edited, Op("patch", f"after {program[-1].id}"))


def ids_of(program: Program) -> set[str]:
    own = {op.id for op in program if op.kind not in ("patch", "gather")}
    return own.union(*(ids_of(part) for op in program for part in op.parts))


def expected_answers(program: Program, recorded: set[str]) -> dict[str, bool]:
    """Return what each patch answers in a run whose old code recorded these ids."""
    answers: dict[str, bool] = {}
    for n, op in enumerate(program):
        if op.kind == "patch":
            answers[op.id] = not ids_of(program[n:]) & recorded
        for part in op.parts:
            answers |= expected_answers(part, recorded)
    return answers


class Interpreter:
    """Runs a program; its steps stop permanently when the budget is spent."""

    def __init__(self, budget: float) -> None:
        self.budget = budget
        self.answers: dict[str, list[bool]] = defaultdict(list)

    async def work(self) -> None:
        self.budget -= 1
        if self.budget < 0:
            await asyncio.Event().wait()

    async def run(self, step: Step, program: Program) -> None:
        for op in program:
            match op.kind:
                case "step":
                    await step(op.id, self.work)
                case "sleep":
                    await step.sleep(op.id, "1d")
                case "patch":
                    self.answers[op.id].append(step.patched(op.id))
                case "gather":
                    await asyncio.gather(*(self.run(step, part) for part in op.parts))
                case _:
                    await step.race(op.id, *(self.run(step, part) for part in op.parts))


def runtime_of(store: MemoryStore, clock: TestClock, body: Any, **options: Any) -> Runtime:
    async def random_program(step: Step) -> None:
        await body(step)

    definition = workflow("random")(random_program)
    return Runtime(
        store, workflows=[definition], clock=clock, on_definition_change="ignore", **options
    )


async def old_run(program: Program, budget: int) -> tuple[Snapshot, set[str]]:
    """Return what the old code has stored when its process dies, and the ids in it."""
    clock = TestClock()
    store, interpreter = MemoryStore(clock=clock), Interpreter(budget)
    runtime = runtime_of(store, clock, lambda step: interpreter.run(step, program))
    task = asyncio.create_task(runtime.trigger("random", run_id="r"))
    for _ in range(200):
        await asyncio.sleep(0)
    snapshot = await store.load("r")
    task.cancel()
    await asyncio.wait([task])
    assert snapshot is not None
    waits = {wait["id"].rpartition("/")[2] for wait in open_waits(snapshot)}
    return snapshot, {*snapshot["steps"], *waits}


@asynccontextmanager
async def new_runtime(snapshot: Snapshot, body: Any, **options: Any) -> AsyncGenerator[Runtime]:
    clock = TestClock()
    store = MemoryStore(clock=clock)
    await store.save("r", snapshot)
    yield runtime_of(store, clock, body, **options)


async def finish(runtime: Runtime) -> None:
    """Continue the run until it is over, however long it sleeps."""
    task = asyncio.create_task(runtime.resume("r"))
    assert isinstance(runtime.clock, TestClock)
    for _ in range(100):
        while not task.done():
            await runtime.clock.advance(timedelta(hours=12))
        if task.result().status == "completed":
            return
        await runtime.clock.advance(timedelta(days=1))
        task = asyncio.create_task(runtime.resume("r"))
    raise AssertionError(f"the run does not end: {task.result()}")


@pytest.mark.parametrize("always_replay", [False, True])
@settings(max_examples=60, deadline=None)
@given(program=programs().map(numbered), budget=st.integers(0, 12))
async def test_a_patch_answers_as_the_model_does(
    program: Program, budget: int, always_replay: bool
) -> None:
    """False if this branch, or one it has yet to create, has recorded steps or waits ahead."""
    snapshot, recorded = await old_run(program, budget)
    edited = with_patches(program)
    interpreter = Interpreter(float("inf"))
    async with new_runtime(
        snapshot, lambda step: interpreter.run(step, edited), always_replay=always_replay
    ) as runtime:
        await finish(runtime)
    expected = expected_answers(edited, recorded)
    for id, answers in interpreter.answers.items():
        assert set(answers) == {expected[id]}, (id, answers, recorded)
