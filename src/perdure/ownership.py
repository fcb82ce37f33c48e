"""What a process does with the runs it owns: writes them through one committer, keeps their leases
alive.

A `Session` is one store seen by one process; it lives while runs do. An `OwnedRun` is the home of a
run whose lease we hold: every write carries the lease's epoch, and the first refusal ends the run
here. A `KeptRun` is the home of a run on a store without a journal: the whole snapshot is saved.
"""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime, timedelta
from typing import Any, cast

from perdure import codec, spec
from perdure.clock import Clock, isoformat
from perdure.commit import Committer
from perdure.errors import LeaseLost, PerdureError, StoreError, Suspended
from perdure.execution import Execution
from perdure.lineage import outside
from perdure.parking import Parking
from perdure.snapshot import Execution as ExecutionBlock
from perdure.snapshot import PendingWait
from perdure.store import (
    Entry,
    Grant,
    Lease,
    Message,
    Rest,
    Store,
    Verdict,
    Want,
    can_inbox,
    can_journal,
    require_inbox,
    require_lease,
    require_transaction,
)

logger = logging.getLogger(__name__)

_RUNNING = b'{"status":"running","lastUpdated":"%b","currentStepId":%b}'
_DELTA = b'{"formatVersion":1,"steps":{%b:%b},"execution":%b%b}'


class Session:
    """One store, one committer, and the leases of all runs that are alive here.

    As a context manager it counts those who use it: with the last of them its tasks end.
    """

    def __init__(self, store: Store, clock: Clock, lease_ttl: timedelta) -> None:
        self.store = store
        self.clock = clock
        self.lease_ttl = lease_ttl
        self.loop = asyncio.get_running_loop()
        self._runs: dict[str, Home] = {}
        self.on_idle: Callable[[], object] | None = None
        self.idle = False
        self._users = 0
        self._committer: Committer | None = None
        self._renewer: asyncio.Task[None] | None = None
        self._renewing = asyncio.Lock()
        self._renewed = 0.0

    async def __aenter__(self) -> "Session":
        self._users += 1
        if self._committer is None and can_journal(self.store):
            self._committer = Committer(self.store, require_lease(self.store), clock=self.clock)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._users -= 1
        if self._users:
            return
        self.idle = True
        if self.on_idle is not None:
            self.on_idle()
        renewer, self._renewer = self._renewer, None
        committer, self._committer = self._committer, None
        if renewer is not None:
            renewer.cancel()
            await asyncio.wait([renewer])
        if committer is not None:
            await committer.close()

    @property
    def committer(self) -> Committer:
        """The way every write goes."""
        assert self._committer is not None, (
            "the session is not entered, or its store has no journal"
        )
        return self._committer

    async def acquire(self, want: Want) -> Grant | None:
        """Give a lease, or None; a caller that is cancelled holds none."""
        with telling(self.store, f"lease run {want.id!r}"):
            try:
                return await self._ask(want)
            except asyncio.CancelledError:
                await self._take_back(want)
                raise

    async def _ask(self, want: Want) -> Grant | None:
        if self._committer is not None:
            return await self._committer.acquire(want)
        return (await require_lease(self.store).acquire([want]))[0]

    async def _take_back(self, want: Want) -> None:
        """Release what may have been granted: its owner is given it again."""
        try:
            grant = await self._ask(Want(want.id, want.owner, want.ttl))
            if grant is not None:
                await require_lease(self.store).release([grant.lease])
        except Exception as error:  # noqa: BLE001  # the cancelled caller is not to hear of it
            logger.warning("run %r may stay leased until its lease ends (%s)", want.id, error)

    def hold(self, run: "Home") -> None:
        """Keep the lease of this run alive from now on."""
        self._runs[run.id] = run
        if self._renewer is None:
            self._renewed = self.clock.monotonic()
            self._renewer = asyncio.Task(self._renew(), loop=asyncio.get_running_loop())

    def drop(self, run: "Home") -> None:
        """Let the lease of this run end."""
        if self._runs.get(run.id) is run:
            del self._runs[run.id]

    def poke(self, run_id: str) -> None:
        """Tell a run that is alive here that mail may have come."""
        if (run := self._runs.get(run_id)) is not None:
            run.mail_came()

    async def catch_up(self) -> None:
        """Renew at once what is long overdue, since the event loop was blocked or the store away.

        Whoever looks for orphans does this first, so as not to take its own runs from itself.
        """
        overdue = self.lease_ttl.total_seconds() * 2 / 3
        if self._runs and self.clock.monotonic() - self._renewed > overdue:
            await self._renew_once()

    async def _renew(self) -> None:
        pause = self.lease_ttl / 3
        while True:
            await self.clock.sleep(pause)
            try:
                await self._renew_once()
                pause = self.lease_ttl / 3
            except StoreError as error:
                pause = self.lease_ttl / 12
                logger.warning("leases could not be renewed (%s); trying again in %s", error, pause)

    async def _renew_once(self) -> None:
        async with self._renewing:
            started = self.clock.monotonic()
            runs = list(self._runs.values())
            leases = [run.lease for run in runs if run.lease is not None]
            renewed: Sequence[Lease | None] = ()
            if leases:
                with telling(self.store, f"renew {len(leases)} leases"):
                    renewed = await require_lease(self.store).renew(leases, self.lease_ttl)
            self._renewed = started
        for run, lease in zip(runs, renewed, strict=True):
            if lease is None:
                run.lose()
            else:
                run.renewed(lease)


