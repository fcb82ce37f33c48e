"""What middleware sees of a run, of a step, of a worker and of a signal."""

from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, Protocol

import msgspec

from perdure.clock import Clock, parse_iso
from perdure.engine.call import StepCall
from perdure.engine.history import History
from perdure.engine.user_metadata import USER, check_metadata, user_metadata
from perdure.snapshot import created_at_of, generation_of, version_of


class ObservedRun(Protocol):
    """What middleware can see of the execution of a run."""

    @property
    def run_id(self) -> str: ...
    @property
    def workflow(self) -> str: ...
    @property
    def payload(self) -> Any: ...
    @property
    def history(self) -> History: ...
    @property
    def clock(self) -> Clock: ...
    @property
    def replayed(self) -> int: ...
    @property
    def stopped_by(self) -> BaseException | None: ...


class Activation(msgspec.Struct, frozen=True):
    """How this process got to execute a run: see `RunContext`."""

    epoch: int = 0
    takeovers: int = 0
    due_at: datetime | None = None


class RunContext:
    """One activation of a run: from its lease until it ends or is suspended.

    `epoch` is the fencing token of the lease, `takeovers` is how many owners in a row lost the run
    without progress. `due_at` is when the run became due, if that is known.
    """

    __slots__ = ("_run", "due_at", "epoch", "takeovers")

    def __init__(self, run: ObservedRun, activation: Activation) -> None:
        self._run = run
        self.epoch = activation.epoch
        self.takeovers = activation.takeovers
        self.due_at = activation.due_at

    @property
    def run_id(self) -> str:
        """The run's id."""
        return self._run.run_id

    @property
    def workflow(self) -> str:
        """The name of the run's workflow."""
        return self._run.workflow

    @property
    def version(self) -> int:
        """The version of the workflow that executes the run."""
        return version_of(self._run.history.metadata)

    @property
    def generation(self) -> int:
        """The generation of the run, from 1."""
        return generation_of(self._run.history.metadata)

    @property
    def payload(self) -> Any:
        """The payload with which the run was triggered."""
        return self._run.payload

    @property
    def metadata(self) -> Mapping[str, Any]:
        """The metadata that the run was triggered with; see `update_metadata`."""
        return user_metadata(self._run.history.metadata)

    @property
    def created_at(self) -> datetime | None:
        """When the run was triggered or last restarted; `None` if that is not stored."""
        timestamp = created_at_of(self._run.history.metadata)
        return parse_iso(timestamp) if timestamp else None

    @property
    def now(self) -> datetime:
        """The current time, by the clock of the run."""
        return self._run.clock.now()

    @property
    def is_first(self) -> bool:
        """Whether nothing of the run was recorded before this activation."""
        return self._run.replayed == 0 and not len(self._run.history)

    @property
    def replayed(self) -> int:
        """How many calls were answered from their records so far."""
        return self._run.replayed

    @property
    def interrupted_by(self) -> BaseException | None:
        """Why the function was stopped before its end, or `None` if it ended normally.

        This is `Suspended`, `Cancelled`, `ContinuedAsNew`, `LeaseLost` or an error of the store.
        """
        return self._run.stopped_by

    def update_metadata(self, **values: Any) -> None:
        """Change metadata of the run; the change is stored with its next write."""
        self._run.history.set_metadata(USER, check_metadata({**self.metadata, **values}))


class StepContext:
    """A step that is executed in this activation; `key` is the key of its record."""

    __slots__ = ("_call", "run")

    def __init__(self, run: RunContext, call: StepCall) -> None:
        self.run = run
        self._call = call

    @property
    def id(self) -> str:
        """The id in the call."""
        return self._call.id

    @property
    def key(self) -> str:
        """The key of the step's record."""
        return self._call.record_key

    @property
    def kind(self) -> str:
        """`step` or `transaction`."""
        return self._call.kind

    @property
    def branch(self) -> str:
        """The path of the branch that called the step, or "" for the function itself."""
        return self._call.path

    @property
    def args(self) -> tuple[Any, ...]:
        """The arguments of the step's function."""
        return self._call.args

    @property
    def attempt(self) -> int:
        """The number of the attempt, from 1."""
        return self._call.attempt


class WorkerContext(Protocol):
    """A worker, as middleware sees it."""

    @property
    def id(self) -> str:
        """The worker's name."""
        ...

    @property
    def concurrency(self) -> int:
        """How many runs it executes at once."""
        ...

    @property
    def running(self) -> int:
        """How many runs it is executing."""
        ...

    @property
    def clock(self) -> Clock:
        """The clock of its runtime."""
        ...

    async def stats(self) -> Any:
        """Return the `perdure.store.Stats` of the store; `None` if the store cannot count."""
        ...

    def observe_appends(self, callback: Callable[[float], None], /) -> None:
        """Call `callback` with the duration in seconds of each write of step records."""
        ...


class SentSignal(Protocol):
    """An event that is sent to a run."""

    @property
    def run_id(self) -> str: ...
    @property
    def event(self) -> str: ...
