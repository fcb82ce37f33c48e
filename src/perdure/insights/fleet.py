"""Workers and workflows, from the workers' documents and bounded reads of the store."""

import asyncio
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from functools import partial

from msgspec.structs import replace

from perdure.insights.durations import HOUR, durations_by_hour, percentiles
from perdure.insights.model import (
    DefinitionFacts,
    Percentiles,
    Tally,
    WorkerRow,
    WorkflowRow,
)
from perdure.insights.redaction import Redact
from perdure.insights.retention import spans_by_workflow
from perdure.insights.state import LOST_FOR, worker_row
from perdure.presence import (
    DefinitionDocument,
    Switches,
    Throughput,
    WorkerPresence,
    read_definitions,
    read_last_throughput,
    read_switches,
    read_throughput,
    read_workers,
)
from perdure.runtime.versions import count_versions
from perdure.snapshot import RunStatus
from perdure.store import Count, Query, SearchStore

COUNTED = 1_000
"""The maximum number of runs counted for each workflow and status."""

EXAMINED = 1000
"""The maximum number of live runs of a workflow that are examined."""

MEASURED = timedelta(days=1)
"""The window for durations of runs and steps."""

_LIVE: tuple[RunStatus, ...] = ("queued", "running", "suspended", "waiting", "paused")


async def workers(store: SearchStore, now: datetime) -> tuple[WorkerRow, ...]:
    """Return the live workers, then those that were lost within the last day."""
    live, lost_workers = await asyncio.gather(read_workers(store), read_lost_workers(store, now))
    ids = {worker.id for worker in live}
    return (
        *map(worker_row, live),
        *(_lost_row(each) for each in lost_workers if each.worker not in ids),
    )


async def worker(store: SearchStore, id: str, now: datetime) -> WorkerRow | None:
    """Return a worker, or `None` if it is unknown or has stopped."""
    return next((each for each in await workers(store, now) if each.id == id), None)


async def read_lost_workers(store: SearchStore, now: datetime) -> list[Throughput]:
    """Return the latest documents of workers of the last day that did not stop cleanly.

    This includes live workers.
    """
    since = now - LOST_FOR
    documents = await read_last_throughput(store, since)
    return [each for each in documents if not each.stopped and each.seen_at >= since]


async def owners(store: SearchStore, now: datetime) -> dict[str, frozenset[str]]:
    """Return the owner ids of the live and the lost workers."""
    live, lost_workers = await asyncio.gather(read_workers(store), read_lost_workers(store, now))
    owner_ids = {each.worker: frozenset([each.owner]) for each in lost_workers if each.owner}
    return {**owner_ids, **{each.id: frozenset(each.owners) for each in live}}


async def workflows(store: SearchStore, redact: Redact, now: datetime) -> tuple[WorkflowRow, ...]:
    """Return the workflows that have runs, that a worker knows or that are paused, by name."""
    return await _rows(store, redact, now, Query())


async def workflow(
    store: SearchStore, name: str, redact: Redact, now: datetime
) -> WorkflowRow | None:
    """Return one workflow, with its live runs by version, or `None` if it is unknown."""
    rows, versions = await asyncio.gather(
        _rows(store, redact, now, Query(workflows=(name,))), count_versions(store, name)
    )
    row = next((row for row in rows if row.name == name), None)
    if row is None:
        return None
    by_version = {version: dict(counts) for version, counts in versions.counts.items()}
    capped = versions.capped
    return replace(row, versions=versions.totals, versions_capped=capped, by_version=by_version)