class Home(spec.Home, ABC):
    """Where a durable run lives while this process works on it, and how it is left behind."""

    def __init__(
        self,
        session: Session,
        id: str,
        execution: Execution,
        *,
        grant: Grant | None,
        linger: timedelta | None = None,
    ) -> None:
        self.session = session
        self.id = id
        self.execution = execution
        self.ledger = execution.ledger
        self.lease = None if grant is None else grant.lease
        self.suspended: list[PendingWait] | None = None
        self.main: asyncio.Task[Any] | None = None
        self.on_mail: Callable[[], None] | None = None
        self.parking = Parking(
            self,
            execution.lineage,
            execution.clock,
            mail=[] if grant is None else list(grant.inbox),
            linger=linger,
        )
        if grant is not None:
            session.hold(self)

    @abstractmethod
    async def rest(self, block: ExecutionBlock, rest: Rest, takes: Sequence[str] = ()) -> bytes:
        """Write the whole run as it lies from now on, and let it go; give what was written."""

    @abstractmethod
    async def persist_waits(self) -> None:
        """Make the deadlines of waits durable."""

    async def fetch_mail(self) -> list[Message]:
        """Give the untaken messages of the run."""
        store = self.session.store
        return list(await store.inbox(self.id)) if can_inbox(store) else []

    async def wait(self, wait: PendingWait) -> tuple[str, object] | None:
        """Wait in memory or at rest."""
        if wait["kind"] == "event":
            require_inbox(self.session.store, "step.wait_for_event")
        return await self.parking.wait(wait)

    def suspend(self, waits: list[PendingWait]) -> None:
        """Unwind the function: every branch waits for one of these."""
        self.suspended = waits
        self.stop(Suspended())

    def stop(self, reason: BaseException) -> None:
        """Unwind the function for this reason; no step begins any more."""
        self.execution.break_off(reason)
        if self.main is not None:
            self.main.cancel()

    def renewed(self, lease: Lease) -> None:
        """Go on with the lease's new expiry, and look at mail that came meanwhile."""
        self.lease = lease
        if lease.mail:
            self.mail_came()

    def mail_came(self) -> None:
        """Look at the inbox, in which something may lie."""
        self.parking.changed()
        if self.on_mail is not None:
            self.on_mail()

    def lose(self) -> None:
        """Stop: the run belongs to somebody else now."""
        self.session.drop(self)
        self.stop(LeaseLost(self.id))

    async def release(self, wake_at: datetime | None = None) -> None:
        """Let the run go as it is, for whoever comes next: now, or not before `wake_at`."""
        self.session.drop(self)
        if self.lease is not None:
            with telling(self.session.store, f"release run {self.id!r}"):
                store = require_lease(self.session.store)
                await store.release([self.lease], wake_at=wake_at)

    def block(self, status: str = "running", **extra: Any) -> ExecutionBlock:
        """Give the execution block of this moment."""
        now = isoformat(self.execution.clock.now())
        block: dict[str, Any] = {"status": status, "lastUpdated": now, **extra}
        if status == "running" and self.execution.last_key is not None:
            block["currentStepId"] = self.execution.last_key
        return cast(ExecutionBlock, block)

    def running(self) -> ExecutionBlock:
        """Give the execution block of a run that goes on, with what it waits for."""
        waits = list(self.ledger.pending.values())
        return self.block(pending=waits) if waits else self.block()


