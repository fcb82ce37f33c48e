"""Wait for changes of runs by any process, with one poller per store and event loop.

All waiting callers share it. A round asks the store once for the revisions of all runs that are due
for a check, and wakes the callers whose run has changed. A run that is settled in this process is
checked at once.
"""

import asyncio
import logging
import shlex
from collections.abc import AsyncGenerator, Collection, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import NamedTuple

from perdure import codec
from perdure.clock import Clock
from perdure.durable.committer import MAX_OUTAGE
from perdure.durable.reports import report_key
from perdure.durable.timers import wait_until_set
from perdure.durable.watchers import notified_of_settled_runs
from perdure.engine.tasks import detached
from perdure.errors import StoreError, StoreUnavailable
from perdure.snapshot import RunStatus, Snapshot, rest_status
from perdure.store import Store, can_search

logger = logging.getLogger(__name__)

SHORTEST_PAUSE, LONGEST_PAUSE, GROWTH = 0.01, 1.0, 0.1
"""A run is checked again after a tenth of the time since its last change, within these limits."""

OUTAGE_PAUSE = 0.5
"""Seconds until an unavailable store is asked again."""

PAGE = 1000
"""The maximum number of runs in one call of the store."""

_pollers: dict[tuple[int, int], "Poller"] = {}


class Sighting(NamedTuple):
    """A run as the poller saw it; `revision` changes with the run."""

    status: RunStatus
    revision: object
    report: str | None = None


class WatchedRun:
    """A run that callers wait for, and its last sighting."""

    def __init__(self, store: Store, clock: Clock, run_id: str) -> None:
        self.run_id = run_id
        self.watches: set[Watch] = set()
        self.sighting: Sighting | None = None
        self.error: Exception | None = None
        self.looks = 0
        self.is_urgent = False
        self.changed_at = self.look_at = clock.monotonic()
        self._pause = SHORTEST_PAUSE
        self._store = store
        self._clock = clock
        self._snapshot: tuple[Sighting | None, asyncio.Task[Snapshot | None]] | None = None

    def is_due(self, now: float) -> bool:
        """Return whether half of the pause has passed: runs that are due soon join a round."""
        return self.is_urgent or self.look_at - self._pause / 2 <= now

    def update(self, sighting: Sighting | None, now: float) -> None:
        """Store a sighting, and wake the callers for which it is new."""
        is_new = sighting != self.sighting
        if is_new:
            self.sighting, self.changed_at = sighting, now
        self._pause = min(max((now - self.changed_at) * GROWTH, SHORTEST_PAUSE), LONGEST_PAUSE)
        self.look_at = now + self._pause
        self.looks += 1
        for watch in self.watches:
            if is_new or watch.is_first:
                watch.wakeup.set()

    def fail(self, error: Exception) -> None:
        """Raise an error in all callers."""
        self.error = error
        for watch in self.watches:
            watch.wakeup.set()

    async def load(self) -> Snapshot | None:
        """Return the run's snapshot; all callers that saw the same revision share one read."""
        if self._snapshot is None or self._snapshot[0] != self.sighting:
            self._snapshot = self.sighting, detached(self._load())
        try:
            return await asyncio.shield(self._snapshot[1])
        except StoreError:
            self._snapshot = None
            raise

    async def _load(self) -> Snapshot | None:
        end = self._clock.monotonic() + MAX_OUTAGE.total_seconds()
        while True:
            try:
                return await self._store.load(self.run_id)
            except StoreUnavailable:
                if self._clock.monotonic() >= end:
                    raise
            await self._clock.sleep(OUTAGE_PAUSE)


class Watch:
    """One caller that waits for a run."""

    def __init__(self, run: WatchedRun, reports: bool) -> None:
        self.run = run
        self.reports = reports
        self.wakeup = asyncio.Event()
        self.is_first = True
        self._looks = run.looks
        self._last_sighting: Sighting | None = None
        self._timed_out_after: timedelta | None = None

    async def next(self) -> Sighting | None:
        """Wait until the run differs from the last sighting, and return the new one.

        `None` means that the run does not exist. After `time_out`, raise `TimeoutError` instead of
        waiting; but always wait for the first sighting.
        """
        while not self._has_news():
            if self.run.error is not None:
                raise self.run.error
            if self._timed_out_after is not None and self._last_sighting is not None:
                raise TimeoutError(self._describe(self._last_sighting, self._timed_out_after))
            self.wakeup.clear()
            await self.wakeup.wait()
        self.is_first, self._last_sighting = False, self.run.sighting
        return self._last_sighting

    def _describe(self, sighting: Sighting, elapsed: timedelta) -> str:
        text = f"run {self.run.run_id!r} is still {sighting.status} after "
        text += f"{elapsed.total_seconds():g}s."
        if sighting.status == "queued":
            text += " Is a worker running that knows its workflow?"
        return f"{text} `perdure why {shlex.quote(self.run.run_id)}` says what it waits for"

    async def time_out(self, clock: Clock, timeout: timedelta) -> None:
        """Limit how long the caller waits."""
        await clock.sleep(timeout)
        self._timed_out_after = timeout
        self.wakeup.set()

    def _has_news(self) -> bool:
        # The first sighting must come from a check that ended after the caller arrived.
        if self.is_first:
            return self.run.looks > self._looks
        return self.run.sighting != self._last_sighting

    async def load(self) -> Snapshot | None:
        """Return the run's snapshot."""
        return await self.run.load()


