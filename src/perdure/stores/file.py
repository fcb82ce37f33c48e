"""A store in a directory: a file for each run's snapshot and one for its journal."""

import asyncio
import os
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from heapq import nlargest
from pathlib import Path
from typing import Literal, ParamSpec, TypeVar

import msgspec

from perdure import codec
from perdure.clock import Clock, SystemClock, isoformat
from perdure.errors import InvalidArgument, StoreClosed, StoreCorrupted, StoreError, ValueTooLarge
from perdure.snapshot import RunStatus, Snapshot, is_over, workflow_of
from perdure.store import (
    MAX_VALUE_SIZE,
    Capabilities,
    Closing,
    Delivery,
    Due,
    Entry,
    Grant,
    Lease,
    Listed,
    Message,
    NewRun,
    Stats,
    Verdict,
    Want,
    check_entries,
    check_id,
    check_limit,
    check_prefix,
    rest_of,
)
from perdure.stores._file_catalog import Catalog, Line
from perdure.stores._file_desk import Desk
from perdure.stores._file_disk import Disk
from perdure.stores._times import micros, moment_of

P = ParamSpec("P")
T = TypeVar("T")

_THREADS = 4


class FileStore(Closing):
    """Keeps runs as files in a directory, which several processes of one machine may share.

    With `durability="full"` an answered write outlasts a loss of power, with `"normal"` only the
    end of the process. Locks are held during an operation, and end with the process.

        async with FileStore("./workflows") as store:
            await store.save("checkout-123", snapshot)
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        prefix: str = "",
        durability: Literal["full", "normal"] = "full",
        clock: Clock = SystemClock(),
        max_value_size: int = MAX_VALUE_SIZE,
    ) -> None:
        if not isinstance(directory, str | os.PathLike) or not os.fspath(directory):
            raise InvalidArgument("directory", directory, "a path")
        if durability not in ("full", "normal"):
            raise InvalidArgument("durability", durability, '"full" or "normal"')
        self.capabilities = Capabilities(
            journal=True,
            lease="atomic",
            schedule=True,
            inbox=True,
            upkeep=True,
            shared="machine",
            survives="power_loss" if durability == "full" else "process_crash",
            max_value_size=max_value_size,
        )
        self._clock = clock
        self._desk = Desk(Path(directory), Disk(sync=durability == "full"), check_prefix(prefix))
        self._catalog = Catalog(self._desk.runs)
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="perdure-file")
        self._closed = False

    async def save(self, id: str, snapshot: Snapshot, /) -> None:
        """Replace the whole run by `snapshot`; an owner of before is fenced out."""
        data = codec.dumps(snapshot)
        self._check_size(f"the snapshot of run {check_id(id)!r}", data)
        workflow, rest = workflow_of(snapshot), rest_of(snapshot)
        await self._call(self._desk.save, id, data, workflow, rest, self._now())

    async def load(self, id: str, /) -> Snapshot | None:
        """Give the merged snapshot, or None."""
        return await self._call(self._desk.load, check_id(id))

    async def delete(self, id: str, /) -> bool:
        """Remove the run and all that belongs to it; tell whether there was one."""
        return await self._call(self._desk.delete, check_id(id))

    async def list(
        self,
        *,
        prefix: str = "",
        limit: int = 100,
        status: RunStatus | None = None,
        workflow: str | None = None,
        after: str | None = None,
    ) -> Sequence[Listed]:
        """Give runs newest first, at most `limit`; every run's header is looked at."""
        mark = None if after is None else _mark(after, self._desk.prefix)
        check_limit(limit)
        chosen = (
            line
            for line in await self._lines(check_prefix(prefix))
            if (status is None or line.status == status)
            and (workflow is None or line.workflow == workflow)
            and (mark is None or _place(line) < mark)
        )
        return [self._listed(line) for line in nlargest(limit, chosen, key=_place)]

    async def close(self) -> None:
        """Wait for what is being written and refuse further calls; the files stay."""
        if not self._closed:
            self._closed = True
            await asyncio.to_thread(self._threads.shutdown)
            await asyncio.to_thread(self._desk.close)

    async def append(self, entries: Sequence[Entry], /) -> Sequence[Verdict]:
        """Write the entries and give a verdict for each, in order; each journal is synced once."""
        check_entries(entries, self.capabilities.max_value_size)
        return await self._call(self._desk.append, entries, self._now())

    async def acquire(self, wants: Sequence[Want], /) -> Sequence[Grant | None]:
        """Give each want its lease and the run read under it, or None."""
        for want in wants:
            self._check_size(f"the snapshot of run {check_id(want.id)!r}", want.create or b"")
        return await self._call(self._desk.acquire, wants, self._now())

    async def renew(self, leases: Sequence[Lease], ttl: timedelta, /) -> Sequence[Lease | None]:
        """Move the expiry of all leases to `ttl` from now; None for each that was lost."""
        return await self._call(self._desk.renew, leases, ttl, self._now())

    async def release(self, leases: Sequence[Lease], /, *, wake_at: datetime | None = None) -> None:
        """Give the leases up without a rest, so that the runs can be claimed at `wake_at`."""
        at = self._now() if wake_at is None else micros(wake_at, "wake_at")
        await self._call(self._desk.release, leases, at)

    async def enqueue(self, runs: Sequence[NewRun], /) -> Sequence[bool]:
        """Create runs that wait for a claim; False for each id that was there already."""
        for run in runs:
            self._check_size(f"the snapshot of run {check_id(run.id)!r}", run.snapshot)
        return await self._call(self._desk.enqueue, runs, self._now())

    async def due(
        self, now: datetime, limit: int, /, *, workflows: Sequence[str] | None = None
    ) -> Sequence[Due]:
        """Give the runs without a live lease whose wake time has come at `now`, earliest first."""
        return await self._call(self._desk.due, micros(now, "now"), check_limit(limit), workflows)

    async def claim(
        self,
        owner: str,
        ttl: timedelta,
        limit: int,
        /,
        *,
        workflows: Sequence[str] | None = None,
    ) -> Sequence[Grant]:
        """Lease and load up to `limit` runs that are due, runnable or orphaned, earliest first."""
        check_limit(limit)
        return await self._call(self._desk.claim, owner, ttl, limit, workflows, self._now())

    async def send(
        self, id: str, name: str, payload: bytes, /, *, dedup_id: str | None = None
    ) -> Delivery:
        """Put an event in the run's inbox, and wake a run at rest that awaits it."""
        self._check_size(f"the event {name!r} for run {check_id(id)!r}", payload)
        return await self._call(self._desk.send, id, name, payload, dedup_id, self._now())

    async def inbox(self, id: str, /) -> Sequence[Message]:
        """Give the run's messages that were not taken, in the order they were sent."""
        return await self._call(self._desk.inbox, check_id(id))

    async def prune(
        self, older_than: timedelta, /, *, status: RunStatus | None = None, limit: int = 1000
    ) -> int:
        """Delete up to `limit` runs that are over and were last updated longer ago than that."""
        before = self._now() - older_than // timedelta(microseconds=1)
        old = [
            self._id(line)
            for line in await self._lines()
            if is_over(line.status)
            and (status is None or line.status == status)
            and line.updated_at < before
        ]
        pruned = [
            await self._call(self._desk.prune, id, before) for id in old[: check_limit(limit)]
        ]
        return sum(pruned)

    async def stats(self) -> Stats:
        """Count the runs by status and find the oldest due one."""
        by_status = Counter[str](line.status for line in await self._lines())
        oldest = await self.due(moment_of(self._now()), 1)
        return Stats(by_status, oldest[0].wake_at if oldest else None)

    async def _lines(self, prefix: str = "") -> Sequence[Line]:
        return await self._call(self._catalog.lines, self._desk.prefix + prefix)

    async def _call(self, verb: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        self._check_open()
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, lambda: self._verb(verb, *args, **options))

    def _verb(self, verb: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        try:
            self._desk.open()
            return verb(*args, **options)
        except OSError as error:
            raise StoreError(f"the files could not be written or read: {error}") from error
        except msgspec.MsgspecError as error:
            raise StoreCorrupted(f"a file of the store is damaged: {error}") from error

    def _now(self) -> int:
        self._check_open()
        return micros(self._clock.now())

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosed("this FileStore was closed; its files are there for a new one")

    def _check_size(self, what: str, data: bytes) -> None:
        if len(data) > self.capabilities.max_value_size:
            raise ValueTooLarge(what, len(data), self.capabilities.max_value_size)

    def _listed(self, line: Line) -> Listed:
        id = self._id(line)
        updated_at = isoformat(moment_of(line.updated_at))
        return Listed(id, updated_at, line.status, line.workflow, f"{line.updated_at} {id}")

    def _id(self, line: Line) -> str:
        return line.id[len(self._desk.prefix) :]


def _place(line: Line) -> tuple[int, str]:
    return line.updated_at, line.id


def _mark(cursor: str, prefix: str) -> tuple[int, str]:
    updated_at, _, id = cursor.partition(" ")
    if not updated_at.isdecimal() or not id:
        raise InvalidArgument("after", cursor, "the cursor of a listed run")
    return int(updated_at), prefix + id
