"""The interface through which a run's records become durable, and its waits are performed."""

from collections.abc import Awaitable, Callable, Coroutine, Mapping
from datetime import datetime, timedelta
from typing import Any, NamedTuple, Protocol

from perdure.engine.call import StepCall
from perdure.engine.records import EncodedRecord
from perdure.limits import Cost
from perdure.snapshot import PendingWait

NO_STORE = "a Workflow in this process"
"""Named in errors of runs that have no store, and therefore no host."""


class Received(NamedTuple):
    """A message that a wait received."""

    message_id: str
    payload: Any
    sent_at: datetime


class Undos(NamedTuple):
    """What a replay found: the calls of steps that can be undone, by the keys of their records.

    `stopped_by` is the error that ended the replay early, if there was one.
    """

    calls: Mapping[str, StepCall]
    stopped_by: Exception | None


class Host(Protocol):
    """The interface through which a run's records become durable, and its waits are performed."""

    always_replay: bool
    suspend_after: timedelta
    """Longer waits are durable: the run may leave memory."""

    def record(self, call: StepCall, record: EncodedRecord, /) -> Coroutine[Any, Any, None]:
        """Make the record durable; an exception stops the run.

        A cancellation is raised as `Interrupted` after the write has ended.
        """
        ...

    async def persist(self) -> None:
        """Make open waits and the outbox durable; the items in the outbox are then delivered.

        A cancellation is raised as `Interrupted` after the write has ended.
        """
        ...

    async def read_log(self, run_id: str) -> list[tuple[str, Any]]:
        """Return the names and payloads of the messages of a log, a run that is never leased."""
        ...

    async def wait(self, wait: PendingWait) -> Received | None:
        """Wait for a time or an event; return the message, if one came."""
        ...

    async def conclude(self, wait: PendingWait, outcome: Mapping[str, Any]) -> Received:
        """Answer a wait on behalf of the run, unless it was already answered; return the answer.

        A cancellation is raised as `Interrupted` after the message was sent and read. If another
        owner has recorded the answer, `LeaseLost` is raised.
        """
        ...

    async def permit(self, cost: Cost, /) -> Callable[[], None]:
        """Wait until a limit permits an attempt; return a function that releases the permit.

        If the permit is lost, the host stops the run.
        """
        ...

    def give_back(self, key: str) -> None:
        """Make the event of an unclaimed record available to waits."""
        ...

    async def transact(
        self, call: StepCall, work: Callable[[Any], Awaitable[EncodedRecord]], /
    ) -> EncodedRecord:
        """Call `work` with the store's connection; its record is committed with its writes."""
        ...

    def report(self, report: Mapping[str, Any], /) -> None:
        """Set the report of a run from inside a step, in any thread, and publish it at once."""
        ...

    async def halt(self, key: str) -> None:
        """Stop the calling branch until the run has been suspended and resumed."""
        ...

    async def learn_undos(self) -> Undos:
        """Replay the function, once, and return how its steps are undone."""
        ...
