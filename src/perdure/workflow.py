"""Run a function over a snapshot in this process, without a store.

wf = Workflow("checkout", {"fetch_user": fetch_user, "create_order": create_order})
result = await wf.run(checkout)
await store.save("checkout-123", wf.snapshot())
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import (
    Any,
    Generic,
    Literal,
    TypeAlias,
    TypedDict,
    TypeVar,
    Unpack,
    cast,
    overload,
)

from perdure import codec
from perdure.cache import CacheLike, as_cache
from perdure.clock import Clock, SystemClock, check_clock, isoformat
from perdure.engine.environment import Environment
from perdure.engine.execution import Execution
from perdure.engine.fingerprint import definition_hash
from perdure.engine.function import Deps, WorkflowFunction, as_deps, body_of, run_function
from perdure.engine.history import History, Include
from perdure.engine.step import Step
from perdure.engine.tasks import outside_runs
from perdure.errors import CodecError, InvalidArgument, SnapshotFormatError, SnapshotMismatch
from perdure.events import Bus, Coalesce, Event, Listener, Mode, StepComplete, check_listener
from perdure.result import Result
from perdure.resume import ResumeState, ResumeStateCollector, as_resume_state, records_of
from perdure.snapshot import ExecutionBlock, Snapshot, assert_valid_snapshot, new_uuid
from perdure.snapshot.patches import is_patch
from perdure.validation import (
    Reaction,
    check_errors,
    check_int,
    check_random,
    check_reaction,
    check_unreserved,
)

logger = logging.getLogger(__name__)

D = TypeVar("D")
T = TypeVar("T")
ResumeSource: TypeAlias = (
    ResumeState | Callable[[], ResumeState | Awaitable[ResumeState | None] | None] | None
)


@dataclass(frozen=True, slots=True)
class SnapshotEvent:
    """An event for subscribers: what happened, and the snapshot at that time."""

    type: Literal["step_complete", "workflow_complete", "workflow_error", "workflow_cancelled"]
    step_id: str | None
    _history: History
    _execution: ExecutionBlock

    @property
    def snapshot(self) -> Snapshot:
        """A copy of the run's snapshot as it was at this event."""
        return cast(Snapshot, codec.loads(self._history.encode(self._execution)))


def react(
    reaction: Reaction, kind: Literal["unknown_steps", "definition_hash"], message: str
) -> None:
    """Ignore, warn, or raise `SnapshotMismatch`."""
    if reaction == "error":
        raise SnapshotMismatch(kind, message)
    if reaction == "warn":
        logger.warning(message)


class Options(TypedDict, total=False):
    """The options of `Workflow`, at construction or per run."""

    snapshot: Snapshot | None
    resume_state: ResumeSource
    cache: CacheLike | None
    on_event: Listener | None
    errors: Sequence[type[BaseException]]
    types: Sequence[type]
    on_unknown_steps: Reaction
    on_definition_change: Reaction
    clock: Clock
    random: Random


