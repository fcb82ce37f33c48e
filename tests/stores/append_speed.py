"""The cost of an append to a long run, compared with one to a short run."""

from datetime import timedelta
from statistics import median
from time import perf_counter

from perdure.store import Entry, Lease, Verdict
from perdure.testing.conformance.harness import JournaledStore, acquire_run
from perdure.testing.conformance.samples import delta

LENGTH, ROUNDS = 5_000, 300


async def cost_of_length(store: JournaledStore) -> float:
    """Return how many times longer an append to a run of 5,000 entries takes than to a new one."""
    long, short = [
        (await acquire_run(store, id, ttl=timedelta(hours=1))).lease for id in ("long", "short")
    ]
    entries = [entry_of(long, n) for n in range(LENGTH)]
    for start in range(0, LENGTH, 500):
        await store.append(entries[start : start + 500])
    times: dict[str, list[float]] = {"long": [], "short": []}
    # Alternating, so that other load on the machine affects both equally.
    for n in range(ROUNDS):
        for entry in (entry_of(long, LENGTH + n), entry_of(short, n)):
            started = perf_counter()
            assert await store.append([entry]) == [Verdict.ACCEPTED]
            times[entry.id].append(perf_counter() - started)
    return median(times["long"]) / median(times["short"])


def entry_of(lease: Lease, n: int) -> Entry:
    """Return the entry of a lease's n-th step."""
    return Entry(lease.id, lease.epoch, n, delta(f"step {n}"))