class OwnedRun(Home):
    """A run whose lease this process holds, on a store with a journal."""

    def __init__(
        self,
        session: Session,
        grant: Grant,
        execution: Execution,
        *,
        linger: timedelta | None = None,
        replay_every_step: bool = False,
    ) -> None:
        super().__init__(session, grant.lease.id, execution, grant=grant, linger=linger)
        self._epoch = grant.lease.epoch
        self._n = 0
        self._replay_every_step = replay_every_step
        self._append = session.committer.append

    async def record(
        self,
        step: str,
        key: str,
        record: bytes,
        at: str,
        warnings: Sequence[Any] = (),
        takes: Sequence[str] = (),
    ) -> None:
        """Append the step's record to the journal."""
        entry = self._entry(step, key, record, at, warnings, takes)
        verdict = await self._append(entry)
        if verdict is not Verdict.ACCEPTED:
            raise self._lost()
        self.parking.changed()
        if self._replay_every_step:
            await self.parking.halt(f"replay:{key}")

    def _entry(
        self,
        step: str,
        key: str,
        record: bytes,
        at: str,
        warnings: Sequence[Any] = (),
        takes: Sequence[str] = (),
    ) -> Entry:
        name = codec.dumps(key)
        more = b',"warnings":' + codec.dumps(list(warnings)) if warnings else b""
        if self.ledger.pending:
            block = codec.dumps(self.running())
        else:
            # What `running` gives, written out: it goes with every step.
            block = _RUNNING % (at.encode(), name)
        data = _DELTA % (name, record, block, more)
        self._n += 1
        return Entry(self.id, self._epoch, self._n, data, tuple(takes), None, step)

    def _numbered(
        self, data: bytes, takes: tuple[str, ...] = (), rest: Rest | None = None
    ) -> Entry:
        self._n += 1
        return Entry(self.id, self._epoch, self._n, data, takes, rest)

    def _lost(self) -> LeaseLost:
        self.lose()
        return LeaseLost(self.id)

    async def persist_waits(self) -> None:
        """Append the deadlines of waits."""
        block = codec.dumps(self.running())
        data = b'{"formatVersion":1,"steps":{},"execution":%b}' % block
        if await self._append(self._numbered(data)) is not Verdict.ACCEPTED:
            raise self._lost()

    async def transact(
        self, step: str, work: Callable[[Any], Awaitable[tuple[str, bytes, str]]]
    ) -> None:
        """Let the step's record commit with what `work` wrote."""
        store = require_transaction(self.session.store, f"step.transaction({step!r})")

        async def entry(connection: Any) -> Entry:
            return self._entry(step, *await work(connection))

        if await store.transact(self.id, self._epoch, entry) is not Verdict.ACCEPTED:
            raise self._lost()

    async def rest(self, block: ExecutionBlock, rest: Rest, takes: Sequence[str] = ()) -> bytes:
        """Fold the journal into the snapshot, set when the run wakes, and give the lease up."""
        data = b"" if rest.gone else self.ledger.encode(block)
        try:
            verdict = await self._append(self._numbered(data, tuple(takes), rest))
        finally:
            # Whatever became of the write: nobody works on the run here any more.
            self.session.drop(self)
        # A run that is unknown was deleted by this very write, whose first answer was lost.
        if verdict is not Verdict.ACCEPTED and not (rest.gone and verdict is Verdict.UNKNOWN):
            raise self._lost()
        return data


class KeptRun(Home):
    """A run on a store without a journal: each record saves the whole snapshot.

    Saves never overtake each other: while one is under way, records gather for the next.
    """

    def __init__(
        self, session: Session, id: str, execution: Execution, grant: Grant | None = None
    ) -> None:
        super().__init__(session, id, execution, grant=grant)
        self._saving = asyncio.Lock()
        self._saved = 0
        self._changes = 0

    async def record(
        self,
        step: str,
        key: str,
        record: bytes,
        at: str,
        warnings: Sequence[Any] = (),
        takes: Sequence[str] = (),
    ) -> None:
        """Save the snapshot with this record in it."""
        await self.persist_waits()

    async def persist_waits(self) -> None:
        """Save the snapshot as it is now, or find that somebody else just did."""
        self._changes += 1
        mine = self._changes
        async with self._saving:
            if self._saved >= mine:
                return
            upto = self._changes
            await self._save(self.running())
            self._saved = upto

    async def _save(self, block: ExecutionBlock) -> bytes:
        data = self.ledger.encode(block)
        with telling(self.session.store, f"save run {self.id!r}"), outside():
            await self.session.store.save(self.id, codec.loads(data))
        return data

    async def transact(
        self, step: str, work: Callable[[Any], Awaitable[tuple[str, bytes, str]]]
    ) -> None:
        """Refuse: the store has no transaction."""
        require_transaction(self.session.store, f"step.transaction({step!r})")

    async def rest(self, block: ExecutionBlock, rest: Rest, takes: Sequence[str] = ()) -> bytes:
        """Save the whole snapshot, or delete it, and give the lease up."""
        data = b""
        if rest.gone:
            with telling(self.session.store, f"delete run {self.id!r}"):
                await self.session.store.delete(self.id)
        else:
            data = await self._save(block)
        await self.release()
        return data


class telling:  # noqa: N801  # reads as a verb: with telling(store, "load run 'a'")
    """Turns what a user's own store raises into a `StoreError` that says what was being done."""

    __slots__ = ("_store", "_what")

    def __init__(self, store: Store, what: str) -> None:
        self._store = store
        self._what = what

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, Exception) and not isinstance(error, PerdureError):
            text = f"{type(self._store).__name__} could not {self._what}: {error}"
            raise StoreError(text) from error
