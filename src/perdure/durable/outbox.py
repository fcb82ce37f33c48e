"""Actions of a run on other runs: starting them, sending them messages, cancelling them.

The order of writes makes every crash harmless. An item is first part of a fenced write of its own
run. Then it is delivered, repeatedly if necessary: a start takes effect once because of the id of
the new run, a message because of its deduplication id. The next write of the run records that the
item was delivered. So a process that has lost its lease sends nothing new, and the next owner of a
run delivers what the previous one left.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeAlias

from perdure import codec
from perdure.clock import isoformat, parse_iso
from perdure.durable.session import Session, wake_workers
from perdure.engine.history import History
from perdure.engine.tasks import Task, detached
from perdure.snapshot import OutboxItem, Snapshot, workflow_of
from perdure.store import NewMessage, NewRun, Receipt, header_of

Deliver: TypeAlias = Callable[[OutboxItem], Awaitable[None]]


class Outbox:
    """The deliveries of one run. The first failure stops the run, through `on_failure`."""

    __slots__ = ("_deliver", "_deliveries", "_failure", "_history", "_on_failure", "_starts")

    def __init__(
        self,
        history: History,
        deliver: Callable[[OutboxItem], Awaitable[None]],
        on_failure: Callable[[Exception], object],
    ) -> None:
        self._history = history
        self._deliver = deliver
        self._on_failure = on_failure
        self._deliveries: dict[str, Task] = {}
        self._starts: list[Task] = []
        self._failure: Exception | None = None

    def deliver(self, items: Mapping[str, OutboxItem | None]) -> None:
        """Begin to deliver items that are durable."""
        new = [(name, item) for name, item in items.items() if item is not None]
        for name, item in sorted(new, key=lambda each: _is_about_a_run(each[1])):
            if name in self._deliveries:
                continue
            # A run must exist before it can be cancelled or asked to report its end, so these come
            # second.
            is_second = _is_about_a_run(item)
            starts = tuple(self._starts) if is_second else ()
            task = self._deliveries[name] = detached(self._deliver_one(name, item, starts))
            if not is_second:
                self._starts = [*(each for each in self._starts if not each.done()), task]

    async def drain(self) -> None:
        """Wait until everything durable is delivered; raise the error of a failed delivery.

        A run must not leave memory earlier: no process would deliver the rest.
        """
        while self._deliveries:
            await asyncio.wait(tuple(self._deliveries.values()))
        if self._failure is not None:
            raise self._failure

    async def _deliver_one(self, name: str, item: OutboxItem, starts: Sequence[Task]) -> None:
        try:
            if starts:
                await asyncio.wait(starts)
            await self._deliver(item)
            # The next write of the run records the removal. If the process dies first, the next
            # owner delivers the item again, which has no effect.
            self._history.outbox.remove(name)
        except Exception as error:  # noqa: BLE001  # the run cannot continue, and raises it
            # The item stays in the outbox, so that the next owner delivers it.
            self._failure = self._failure or error
            self._on_failure(error)
        finally:
            del self._deliveries[name]


def _is_about_a_run(item: OutboxItem) -> bool:
    """Return whether an item concerns a run that another item may have to start first."""
    return "cancel" in item or "watch" in item


async def start_runs(session: Session, runs: Sequence[NewRun]) -> list[bool]:
    """Create runs for workers; return `False` for each that already existed."""
    answers = await asyncio.gather(*map(session.committer.enqueue, runs))
    wake_workers(session.store)
    return answers


async def send_messages(session: Session, messages: Sequence[NewMessage]) -> list[Receipt]:
    """Send messages; workers continue the runs that they make due."""
    return await asyncio.gather(*map(session.committer.send, messages))


def encode_run(run: NewRun) -> dict[str, Any]:
    """Encode a new run for an outbox item."""
    facts: dict[str, Any] = {"id": run.id, "snapshot": codec.loads(run.snapshot)}
    if run.queue:
        facts["queue"] = run.queue
    if run.head_start:
        facts["headStart"] = run.head_start.total_seconds()
    if run.wake_at is not None:
        facts["wakeAt"] = isoformat(run.wake_at)
    return facts


def decode_run(facts: Mapping[str, Any]) -> NewRun:
    """Decode the new run of an outbox item."""
    snapshot: Snapshot = facts["snapshot"]
    wake_at = facts.get("wakeAt")
    return NewRun(
        facts["id"],
        workflow_of(snapshot) or "",
        codec.dumps(snapshot),
        wake_at=None if wake_at is None else parse_iso(wake_at),
        head_start=timedelta(seconds=facts.get("headStart", 0)),
        queue=facts.get("queue", ""),
        **header_of(snapshot),
    )