class Poller:
    """Checks the watched runs of a store. Its task exists while there are any."""

    def __init__(self, store: Store, clock: Clock) -> None:
        self.store = store
        self._clock = clock
        self.loop = asyncio.get_running_loop()
        self._key = (id(store), id(self.loop))
        self._runs: dict[str, WatchedRun] = {}
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._unavailable_since: float | None = None

    def add(self, run_id: str, reports: bool) -> Watch:
        """Begin to watch a run."""
        run = self._runs.get(run_id)
        if run is None:
            run = self._runs[run_id] = WatchedRun(self.store, self._clock, run_id)
        watch = Watch(run, reports)
        run.watches.add(watch)
        # For a new caller, the pauses start over with the shortest one.
        run.is_urgent, run.changed_at = True, self._clock.monotonic()
        if self._task is None:
            self._task = detached(self._poll())
        self._wake.set()
        return watch

    def remove(self, watch: Watch) -> None:
        """Stop watching a run for one caller."""
        run = watch.run
        run.watches.discard(watch)
        if not run.watches and self._runs.get(run.run_id) is run:
            del self._runs[run.run_id]
        if not self._runs:
            self._wake.set()

    def check_now(self, run_id: str) -> None:
        """Check a run at once, because it was settled in this process."""
        run = self._runs.get(run_id)
        if run is not None:
            run.is_urgent = True
            self._wake.set()

    async def _poll(self) -> None:
        try:
            with notified_of_settled_runs(self.store, self.check_now):
                while self._runs:
                    await self._round()
                    await self._rest()
        finally:
            self._task = None
            if _pollers.get(self._key) is self:
                del _pollers[self._key]

    async def _rest(self) -> None:
        """Sleep until the next run is due, a caller arrives, or the last one has left."""
        if not self._runs:
            return
        next_look = min(run.look_at for run in self._runs.values())
        await wait_until_set(self._wake, self._clock, next_look - self._clock.monotonic())

    async def _round(self) -> None:
        self._wake.clear()
        now = self._clock.monotonic()
        due_runs = [run for run in self._runs.values() if run.is_due(now)]
        for run in due_runs:
            # Cleared before the check: a run that is settled during the check must be checked
            # again.
            run.is_urgent = False
        for first in range(0, len(due_runs), PAGE):
            page = due_runs[first : first + PAGE]
            try:
                sightings = await self._look(page)
            except Exception as error:  # noqa: BLE001  # raised to the callers
                self._handle_error(page, error)
                continue
            self._unavailable_since = None
            for run, sighting in zip(page, sightings, strict=True):
                run.update(sighting, self._clock.monotonic())

    def _handle_error(self, page: Sequence[WatchedRun], error: Exception) -> None:
        """Retry while the store is unavailable for a short time; otherwise fail the callers."""
        now = self._clock.monotonic()
        if isinstance(error, StoreUnavailable):
            if self._unavailable_since is None:
                self._unavailable_since = now
                logger.warning("store unavailable (%s); waiting callers retry", error)
            if now - self._unavailable_since < MAX_OUTAGE.total_seconds():
                for run in page:
                    run.look_at = now + OUTAGE_PAUSE
                return
        for run in page:
            self._runs.pop(run.run_id, None)
            run.fail(error)

    async def _look(self, page: Sequence[WatchedRun]) -> list[Sighting | None]:
        ids = [watched_run.run_id for watched_run in page]
        if not can_search(self.store):
            return [await self._look_at_snapshot(run_id) for run_id in ids]
        summaries = await self.store.summaries(ids)
        ids_with_reports = {
            each.run_id for each in page if any(watch.reports for watch in each.watches)
        }
        # Only a running step reports progress in a document.
        owned_ids = {run.id for run in summaries if run is not None and run.owner is not None}
        reports = await read_reports(self.store, ids_with_reports & owned_ids)
        return [
            None if run is None else Sighting(run.status, run.revision, reports.get(run.id))
            for run in summaries
        ]

    async def _look_at_snapshot(self, run_id: str) -> Sighting | None:
        snapshot = await self.store.load(run_id)
        if snapshot is None:
            return None
        return Sighting(rest_status(snapshot), codec.dumps(snapshot))


async def read_reports(store: Store, run_ids: Collection[str]) -> dict[str, str]:
    """Return the reports that running steps of these runs have written, as JSON."""
    if not run_ids or not can_search(store):
        return {}
    try:
        reports = await store.documents.get_many([report_key(run_id) for run_id in run_ids])
    except StoreError as error:
        # A report is only informative; the run can be shown without it.
        logger.debug("reports cannot be read (%s)", error)
        return {}
    pairs = zip(run_ids, reports, strict=True)
    return {run_id: report for run_id, report in pairs if report is not None}


@asynccontextmanager
async def watch_run(
    store: Store,
    clock: Clock,
    run_id: str,
    *,
    reports: bool = False,
    timeout: timedelta | None = None,
) -> AsyncGenerator[Watch, None]:
    """Watch a run inside an `async with`; with `reports`, also the progress of its running step."""
    poller = _poller(store, clock)
    watch = poller.add(run_id, reports)
    timer = None if timeout is None else detached(watch.time_out(clock, timeout))
    try:
        yield watch
    finally:
        if timer is not None:
            timer.cancel()
        poller.remove(watch)


def _poller(store: Store, clock: Clock) -> Poller:
    """Return the poller of this store and event loop."""
    loop = asyncio.get_running_loop()
    key = (id(store), id(loop))
    poller = _pollers.get(key)
    # A loop that was closed while callers waited may have left its poller behind, and a new loop
    # may have the same id.
    if poller is None or poller.store is not store or poller.loop is not loop:
        poller = _pollers[key] = Poller(store, clock)
    return poller
