"""Run the verifier: `python -m tests.durability.verifier --seconds 60 --stores sqlite,redis`."""

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterator
from itertools import count
from random import SystemRandom

from tests.durability.verifier.places import PLACES
from tests.durability.verifier.report import Failure, Tally, describe
from tests.durability.verifier.verify import SIMULATION, run_seed, shrink_on, simulate_seed, until

_SHOWN = 3
_SHRINKING = 90.0


def main() -> int:
    """Verify as the command line says; return 1 if a law was violated."""
    parser = argparse.ArgumentParser(prog="verify", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600, help="for how long, in all")
    parser.add_argument("--stores", default=",".join((SIMULATION, *PLACES)))
    parser.add_argument("--seed", default="", help="only this one")
    options = parser.parse_args()
    stores = options.stores.replace(",", " ").split()
    first = int(options.seed or SystemRandom().randrange(10**9))
    tallies = []
    for store in stores:
        seeds = iter([str(first)]) if options.seed else map(str, count(first))
        tallies.append(_verify(store, until(options.seconds / len(stores), seeds)))
    print("\n".join(map(str, tallies)))
    return 1 if any(tally.violations for tally in tallies) else 0


def _verify(store: str, seeds: Iterator[str]) -> Tally:
    tally, began = Tally(store), time.monotonic()
    shown: Counter[str] = Counter()
    progress = 0.0
    for seed in seeds:
        for failure in _run(store, seed, tally):
            law = failure.violations[0].law
            shown[law] += 1
            if shown[law] <= _SHOWN:
                print(describe(_shrunk(store, failure, shown[law])), end="\n\n", flush=True)
        tally.seconds = time.monotonic() - began
        if tally.seconds > progress:
            print(tally, flush=True)
            progress = tally.seconds + 10
    return tally


def _run(store: str, seed: str, tally: Tally) -> list[Failure]:
    if store == SIMULATION:
        failure = simulate_seed(seed, tally)
        return [] if failure is None else [failure]
    return run_seed(PLACES[store], seed, tally)


def _shrunk(store: str, failure: Failure, number: int) -> Failure:
    # A run that never ends costs a minute each time, and the first of its kind is enough.
    if store == SIMULATION or number > 1 or failure.violations[0].law == "every run ends":
        return failure
    return shrink_on(PLACES[store], failure, _SHRINKING)


if __name__ == "__main__":
    sys.exit(main())
