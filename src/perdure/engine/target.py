"""The workflows that a run can start, as the engine sees them."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, Generic, Literal, Protocol, TypeAlias, TypeVar

import msgspec

from perdure import codec
from perdure.clock import Duration
from perdure.snapshot import OutboxItem

P_contra = TypeVar("P_contra", contravariant=True)
T_co = TypeVar("T_co", covariant=True)

OnParentEnd: TypeAlias = Literal["cancel", "abandon"]


class Target(Generic[P_contra, T_co]):
    """A workflow with a name, the type `P_contra` of its payload and `T_co` of its output."""

    name: str
    fn: Callable[..., Awaitable[Any]]
    types: codec.DeclaredTypes


class ChildOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How to start a child run; unset options have the defaults of any new run.

    `inherit` names tags of the parent that the child inherits. `facts` are metadata of the engine.
    """

    run_id: str | None = None
    at: datetime | None = None
    delay: Duration | None = None
    priority: int | None = None
    tags: Mapping[str, str] | None = None
    inherit: Sequence[str] = ()
    deadline: Duration | datetime | None = None
    on_parent_end: OnParentEnd = "cancel"
    facts: Mapping[str, Any] = {}


class ChildRuns(Protocol):
    """Creates the child runs of one run."""

    def target(self, workflow: object) -> Target[Any, Any]:
        """Return the workflow; raise if it is not a workflow, or if its name is unknown."""
        ...

    def find(self, name: str) -> Target[Any, Any] | None:
        """Return the workflow with this name, or `None` if it is unknown."""
        ...

    def child_id(self, call: str, options: ChildOptions) -> str:
        """Return the id of the run that this call starts."""
        ...

    def encode(self, target: Target[Any, Any], payload: object) -> Any:
        """Return a payload as JSON; raise if it does not fit."""
        ...

    def base_id(self, call: str) -> str:
        """Return the prefix of the ids of the runs that a call of `map_runs` starts."""
        ...

    def new_runs(
        self,
        target: Target[Any, Any],
        payloads: Sequence[Any],
        base: str,
        first: int,
        call: str,
        options: ChildOptions,
        full: Mapping[str, Any],
    ) -> OutboxItem:
        """Return the outbox item for the runs from `base/first` on, which report to a log.

        `full` is the message that the last of them sends to this run.
        """
        ...

    def answer(self, key: str, value: object) -> OutboxItem:
        """Return the outbox item for an answer; raise if the value cannot be stored."""
        ...

    def new_run(
        self,
        target: Target[Any, Any],
        payload: object,
        run_id: str,
        call: str,
        options: ChildOptions,
        reply_to: Mapping[str, Any] | None = None,
    ) -> OutboxItem:
        """Return the outbox item for a run to start."""
        ...

    async def conflict(self, item: OutboxItem) -> Exception | None:
        """Return an error if another run has the id of the run to start."""
        ...