class Workflow(Generic[D]):
    """Runs functions over a snapshot in this process; the caller decides when to save it.

    Options are passed here or per run; options of the run win. `snapshot` and `resume_state`
    contain finished steps; `cache` is consulted for steps with an explicit key, across runs.
    Exceptions of the classes in `errors` and values of the classes in `types` are restored even
    where no annotation names their class. `on_unknown_steps` says what to do if a completed run
    never used some recorded steps, `on_definition_change` if the function changed since the
    snapshot was made: `"warn"`, `"error"` or `"ignore"`.
    """

    @overload
    def __init__(self: "Workflow[Deps]", name: str, /, **options: Unpack[Options]) -> None: ...
    @overload
    def __init__(
        self: "Workflow[Deps]", name: str, deps: Mapping[str, Any], /, **options: Unpack[Options]
    ) -> None: ...
    @overload
    def __init__(self, name: str, deps: D, /, **options: Unpack[Options]) -> None: ...
    def __init__(self, name: str, deps: Any = None, /, **options: Unpack[Options]) -> None:
        if not isinstance(name, str) or not name:
            raise InvalidArgument("name", name, "the workflow's name, a non-empty string")
        self.name = check_unreserved(name, "name")
        self._deps = as_deps({} if deps is None else deps)
        self._options = check_options(options)
        self._events = Bus()
        self._snapshots = Bus()
        self._run = self._prepare(self._options)

    @property
    def deps(self) -> D:
        """The dependencies passed to the function."""
        return cast(D, self._deps)

    async def run(
        self, fn: "WorkflowFunction[T, D]", /, *, deps: Any = None, **options: Unpack[Options]
    ) -> Result[T, Any]:
        """Run the function; return `Ok(value)`, or `Err(error, cause)` if it failed.

        Failures of the function are returned; only a cancellation of the task is raised. The option
        `deps` replaces the workflow's dependencies for this run.
        """
        run_options = _check_sources({**self._options, **check_options(options)})
        chosen_deps = self._deps if deps is None else as_deps(deps)
        body = body_of(fn, chosen_deps)
        run = self._run = self._prepare(run_options, chosen_deps)
        run.bind(fn)
        await run.load(run_options.get("resume_state"))
        return await run.run_function(body)

    async def run_with_state(
        self, fn: "WorkflowFunction[T, D]", /, *, deps: Any = None, **options: Unpack[Options]
    ) -> tuple[Result[T, Any], ResumeState]:
        """Run the function; return its result together with the state to resume from."""
        collector = ResumeStateCollector()
        stop = self._events.subscribe(collector.handle_event)
        try:
            result = await self.run(fn, deps=deps, **options)
        finally:
            stop()
        return result, collector.resume_state()

    def snapshot(
        self,
        *,
        include: Include = "all",
        metadata: Mapping[str, Any] | None = None,
        limit: int | None = None,
        since: str | None = None,
    ) -> Snapshot:
        """Return the state of the latest run as plain JSON: a copy that the caller may change.

        `include` selects all, completed or failed steps, `since` those after a step, and `limit` at
        most that many of them. `metadata` replaces the metadata of the previous snapshot, except
        for the definition's hash and the run's id, generation and seed.
        """
        if include not in ("all", "completed", "failed"):
            raise InvalidArgument("include", include, "'all', 'completed' or 'failed'")
        if limit is not None:
            check_int(limit, "limit", minimum=0)
        if since is not None and not isinstance(since, str):
            raise InvalidArgument("since", since, "the key of a recorded step")
        new_metadata = None if metadata is None else encode_metadata(metadata)
        return self._run.snapshot(include=include, metadata=new_metadata, limit=limit, since=since)

    def subscribe(
        self, listener: Listener, *, mode: Mode = "sync", coalesce: Coalesce = "none"
    ) -> Callable[[], None]:
        """Call `listener` after each step and at the end of a run; return an unsubscribe function.

        `mode="sync"` calls it at once, `"async"` in the background, one event at a time. In the
        background, `coalesce="latest"` skips to the newest event, but never skips the last event of
        a run.
        """
        check_listener(listener, "listener")
        if mode not in ("sync", "async"):
            raise InvalidArgument("mode", mode, "'sync' or 'async'")
        if coalesce not in ("none", "latest"):
            raise InvalidArgument("coalesce", coalesce, "'none' or 'latest'")
        if coalesce == "latest" and mode == "sync":
            raise InvalidArgument(
                "coalesce", coalesce, "'none', since mode='sync' leaves nothing out"
            )
        return self._snapshots.subscribe(listener, mode=mode, coalesce=coalesce)

    async def flush(self) -> None:
        """Wait until async listeners have handled all events so far."""
        await self._events.flush()
        await self._snapshots.flush()

    def _prepare(self, options: Options, deps: object = None) -> "LocalRun":
        return LocalRun(self.name, options, deps, self._events, self._snapshots)


_OWN_METADATA = ("definitionHash", "generation", "seed", "workflowId")
_ENGINE_METADATA = ("generation", "seed")


