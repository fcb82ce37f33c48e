"""Random programs keep every law: in simulated time, and in worker processes on every store."""

import asyncio
import os
import random
import subprocess
import sys
import time
from contextlib import nullcontext, suppress
from pathlib import Path

import msgspec
import pytest

from tests.durability.verifier import language as lang
from tests.durability.verifier.generator import Mix, generate
from tests.durability.verifier.places import Place
from tests.durability.verifier.report import Tally, describe
from tests.durability.verifier.shrinker import shrink
from tests.durability.verifier.simulation import SimulatedLoop
from tests.durability.verifier.verify import (
    SIMULATION,
    run_seed,
    simulate_program,
    simulate_seed,
)

FIXED = range(1, 101)
PROGRAMS = Path(__file__).with_name("programs.json")
"""Programs that once violated a law, by the seeds of the conditions under which they did."""
SECONDS = 8


def test_a_seed_gives_the_same_program() -> None:
    first, second = (generate("7", Mix()) for _ in range(2))
    assert first == second == lang.loads(lang.dumps(first))


def test_a_seed_gives_the_same_log_in_every_process() -> None:
    """A violation that depends on addresses or hashes could not be repeated."""
    logs = {
        subprocess.run(
            [sys.executable, "-c", _PRINT_LOGS],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            check=True,
        ).stdout
        for hash_seed in ("1", "2")
    }
    assert len(logs) == 1
    assert all(logs)


_PRINT_LOGS = """
from tests.durability.verifier.generator import Mix, generate
from tests.durability.verifier.report import Tally
from tests.durability.verifier.simulation import Conditions, simulate

for seed in ("8", "11", "12", "649585234"):
    _, lines = simulate(generate(seed, Mix()), Conditions.draw(seed), Tally("simulation"))
    print(*lines, sep="\\n")
"""


def test_a_simulation_cancels_the_tasks_of_a_group_in_one_order() -> None:
    async def wait(number: int, cancelled: list[int]) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.append(number)

    async def cancel() -> list[int]:
        cancelled: list[int] = []
        with suppress(BaseExceptionGroup):
            async with asyncio.TaskGroup() as group:
                for number in range(20):
                    kept.append([object() for _ in range(number * len(kept) % 7)])
                    group.create_task(wait(number, cancelled))
                await asyncio.sleep(0)
                raise ValueError
        return cancelled

    kept: list[list[object]] = []
    orders = set[tuple[int, ...]]()
    for _ in range(5):
        loop = SimulatedLoop()
        orders.add(tuple(loop.run_until_complete(cancel())))
        loop.close()
    assert len(orders) == 1


def test_a_failing_program_is_made_small() -> None:
    program = next(
        found
        for seed in range(999)
        if "Transaction" in lang.dumps(found := generate(f"{seed}", Mix()))
    )
    small = shrink(program, lambda candidate: "Transaction" in lang.dumps(candidate))
    assert [type(command) for _, command in lang.walk(small)] == [lang.Transaction]


# anyio creates the coroutine of a task before the task. One that is cancelled before it starts
# leaves the coroutine unawaited.
@pytest.mark.filterwarnings("ignore:coroutine '_anyio:RuntimeWarning")
@pytest.mark.slow
def test_programs_keep_the_laws_in_simulated_time() -> None:
    first, until = random.randrange(10**9), time.monotonic() + SECONDS
    print(f"random seeds from {first}")
    tally = Tally(SIMULATION)
    for seed in (*FIXED, *range(first, first + 10**6)):
        failure = simulate_seed(str(seed), tally)
        if failure is not None:
            pytest.fail(describe(failure), pytrace=False)
        if time.monotonic() > until:
            break
    print(tally)


@pytest.mark.filterwarnings("ignore:coroutine '_anyio:RuntimeWarning")
@pytest.mark.slow
def test_programs_that_violated_a_law_keep_it() -> None:
    for seed, program in msgspec.json.decode(
        PROGRAMS.read_bytes(), type=dict[str, lang.Body]
    ).items():
        failure = simulate_program(program, seed, Tally(SIMULATION))
        assert failure is None, describe(failure)


@pytest.fixture(params=["sqlite", "files", "postgres", "mysql", "mongo", "redis", "libsql"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    match request.param:
        case "sqlite":
            return Place("sqlite", f"sqlite:///{tmp_path}/runs.db")
        case "files":
            return Place("files", f"file://{tmp_path}/runs")
        case "redis":
            prefix = str(request.getfixturevalue("redis_prefix"))
            url = str(request.getfixturevalue("redis_url"))
            return Place("redis", url, {"namespace": prefix})
        case "mongo":
            url = str(request.getfixturevalue("mongo_url"))
            return Place("mongo", url, {"replica_set": True})
        case name:
            fixture = {"libsql": "sqld_url"}.get(name, f"{name}_url")
            return Place(name, str(request.getfixturevalue(fixture)))


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_programs_keep_the_laws_on_a_real_store(place: Place) -> None:
    tally = Tally(place.store)
    for seed in (1, random.randrange(10**9)):
        print(f"seed {seed}")
        failures = run_seed(lambda: nullcontext(place), str(seed), tally, size=10, trouble=1.5)
        if failures:
            pytest.fail("\n\n".join(map(describe, failures)), pytrace=False)
    print(tally)
