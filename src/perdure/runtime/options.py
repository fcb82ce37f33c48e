"""The options of `trigger`, checked before anything is written."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from random import Random
from typing import Any, Literal, TypeAlias, TypedDict, get_args

from perdure import codec
from perdure.clock import Duration, add_duration, as_utc, isoformat
from perdure.engine.user_metadata import USER, check_metadata
from perdure.errors import InvalidArgument, RunConflict
from perdure.runtime.deadlines import deadline_metadata
from perdure.runtime.definition import Definition
from perdure.runtime.priorities import check_priority, head_start
from perdure.snapshot import (
    UNCHECKED,
    ExecutionBlock,
    Snapshot,
    check_tags,
    is_over,
    new_seed,
    new_snapshot,
    rest_status,
    workflow_of,
)
from perdure.store import NewRun, header_of

IfExists: TypeAlias = Literal["return", "error", "restart_if_over"]


class StartOptions(TypedDict, total=False):
    """The options that all runs of one call share."""

    at: datetime | None
    delay: Duration | None
    priority: int | None
    tags: Mapping[str, str] | None
    deadline: Duration | datetime | None
    metadata: Mapping[str, Any] | None
    if_exists: IfExists | None


class TriggerOptions(StartOptions, total=False):
    """The options of one run."""

    run_id: str | None


class ClientOptions(TriggerOptions, total=False):
    """The options of a client that can take part in the caller's transaction."""

    connection: Any


@dataclass(frozen=True, slots=True)
class Plan:
    """When runs start and what is stored with them. Without `wake_at` they are due at once.

    The default `priority` is that of the workflow. With `any_payload`, an existing run may have
    another payload.
    """

    wake_at: datetime | None = None
    priority: int | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    if_exists: IfExists | None = None
    any_payload: bool = False


@dataclass(frozen=True, slots=True)
class Start:
    """A run to be started, and what to do if its id is taken."""

    run_id: str
    snapshot: Snapshot
    plan: Plan
    queue: str = ""
    head_start: timedelta = timedelta(0)

    @property
    def workflow(self) -> str:
        """The name of the run's workflow."""
        return workflow_of(self.snapshot) or ""

    @property
    def metadata(self) -> dict[str, Any]:
        """The metadata of the new run."""
        return self.snapshot.get("metadata") or {}

    def is_start_of(self, snapshot: Snapshot) -> bool:
        """Return whether this start created the stored run.

        The reply to a write can be lost, and the repeated write then finds its own run. No other
        start has the same seed.
        """
        return bool((snapshot.get("metadata") or {}).get("seed") == self.metadata["seed"])

    def restarts(self, snapshot: Snapshot) -> bool:
        """Return whether to restart the stored run; raise `RunConflict` if the workflow differs."""
        is_restart = self.plan.if_exists == "restart_if_over" and is_over(rest_status(snapshot))
        if is_restart:
            self.check_workflow(snapshot)
        return is_restart

    def new_run(self) -> NewRun:
        """Return the run as a store creates it for a worker."""
        block: ExecutionBlock = {**self.snapshot["execution"], "state": "queued"}
        if self.plan.wake_at is not None:
            block["dueAt"] = isoformat(self.plan.wake_at)
        snapshot: Snapshot = {**self.snapshot, "execution": block}
        return NewRun(
            self.run_id,
            self.workflow,
            codec.dumps(snapshot),
            wake_at=self.plan.wake_at,
            head_start=self.head_start,
            queue=self.queue,
            **header_of(snapshot),
        )

    def check_conflict(self, snapshot: Snapshot) -> None:
        """Raise `RunConflict` unless the stored run may be returned instead of a new one."""
        reason = self._conflict(snapshot)
        if reason:
            raise RunConflict(self.run_id, workflow_of(snapshot), reason)

    def check_workflow(self, snapshot: Snapshot) -> None:
        """Raise `RunConflict` if the stored run belongs to another workflow."""
        workflow = workflow_of(snapshot)
        if workflow != self.workflow:
            raise RunConflict(self.run_id, workflow, payload_conflict(self.snapshot, snapshot))

    def _conflict(self, snapshot: Snapshot) -> str:
        if self.plan.if_exists == "error":
            return 'if_exists="error" was passed'
        self.check_workflow(snapshot)
        if self.plan.if_exists == "return" or self.plan.any_payload:
            return ""
        return payload_conflict(self.snapshot, snapshot)


