"""Run the verifier: `python -m tests.durability.verifier --seconds 60 --stores simulation`."""

import argparse
import sys
import time
from collections.abc import Iterator
from random import SystemRandom

from tests.durability.verifier import language as lang
from tests.durability.verifier.generator import Mix, generate
from tests.durability.verifier.report import Failure, Tally, describe
from tests.durability.verifier.shrinker import shrink
from tests.durability.verifier.simulation import Conditions, simulate

SIMULATION = "simulation"


def verify_simulation(
    seeds: Iterator[str], seconds: float
) -> Iterator[tuple[Tally, list[Failure]]]:
    """Simulate programs for so long; yield the tally and the failures of each second."""
    tally, began = Tally(SIMULATION), time.monotonic()
    failures: list[Failure] = []
    for seed in seeds:
        violated = _simulate_one(seed, tally)
        tally.programs += 1
        if violated is not None:
            tally.violations += 1
            failures.append(violated)
        passed = time.monotonic() - began
        if failures or int(passed) > int(tally.seconds) or passed > seconds:
            tally.seconds = passed
            yield tally, failures
            failures = []
        if passed > seconds:
            return


def _simulate_one(seed: str, tally: Tally) -> Failure | None:
    program, at = generate(seed, Mix()), Conditions.draw(seed)
    violations, lines = simulate(program, at, tally)
    if not violations:
        return None
    law = violations[0].law

    def fails(candidate: lang.Body) -> bool:
        return any(violation.law == law for violation in simulate(candidate, at, tally)[0])

    small = shrink(program, fails)
    again, log = simulate(small, at, tally)
    if again:
        program, violations, lines = small, again, log
    return Failure(SIMULATION, seed, program, violations, lines, repr(at))


def main() -> int:
    """Verify as the command line says; return 1 if a law was broken."""
    parser = argparse.ArgumentParser(prog="verify")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--stores", default=SIMULATION)
    parser.add_argument("--seed", default="")
    options = parser.parse_args()
    first = int(options.seed or SystemRandom().randrange(10**9))
    print(f"first seed: {first}")
    seeds = iter([str(first)]) if options.seed else (str(first + n) for n in range(10**9))
    broken = 0
    for tally, failures in verify_simulation(seeds, options.seconds):
        for failure in failures:
            print(describe(failure), end="\n\n")
        broken += len(failures)
        print(tally, end="\r", file=sys.stderr)
    print(file=sys.stderr)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