async def _rows(
    store: SearchStore, redact: Redact, now: datetime, query: Query
) -> tuple[WorkflowRow, ...]:
    live, definitions, switches, counts, throughput, versions = await asyncio.gather(
        read_workers(store),
        read_definitions(store),
        read_switches(store),
        store.counts(query, COUNTED),
        read_throughput(store, now - MEASURED),
        _versions(store, query),
    )
    spans = await spans_by_workflow(store)
    by_workflow, capped = versions
    hourly = partial(durations_by_hour, since=now - MEASURED + HOUR, now=now)
    names = {each.workflow for each in counts if each.workflow}
    names.update(each.workflow for each in definitions)
    names.update(each.workflow for one in live for each in one.workflows)
    names.update(switches.paused)
    return tuple(
        WorkflowRow(
            name=name,
            counts=_counts(counts, name),
            versions=by_workflow.get(name, {}),
            versions_capped=capped,
            workers=_workers_of(live, name),
            paused=name in switches.paused,
            paused_reason=_reason(switches, name, redact),
            durations=_durations(throughput, name),
            steps=_steps(throughput, name),
            definitions=_definitions(definitions, name),
            kept_for=spans.get(name, {}),
            by_hour=_by_hour(throughput, name, now),
            durations_by_hour=hourly(throughput, workflow=name) if query.workflows else (),
        )
        for name in sorted(names)
    )


async def _versions(store: SearchStore, query: Query) -> tuple[dict[str, dict[int, int]], bool]:
    """Count the newest live runs by workflow and version; also return whether there are more."""
    page = await store.search(Query(statuses=_LIVE, workflows=query.workflows), EXAMINED)
    versions: dict[str, Counter[int]] = {}
    for run in page.runs:
        versions.setdefault(run.workflow or "", Counter())[run.version] += 1
    by_workflow = {name: dict(sorted(counts.items())) for name, counts in versions.items()}
    return by_workflow, page.cursor is not None


def _counts(counts: Iterable[Count], name: str) -> dict[str, Tally]:
    counts_of_name = (each for each in counts if each.workflow == name)
    return {each.status: Tally(each.count, each.capped) for each in counts_of_name}


def _workers_of(live: Iterable[WorkerPresence], name: str) -> tuple[str, ...]:
    return tuple(one.id for one in live if any(each.workflow == name for each in one.workflows))


def _reason(switches: Switches, name: str, redact: Redact) -> str:
    switch = switches.workflows.get(name)
    return redact.text(switch.why) if switch is not None and switch.paused else ""


def _definitions(
    definitions: Iterable[DefinitionDocument], name: str
) -> tuple[DefinitionFacts, ...]:
    return tuple(_facts_of(each) for each in definitions if each.workflow == name)


def _facts_of(definition: DefinitionDocument) -> DefinitionFacts:
    return DefinitionFacts(
        workflow=definition.workflow,
        version=definition.version,
        payload_schema=definition.payload_schema,
        doc=definition.doc,
        fingerprint=definition.fingerprint,
        seen_at=definition.seen_at,
        keeps=definition.keeps,
    )


def _durations(throughput: Iterable[Throughput], name: str) -> Percentiles | None:
    durations = [each.workflows[name].durations for each in throughput if name in each.workflows]
    return percentiles(durations) if durations else None


def _by_hour(throughput: Iterable[Throughput], name: str, now: datetime) -> tuple[int, ...]:
    """Return how many runs ended in each hour, the current one last."""
    counts = [0] * (MEASURED // HOUR)
    for each in throughput:
        ago = (now - each.hour) // HOUR
        if name in each.workflows and 0 <= ago < len(counts):
            ended = each.workflows[name]
            counts[-1 - ago] += ended.completed + ended.failed + ended.cancelled
    return tuple(counts)


def _steps(throughput: Iterable[Throughput], name: str) -> dict[str, Percentiles]:
    durations: dict[str, list[Sequence[int]]] = {}
    for each in throughput:
        if name in each.workflows:
            for step, classes in each.workflows[name].steps.items():
                durations.setdefault(step, []).append(classes)
    return {step: percentiles(classes) for step, classes in sorted(durations.items())}


def _lost_row(last: Throughput) -> WorkerRow:
    return WorkerRow(
        id=last.worker,
        state="lost",
        host=last.host,
        pid=last.pid,
        started_at=last.started_at,
        seen_at=last.seen_at,
    )
