"""Findings about a store: what an operator should know, and how to fix it."""

import asyncio
from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from urllib.parse import unquote, urlsplit

from msgspec.structs import asdict

from perdure.errors import StoreError
from perdure.insights.attention import without_worker
from perdure.insights.due import due_runs, rows_of
from perdure.insights.model import Finding, StoreFacts, WorkerRow
from perdure.insights.overview import DUE
from perdure.insights.redaction import DEFAULT_REDACTION, NOTHING_REDACTED
from perdure.insights.words import duration_words
from perdure.presence import Switches, WorkerPresence
from perdure.store import Capabilities, Query, SearchStore, capabilities

TOLERATED_DRIFT = timedelta(seconds=5)
TOLERATED_LAG = timedelta(seconds=30)
"""How long a run may be due before a missing worker is reported, since workers restart."""

_SURVIVES = {
    "nothing": "Runs are lost when the process ends.",
    "process_crash": "Runs survive the crash of a process, but not always a power failure.",
    "power_loss": "Runs survive the crash of a process and a power failure.",
}
_SHARED = {
    "process": "One process can use it.",
    "machine": "The processes of one machine can use it.",
    "network": "Processes of many machines can use it.",
}
_LEASE = {
    "none": "Two processes can execute the same run: it grants no leases.",
    "best_effort": "Two processes may briefly execute the same run: its leases are not atomic.",
    "atomic": "One process at a time executes a run.",
}


async def store_facts(store: SearchStore, url: str, now: datetime) -> StoreFacts:
    """Describe a store and what it can do."""
    declared = capabilities(store)
    return StoreFacts(
        url=DEFAULT_REDACTION.url(url),
        kind=kind_of(store),
        capabilities=asdict(declared),
        sentences=_sentences(declared),
        clock_drift=await clock_drift(store, now),
    )


def kind_of(store: object) -> str:
    """Return the name of a built-in store, such as "sqlite", or the name of its class."""
    package, _, name = type(store).__module__.partition("perdure.stores.")
    return type(store).__name__ if package or not name else name.partition(".")[0]


def name_of(store: object, url: str) -> str:
    """Return "db/shop" for a database, "shop.db" for a file, or the kind of a store without URL."""
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
    except ValueError:
        return kind_of(store)
    path = unquote(parts.path).rstrip("/").rpartition("/")[2]
    return "/".join(filter(None, (host, path))) or kind_of(store)


def _sentences(declared: Capabilities) -> tuple[str, ...]:
    notification = (
        "Workers are notified of due runs." if declared.notify else "Workers poll for runs."
    )
    guarantees = (_SURVIVES[declared.survives], _SHARED[declared.shared], _LEASE[declared.lease])
    return (*guarantees, notification)


async def clock_drift(store: SearchStore, now: datetime) -> timedelta | None:
    """Return how far ahead the store's clock is, judging by the newest run.

    Runs have timestamps of the store. A clock that is behind cannot be detected by reading.
    """
    page = await store.search(Query(), 1)
    if not page.runs:
        return None
    return max(page.runs[0].updated_at - now, timedelta(0))


async def find(
    store: SearchStore,
    now: datetime,
    workers: Sequence[WorkerRow],
    presences: Sequence[WorkerPresence],
    switches: Switches,
) -> tuple[Finding, ...]:
    """Return the findings about a reachable store."""
    drift, due = await asyncio.gather(
        clock_drift(store, now), due_runs(store, now - TOLERATED_LAG, DUE)
    )
    rows = await rows_of(store, due, NOTHING_REDACTED, now)
    unclaimed_runs = without_worker(rows, len(due) == DUE, presences, switches.paused)
    return (
        *_about_capabilities(capabilities(store)),
        *_about_drift(drift),
        *(Finding("no_worker", f"{each.text}.", _START_WORKER, "error") for each in unclaimed_runs),
        *_about_switches(switches, now),
        *_about_lost(workers),
    )


_START_WORKER = "Start a worker that knows the workflow: perdure worker module:runtime"


def unreachable(error: StoreError) -> Finding:
    """Return the finding about an unreachable store."""
    fix = "Check its address, the network, and whether its schema is current: perdure store check"
    return Finding(
        "store", f"The store cannot be used: {DEFAULT_REDACTION.text(str(error))}", fix, "error"
    )


def _about_capabilities(declared: Capabilities) -> Iterable[Finding]:
    if declared.survives == "nothing":
        yield Finding("durability", _SURVIVES["nothing"], "Use a store that is on disk.")
    elif declared.survives == "process_crash":
        fix = "Let the database write to disk before it answers (docs/stores)."
        yield Finding("durability", _SURVIVES["process_crash"], fix)
    if declared.lease != "atomic":
        fix = "Run one process, or use a store with atomic leases."
        yield Finding("lease", _LEASE[declared.lease], fix)


def _about_drift(drift: timedelta | None) -> Iterable[Finding]:
    if drift is not None and drift > TOLERATED_DRIFT:
        text = (
            f"The clock of the store is at least {duration_words(drift)} ahead of this machine's."
        )
        yield Finding("clock_drift", text, "Synchronize both clocks with NTP.")


def _about_switches(switches: Switches, now: datetime) -> Iterable[Finding]:
    for name in sorted(switches.paused):
        switch = switches.workflows[name]
        ago = duration_words(now - switch.at)
        text = f'Workflow "{name}" is paused, by {switch.by} {ago} ago.'
        yield Finding("workflow_paused", text, f"perdure workflows resume {name}")


def _about_lost(workers: Iterable[WorkerRow]) -> Iterable[Finding]:
    for worker in workers:
        if worker.state == "lost":
            text = f"Worker {worker.id} on {worker.host} disappeared without stopping."
            yield Finding(
                "worker_lost", text, "Look at its logs; other workers take over its runs."
            )
