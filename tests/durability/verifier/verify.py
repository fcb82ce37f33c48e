"""Run programs by seed, in simulation or on a real store, and shrink those that violate a law."""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

from tests.durability.verifier import language as lang
from tests.durability.verifier.checker import Evidence, Violation, check
from tests.durability.verifier.cluster import run_programs
from tests.durability.verifier.generator import Mix, generate
from tests.durability.verifier.places import INSERTS, Place
from tests.durability.verifier.report import Failure, Tally
from tests.durability.verifier.shrinker import shrink
from tests.durability.verifier.simulation import Conditions, simulate

SIMULATION = "simulation"
BATCH = 20
_COPIES = 6

Opened = Callable[[], AbstractContextManager[Place]]


def simulate_seed(seed: str, tally: Tally) -> Failure | None:
    """Simulate the program of a seed; return its failure, shrunk, if it violates a law."""
    return simulate_program(generate(seed, Mix()), seed, tally)


def simulate_program(program: lang.Body, seed: str, tally: Tally) -> Failure | None:
    """Simulate a program under the conditions of a seed; return its failure, shrunk."""
    at = Conditions.draw(seed)
    tally.programs += 1
    violations, lines = simulate(program, at, tally)
    if not violations:
        return None
    tally.violations += 1

    def fails(candidate: lang.Body) -> bool:
        return _breaks(violations[0].law, simulate(candidate, at, Tally(SIMULATION))[0])

    small = shrink(program, fails)
    again, log = simulate(small, at, Tally(SIMULATION))
    if again:
        program, violations, lines = small, again, log
    return Failure(SIMULATION, seed, program, violations, lines, str(at))


def run_seed(
    opened: Opened,
    seed: str,
    tally: Tally,
    *,
    size: int = BATCH,
    trouble: float = 4,
) -> list[Failure]:
    """Run a batch of programs of a seed on a fresh store; return those that violate a law."""
    with opened() as place:
        mix = Mix(transactions=place.store in INSERTS, threads=True)
        programs = [generate(f"{seed}/{number}", mix) for number in range(size)]
        tally.programs += len(programs)
        ran = asyncio.run(run_programs(place, programs, seed, trouble, tally))
    failures = [_failure(place.store, seed, each) for each in ran]
    reported = [failure for failure in failures if failure is not None]
    tally.violations += len(reported)
    return reported


def shrink_on(opened: Opened, failure: Failure, seconds: float) -> Failure:
    """Return a failure of a real store with the smallest program that is found in the time."""
    smallest = failure

    def fails(candidate: lang.Body) -> bool:
        nonlocal smallest
        programs, tally = [candidate] * _COPIES, Tally(failure.store)
        with opened() as place:
            ran = asyncio.run(run_programs(place, programs, failure.seed, 2, tally))
        for each in ran:
            smaller = _failure(failure.store, failure.seed, each)
            if smaller and _breaks(failure.violations[0].law, smaller.violations):
                smallest = smaller
                return True
        return False

    shrink(failure.program, fails, seconds)
    return smallest


def until(seconds: float, seeds: Iterator[str]) -> Iterator[str]:
    """Yield seeds for the given time, and at least one."""
    end = time.monotonic() + seconds
    for seed in seeds:
        yield seed
        if time.monotonic() > end:
            return


def _failure(store: str, seed: str, evidence: Evidence) -> Failure | None:
    violations = check(evidence)
    if not violations:
        return None
    lines = [line for line in evidence.lines if line.run == evidence.run]
    return Failure(store, seed, evidence.program, violations, lines)


def _breaks(law: str, violations: Sequence[Violation]) -> bool:
    return any(violation.law == law for violation in violations)