def new_start(
    workflow: Definition[Any, Any] | str,
    data: Any,
    run_id: str,
    plan: Plan,
    now: datetime,
    random: Random,
) -> Start:
    """Return the start of a run with the payload `data` (JSON).

    If the workflow is passed by name, the first owner binds the run to a definition.
    """
    metadata: dict[str, Any] = {"createdAt": isoformat(now), "seed": new_seed(random)}
    priority, queue = plan.priority, ""
    if isinstance(workflow, str):
        metadata[UNCHECKED] = True
    else:
        metadata.update(workflow.identity)
        queue = workflow.queue_for(data)
        if priority is None and plan.wake_at is None:
            priority = workflow.priority
        workflow = workflow.name
    metadata.update(plan.metadata)
    if data is not None:
        metadata["input"] = data
    snapshot = new_snapshot(workflow, now=now, metadata=metadata)
    return Start(run_id, snapshot, plan, queue, head_start(priority or 0))


def payload_conflict(new: Snapshot, snapshot: Snapshot) -> str:
    """Return how a new run differs from the stored run with its id, in workflow or payload."""
    workflow, new_workflow = workflow_of(snapshot), workflow_of(new)
    if workflow != new_workflow:
        return f"it belongs to workflow {workflow!r}, not {new_workflow!r}"
    metadata = snapshot.get("metadata") or {}
    stored_payload = metadata.get("firstInput", metadata.get("input"))
    new_payload = codec.loads(codec.dumps((new.get("metadata") or {}).get("input")))
    return (
        ""
        if stored_payload == new_payload
        else f"its payload is {_short(stored_payload)}, not {_short(new_payload)}"
    )


def check_options(
    now: datetime,
    *,
    at: datetime | None = None,
    delay: Duration | None = None,
    priority: int | None = None,
    tags: Mapping[str, str] | None = None,
    deadline: Duration | datetime | None = None,
    metadata: Mapping[str, Any] | None = None,
    if_exists: IfExists | None = None,
) -> Plan:
    """Return the plan that these options describe, or raise `InvalidArgument`."""
    wake_at = _wake_at(now, at, delay)
    if priority is not None:
        _check_priority(priority, at, delay)
    if if_exists is not None and if_exists not in get_args(IfExists):
        expected = " or ".join(map(repr, get_args(IfExists)))
        raise InvalidArgument("if_exists", if_exists, expected)
    stored_metadata: dict[str, Any] = {}
    if tags:
        stored_metadata["tags"] = check_tags(tags)
    if metadata is not None:
        stored_metadata[USER] = check_metadata(metadata)
    stored_metadata.update(deadline_metadata(deadline))
    return Plan(wake_at, priority, stored_metadata, if_exists)


def _wake_at(now: datetime, at: datetime | None, delay: Duration | None) -> datetime | None:
    if at is not None and delay is not None:
        raise InvalidArgument("delay", delay, "no delay beside at=", "Pass one of the two")
    if delay is not None:
        at = add_duration(now, delay, "delay")
    wake_at = None if at is None else as_utc(at, "at")
    # A time in the past must not put the run ahead of others that are due.
    return None if wake_at is not None and wake_at <= now else wake_at


def _check_priority(priority: int, at: object, delay: object) -> None:
    if check_priority(priority) and (at is not None or delay is not None):
        hint = "A priority orders runs that are due at once"
        raise InvalidArgument("priority", priority, "0 beside at= or delay=", hint)


def _short(payload: object) -> str:
    text = repr(payload)
    return text if len(text) <= 60 else text[:57] + "..."
