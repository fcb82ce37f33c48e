"""The documents in which workers report that they exist, what they do and what they have done.

Each has one writer. Apart from the switches, they are only informative: a document that is missing,
unreadable or written by another version is skipped.
"""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

import msgspec

from perdure.durable.in_flight import StepInFlight, Time
from perdure.presence import keys
from perdure.presence.durations import Durations
from perdure.store import SearchStore, Store, SupportedVersions, can_search

WORKER_TTL = timedelta(seconds=30)
THROUGHPUT_TTL = timedelta(hours=49)
DEFINITION_TTL = timedelta(days=30)

T = TypeVar("T", bound=msgspec.Struct)

_BATCH = 200


class DeclaredLimit(msgspec.Struct, frozen=True, omit_defaults=True):
    """A limit that a worker observes: `n` at once, or in any period of `per` seconds.

    The names come from `perdure.limits.limit_name`.
    """

    name: str
    n: int
    per: float | None = None


class WorkerPresence(msgspec.Struct, frozen=True, kw_only=True):
    """A heartbeat: a live worker, and what it is doing.

    `owners` are the owner ids of its runs. `steps` are the steps in flight, longest first; if there
    are very many, only some of them.
    """

    id: str
    host: str
    pid: int
    started_at: Time
    seen_at: Time
    perdure: str = ""
    python: str = ""
    workflows: tuple[SupportedVersions, ...] = ()
    queues: tuple[str, ...] = ()
    limits: tuple[DeclaredLimit, ...] = ()
    slots: int = 0
    running: int = 0
    draining: bool = False
    counters: dict[str, int] = {}
    owners: tuple[str, ...] = ()
    steps: tuple[StepInFlight, ...] = ()


class WorkflowThroughput(msgspec.Struct, frozen=True):
    """The runs of a workflow that a worker ended in one hour.

    `durations` are the times from the creation of these runs to their end; `steps` are durations by
    step, from a sample of the runs.
    """

    completed: int = 0
    failed: int = 0
    cancelled: int = 0
    durations: Durations = ()
    steps: dict[str, Durations] = {}


class Minute(msgspec.Struct, frozen=True, omit_defaults=True):
    """One minute of an hour: how many runs ended, and the state at its end.

    The state is the slots, the runs in them, and the due runs of each queue, up to a limit.
    """

    minute: int
    slots: int
    completed: int = 0
    failed: int = 0
    cancelled: int = 0
    running: int = 0
    depths: dict[str, int] = {}


class Throughput(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker did in one hour. `stopped` means that it stopped cleanly."""

    worker: str
    hour: Time
    host: str
    pid: int
    started_at: Time
    seen_at: Time
    stopped: bool = False
    owner: str = ""
    workflows: dict[str, WorkflowThroughput] = {}
    minutes: tuple[Minute, ...] = ()


class DefinitionDocument(msgspec.Struct, frozen=True, kw_only=True):
    """The description of one version of a workflow by the most recently started worker."""

    workflow: str
    version: int
    seen_at: Time
    payload_schema: Any = None
    doc: str = ""
    fingerprint: str = ""
    keeps: str = "run"


def decode(value: str | None, kind: type[T]) -> T | None:
    """Return a document, or `None` if it is missing or cannot be read."""
    if value is None:
        return None
    try:
        return msgspec.json.decode(value, type=kind)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None


async def write_worker(store: SearchStore, worker: WorkerPresence) -> None:
    """Write a heartbeat."""
    await _write(store, keys.worker_key(worker.id), worker, WORKER_TTL)


async def delete_worker(store: SearchStore, worker: str) -> None:
    """Delete the heartbeat of a worker that stops, and its switch, as it may be started again."""
    await store.documents.delete(keys.worker_switch_key(worker))
    await store.documents.delete(keys.worker_key(worker))


async def write_throughput(store: SearchStore, throughput: Throughput) -> None:
    """Write what a worker has done so far in an hour."""
    key = keys.throughput_key(throughput.hour, throughput.worker)
    await _write(store, key, throughput, THROUGHPUT_TTL)


async def write_definition(store: SearchStore, definition: DefinitionDocument) -> None:
    """Write what is known about one version of a workflow."""
    key = keys.definition_key(definition.workflow, definition.version)
    await _write(store, key, definition, DEFINITION_TTL)


async def read_workers(store: Store) -> list[WorkerPresence]:
    """Return the live workers, in the order they were started."""
    workers = await _read_all(store, keys.WORKER, WorkerPresence)
    return sorted(workers, key=lambda worker: (worker.started_at, worker.id))


async def read_worker(store: Store, worker: str) -> WorkerPresence | None:
    """Return a live worker, or `None`."""
    if not can_search(store):
        return None
    return decode(await store.documents.get(keys.worker_key(worker)), WorkerPresence)


async def read_throughput(store: Store, since: datetime) -> list[Throughput]:
    """Return what workers did since the hour that contains `since`, oldest hour first."""
    document_keys = await _throughput_keys(store, since)
    return await _read_documents(store, document_keys, Throughput)


async def read_last_throughput(store: Store, since: datetime) -> list[Throughput]:
    """Return the newest document of each worker that has one since the hour of `since`."""
    newest = {keys.worker_part(key): key for key in await _throughput_keys(store, since)}
    return await _read_documents(store, list(newest.values()), Throughput)


async def read_definitions(store: Store) -> list[DefinitionDocument]:
    """Return the descriptions of workflows by workers of the last 30 days, by name and version."""
    definitions = await _read_all(store, keys.DEFINITION, DefinitionDocument)
    return sorted(definitions, key=lambda each: (each.workflow, each.version))


async def _write(store: SearchStore, key: str, document: msgspec.Struct, ttl: timedelta) -> None:
    await store.documents.set(key, msgspec.json.encode(document).decode(), ttl=ttl)


async def _throughput_keys(store: Store, since: datetime) -> list[str]:
    if not can_search(store):
        return []
    # After their common prefix, keys contain the hour in a sortable form.
    first = keys.hour_prefix(since.astimezone(UTC))
    return sorted(key for key in await store.documents.keys(f"{keys.THROUGHPUT}*") if key >= first)


async def _read_all(store: Store, prefix: str, kind: type[T]) -> list[T]:
    if not can_search(store):
        return []
    return await _read_documents(store, await store.documents.keys(f"{prefix}*"), kind)


async def _read_documents(store: Store, document_keys: Sequence[str], kind: type[T]) -> list[T]:
    if not can_search(store):
        return []
    documents: list[T] = []
    for first in range(0, len(document_keys), _BATCH):
        values = await store.documents.get_many(document_keys[first : first + _BATCH])
        documents += (each for value in values if (each := decode(value, kind)) is not None)
    return documents
