"""A fork at every step of random programs ends as its source did, and runs only what it lacks."""

import asyncio
from collections import Counter
from random import Random
from typing import Any

import pytest

from perdure import Run, Runtime, Step, workflow
from perdure.operations import Operations
from perdure.stores.memory import MemoryStore
from perdure.testing import TestClock

Program = list[tuple[str, Any]]

calls: Counter[str] = Counter()


def generate(random: Random, depth: int = 0) -> Program:
    kinds = ["step", "step", "sleep", "event", "fails", "uuid"]
    if depth < 2:
        kinds += ["gather", "all", "race"]
    return [_command(random, random.choice(kinds), depth) for _ in range(random.randint(1, 4))]


def _command(random: Random, kind: str, depth: int) -> tuple[str, Any]:
    if kind in ("gather", "all", "race"):
        return kind, [generate(random, depth + 1) for _ in range(random.randint(2, 3))]
    return kind, random.choice("abc")


async def work(name: str, number: int) -> str:
    calls[name] += 1
    return f"{name}{number}"


async def fail(name: str) -> None:
    calls[name] += 1
    raise ValueError(name)


async def execute(step: Step, program: Program) -> list[Any]:
    observations: list[Any] = []
    for number, (kind, what) in enumerate(program):
        match kind:
            case "step":
                observations.append(await step(what, work, what, number))
            case "fails":
                try:
                    await step(what, fail, what)
                except ValueError as error:
                    observations.append(str(error))
            case "sleep":
                await step.sleep(f"sleep-{what}", "1 day")
            case "event":
                observations.append(
                    await step.wait_for_event(f"wait-{what}", "go", timeout="2 days")
                )
            case "uuid":
                observations.append(await step("uuid", work, str(step.uuid()), number))
            case "gather":
                observations.append(await asyncio.gather(*(execute(step, body) for body in what)))
            case "all":
                observations.append(list(await step.all(*(execute(step, body) for body in what))))
            case "race":
                first, *rest = what
                losers = [step.sleep(f"never-{n}", "900 days") for n, _ in enumerate(rest)]
                observations.append((await step.race("race", execute(step, first), *losers))[1])
    return observations


@workflow("random")
async def random_program(step: Step, program: Any) -> Any:
    return await execute(step, [tuple(each) for each in program])


async def drive(runtime: Runtime, clock: TestClock, run_id: str) -> Run:
    for _ in range(200):
        await runtime.sweep()
        run = await runtime.get_run(run_id)
        assert run is not None
        if run.over:
            return run
        await clock.advance("1 day")
    raise AssertionError("it did not end")


def facts(run: Run) -> Any:
    """Return how a run ended and its records; keys depend on which branch was first."""
    steps = sorted((step.branch, step.kind, step.ok, repr(step.value)) for step in run.history)
    return run.status, run.output, steps


@pytest.mark.parametrize("seed", range(40))
async def test_a_fork_at_every_key_ends_like_its_source(seed: int) -> None:
    clock = TestClock()
    store = MemoryStore(clock=clock)
    runtime = Runtime(store, workflows=[random_program], clock=clock)
    operations = Operations(store, clock=clock, random=Random(seed))
    await runtime.trigger(random_program, generate(Random(seed)), run_id="run", wait=False)
    source = await drive(runtime, clock, "run")
    assert source.status == "completed", source.error
    stored = await store.load("run")
    for position, step in enumerate(source.history):
        calls.clear()
        outcome = await operations.fork("run", step.key, new_id=f"fork-{position}", by="ana")
        assert outcome.kept == position
        fork = await drive(runtime, clock, outcome.run_id)
        assert facts(fork) == facts(source), step.key
        rerun = [step for step in source.history[position:] if step.kind == "step"]
        assert calls.total() == len(rerun)
    assert await store.load("run") == stored


@pytest.mark.parametrize("seed", range(20))
async def test_a_run_that_is_rewound_to_any_key_ends_as_before(seed: int) -> None:
    clock = TestClock()
    store = MemoryStore(clock=clock)
    runtime = Runtime(store, workflows=[random_program], clock=clock)
    operations = Operations(store, clock=clock)
    await runtime.trigger(random_program, generate(Random(seed)), run_id="run", wait=False)
    run = source = await drive(runtime, clock, "run")
    positions = range(len(source.history))
    for position in Random(seed).sample(positions, len(positions)):
        # Of steps with one name in several branches, another one may be the first now: the keys
        # are those of the last execution.
        await operations.rewind("run", run.history[position].key, by="ana")
        run = await drive(runtime, clock, "run")
        assert facts(run) == facts(source), position
