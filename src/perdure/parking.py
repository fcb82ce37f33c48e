"""Where the branches of a durable run wait: in memory for a short while, at rest for a long one.

A run is put to rest when every branch of it waits: none is in a step, none does work of its own.
What finished beside a sleeping branch is recorded by then, since its record was awaited. Until that
moment the waits are spent here, and a wait whose time or event comes goes on at once.
"""

import asyncio
import logging
from datetime import datetime, timedelta
from typing import Any, Protocol

from perdure import codec
from perdure.clock import Clock, parse_iso
from perdure.errors import StoreUnavailable
from perdure.lineage import CURRENT, Branch, Lineage, about_to_run, awaits_branches
from perdure.snapshot import PendingWait
from perdure.store import Message

logger = logging.getLogger(__name__)

POLL = timedelta(milliseconds=250)
SLOWEST_POLL = timedelta(seconds=1)
_TURNS = 20


class Host(Protocol):
    """Whose branches wait here."""

    async def persist_waits(self) -> None:
        """Make the deadlines of waits durable, since the run goes on beside them."""
        ...

    async def fetch_mail(self) -> list[Message]:
        """Give the untaken messages of the run."""
        ...

    def suspend(self, waits: list[PendingWait]) -> None:
        """Put the run to rest with these waits."""
        ...

    def stop(self, reason: BaseException) -> None:
        """End the run here: it cannot wait as it must."""
        ...


class _Parked:
    __slots__ = ("answer", "branch", "message", "wait", "wake_at")

    def __init__(self, branch: Branch, wait: PendingWait) -> None:
        self.branch = branch
        self.wait = wait
        self.message: Message | None = None
        self.wake_at = parse_iso(wait["wakeAt"]) if "wakeAt" in wait else None
        self.answer: asyncio.Future[tuple[str, Any] | None] = (
            asyncio.get_running_loop().create_future()
        )


class Parking:
    """The waits of one run."""

    def __init__(
        self,
        host: Host,
        lineage: Lineage,
        clock: Clock,
        *,
        mail: list[Message],
        linger: timedelta | None,
    ) -> None:
        self._host = host
        self._lineage = lineage
        self._clock = clock
        self._mail = mail
        self._handed_out: set[str] = set()
        self._linger = linger
        self._poll = POLL
        self._parked: dict[str, _Parked] = {}
        self._persisted: frozenset[str] = frozenset()
        self._change: asyncio.Future[None] | None = None
        self._stale = False
        self._warden: asyncio.Task[None] | None = None

    async def wait(self, wait: PendingWait) -> tuple[str, Any] | None:
        """Wait for the time or the event; an event gives its message's id and payload."""
        parked = _Parked(self._lineage.carrier(), wait)
        if self._settle(parked):
            return parked.answer.result()
        return await self._park(wait["id"], parked)

    async def halt(self, id: str) -> None:
        """Stop this branch here until the run was put to rest and resumed."""
        await self._park(id, _Parked(self._lineage.carrier(), {"id": id, "kind": "event"}))

    async def _park(self, id: str, parked: _Parked) -> tuple[str, Any] | None:
        self._parked[id] = parked
        parked.branch.parked = True
        # A step whose own function waits here does nothing else meanwhile.
        inside_step = CURRENT.get() is not None
        self._lineage.busy -= inside_step
        self.changed()
        if self._warden is None:
            # No branch of the run: created past the loop's task factory.
            self._warden = asyncio.Task(self._watch(), loop=asyncio.get_running_loop())
        try:
            return await parked.answer
        except asyncio.CancelledError:
            if parked.message is not None:
                # The wait was given up in the very moment its message came: it is for the next.
                self._handed_out.discard(parked.message.id)
                self._mail.insert(0, parked.message)
            raise
        finally:
            self._lineage.busy += inside_step
            parked.branch.parked = False
            del self._parked[id]

    def changed(self) -> None:
        """Look again, since a branch parked, a step ended, or mail may have come."""
        self._poll = POLL
        self._stale = True
        if self._change is not None and not self._change.done():
            self._change.set_result(None)

    async def close(self) -> None:
        """Stop watching."""
        if (warden := self._warden) is not None:
            warden.cancel()
            await asyncio.wait([warden])

    async def _watch(self) -> None:
        try:
            await self._tend()
        except Exception as error:  # noqa: BLE001  # told to the run, which cannot go on
            self._host.stop(error)
        finally:
            self._warden = None

    async def _tend(self) -> None:
        while self._parked:
            self._stale = False
            await self._let_others_run()
            if self._rests():
                self._host.suspend([parked.wait for parked in self._parked.values()])
                return
            await self._persist()
            await self._nap()
            if any(parked.wait["kind"] == "event" for parked in self._parked.values()):
                await self._read_mail()
            for parked in list(self._parked.values()):
                self._settle(parked)

    async def _read_mail(self) -> None:
        try:
            mail = await self._host.fetch_mail()
        except StoreUnavailable as error:
            logger.warning("mail cannot be read (%s); looking again", error)
            return
        self._mail = [message for message in mail if message.id not in self._handed_out]

    async def _let_others_run(self) -> None:
        for _ in range(_TURNS):
            tasks = self._lineage.tasks.items()
            if not any(about_to_run(task) for task, branch in tasks if not branch.parked):
                return
            await self._clock.sleep(0)

    def _rests(self) -> bool:
        if self._linger is None or not self._parked:
            return False
        if any(parked.answer.done() for parked in self._parked.values()):
            return False
        wake_at = self._next_wake()
        if wake_at is not None and wake_at - self._clock.now() <= self._linger:
            return False
        tasks = self._lineage.tasks
        return not self._lineage.busy and all(
            branch.parked or awaits_branches(task, tasks)
            for task, branch in tasks.items()
            if not task.done()
        )

    def _next_wake(self) -> datetime | None:
        times = [parked.wake_at for parked in self._parked.values() if parked.wake_at is not None]
        return min(times, default=None)

    async def _persist(self) -> None:
        # A crash may make a short wait longer by itself, and nothing is lost by it; a long one
        # keeps its deadline.
        horizon = self._clock.now() + (self._linger or POLL)
        long = frozenset(
            id for id, p in self._parked.items() if p.wake_at is not None and p.wake_at > horizon
        )
        if not long <= self._persisted:
            await self._host.persist_waits()
            self._persisted = long

    async def _nap(self) -> None:
        if self._stale:
            # Something changed while the waits were being stored.
            return
        wake_at = self._next_wake()
        pause = self._poll if wake_at is None else min(wake_at - self._clock.now(), self._poll)
        self._poll = min(self._poll * 2, SLOWEST_POLL)
        loop = asyncio.get_running_loop()
        self._change = loop.create_future()
        timer = asyncio.Task(_sleep(self._clock, pause), loop=loop)
        try:
            await asyncio.wait([self._change, timer], return_when=asyncio.FIRST_COMPLETED)
        finally:
            timer.cancel()
            self._change = None

    def _settle(self, parked: _Parked) -> bool:
        if parked.answer.done():
            return True
        name = parked.wait.get("event")
        for index, message in enumerate(self._mail):
            if message.name == name:
                del self._mail[index]
                self._handed_out.add(message.id)
                parked.message = message
                parked.answer.set_result((message.id, codec.decode(codec.loads(message.payload))))
                return True
        if parked.wake_at is not None and parked.wake_at <= self._clock.now():
            parked.answer.set_result(None)
            return True
        return False


async def _sleep(clock: Clock, pause: timedelta) -> None:
    await clock.sleep(max(pause, timedelta(0)))