class LocalRun:
    """One run of a `Workflow`: its history and its status."""

    def __init__(
        self, name: str, options: Options, deps: object, events: Bus, snapshots: Bus
    ) -> None:
        self._options = options
        self._events = events
        self._snapshots = snapshots
        self._on_event = options.get("on_event")
        self._clock = options.get("clock", SystemClock())
        snapshot = options.get("snapshot")
        self._history = History(name, snapshot)
        self._block: ExecutionBlock = (
            {"status": "running", "lastUpdated": isoformat(self._clock.now())}
            if snapshot is None
            else snapshot["execution"]
        )
        cache = options.get("cache")
        listens = bool(events) or bool(snapshots) or self._on_event is not None
        random = options.get("random", Random())
        run_id = self._history.metadata.get("workflowId")
        self._execution = Execution(
            workflow=name,
            run_id=run_id or f"{name}:{new_uuid(random)}",
            history=self._history,
            clock=self._clock,
            random=random,
            environment=Environment(deps=deps),
            emit=self._emit if listens else None,
        )
        if cache is not None:
            self._execution.cache = as_cache(cache, clock=self._clock)

    def bind(self, fn: Callable[..., Any]) -> None:
        """Compare the function with the one that made the snapshot, and record its hash."""
        self._execution.errors = codec.ErrorScope(tuple(self._options.get("errors", ())), (fn,))
        self._execution.types = codec.DeclaredTypes(self._options.get("types", ()), fn)
        metadata, now = self._history.metadata, definition_hash(fn)
        old = metadata.get("definitionHash")
        if old is not None and old != now:
            react(
                self._options.get("on_definition_change", "warn"),
                "definition_hash",
                f"workflow {self._history.name!r}: the snapshot was made by another definition of "
                f"the function (hash {old}, now {now}); recorded steps answer as they did then",
            )
        metadata["definitionHash"] = now
        metadata["workflowId"] = self._execution.run_id

    async def load(self, source: ResumeSource) -> None:
        """Load the steps of a resume state, calling its factory once."""
        state = source() if callable(source) else source
        if isinstance(state, Awaitable):
            state = await state
        state = as_resume_state(state)
        if state is not None:
            self._history.load(records_of(state))

    async def run_function(self, body: Callable[[Step], Awaitable[Any]]) -> Result[Any, Any]:
        """Run the function to its end, and notify subscribers."""
        self._note("running")
        try:
            result = await run_function(self._execution, body)
        except asyncio.CancelledError:
            self._publish("workflow_cancelled")
            raise
        self._note("completed" if result.ok else "failed", has_ended=True)
        self._publish("workflow_complete" if result.ok else "workflow_error")
        if result.ok and (unknown := self._history.unused_keys()):
            react(
                self._options.get("on_unknown_steps", "warn"),
                "unknown_steps",
                f"workflow {self._history.name!r} completed without using {len(unknown)} "
                f"recorded steps: {', '.join(unknown[:10])}",
            )
        return result

    def snapshot(self, *, metadata: Mapping[str, Any] | None, **choice: Any) -> Snapshot:
        """Return the run's state as new plain JSON."""
        if metadata is not None:
            current = self._history.metadata
            own = {
                name: current[name] for name in current if name in _OWN_METADATA or is_patch(name)
            }
            metadata = {**own, **metadata}
        block = self._current_block()
        return cast(Snapshot, codec.loads(self._history.encode(block, metadata=metadata, **choice)))

    def _note(
        self, status: Literal["running", "completed", "failed"], has_ended: bool = False
    ) -> None:
        now = isoformat(self._clock.now())
        self._block = {"status": status, "lastUpdated": now}
        if has_ended:
            self._block["completedAt"] = now

    def _current_block(self) -> ExecutionBlock:
        if self._block["status"] != "running":
            return self._block
        block = self._block.copy()
        if self._history.last_key is not None:
            block["currentStepId"] = self._history.last_key
        if self._history.waits:
            block["pending"] = list(self._history.waits.values())
        return block

    def _emit(self, event: Event) -> None:
        if isinstance(event, StepComplete):
            self._block["lastUpdated"] = isoformat(event.at)
        if self._on_event is not None:
            self._events.call(self._on_event, event)
        self._events.publish(event)
        if isinstance(event, StepComplete):
            self._publish("step_complete", event.key)

    def _publish(
        self,
        type: Literal["step_complete", "workflow_complete", "workflow_error", "workflow_cancelled"],
        step_id: str | None = None,
    ) -> None:
        if self._snapshots:
            event = SnapshotEvent(type, step_id, self._history.copy(), self._current_block().copy())
            with outside_runs():
                self._snapshots.publish(event, terminal=type != "step_complete")


def encode_metadata(metadata: object) -> dict[str, Any]:
    """Return the user's metadata as JSON; raise if it cannot be encoded."""
    expected = "a mapping of strings to JSON values"
    if not isinstance(metadata, Mapping) or not all(isinstance(name, str) for name in metadata):
        raise InvalidArgument("metadata", metadata, expected)
    for name in metadata:
        if name in _ENGINE_METADATA or is_patch(name):
            hint = "Only the engine sets this name: choose another one"
            raise InvalidArgument("metadata", metadata, f"{expected}, without {name!r}", hint)
    try:
        return cast("dict[str, Any]", codec.encode(dict(metadata)))
    except CodecError as error:
        raise InvalidArgument("metadata", metadata, expected, str(error)) from error


def check_options(options: Options) -> Options:
    """Return the options; raise for the first invalid one."""
    for name, value in options.items():
        if name not in Options.__annotations__:
            names = ", ".join(sorted(Options.__annotations__))
            raise InvalidArgument(name, value, f"one of the options {names}")
    source = options.get("resume_state")
    if source is not None and not callable(source):
        as_resume_state(source)
    if (snapshot := options.get("snapshot")) is not None:
        _check_snapshot(snapshot)
    _check_sources(options)
    for name in ("on_unknown_steps", "on_definition_change"):
        check_reaction(options.get(name, "warn"), name)
    if (listener := options.get("on_event")) is not None:
        check_listener(listener)
    if "clock" in options:
        check_clock(options["clock"])
    if "random" in options:
        check_random(options["random"])
    if (cache := options.get("cache")) is not None:
        as_cache(cache)
    if "errors" in options:
        options["errors"] = check_errors(options["errors"])
    if "types" in options:
        options["types"] = codec.check_types(options["types"])
    return options


def _check_sources(options: Options) -> Options:
    if options.get("snapshot") is not None and (source := options.get("resume_state")) is not None:
        raise InvalidArgument("resume_state", source, "no snapshot= beside it")
    return options


def _check_snapshot(snapshot: object) -> None:
    if isinstance(snapshot, ResumeState):
        raise SnapshotFormatError(
            ["a resume state was given as snapshot=; pass it as resume_state="]
        )
    assert_valid_snapshot(snapshot)
