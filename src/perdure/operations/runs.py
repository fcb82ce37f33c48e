"""Operators' actions on single runs. None of them runs a workflow function; workers do."""

from collections.abc import Iterable, Mapping
from random import Random, SystemRandom
from typing import Any, Self, cast

from msgspec.structs import replace

from perdure.clock import Clock, SystemClock
from perdure.codec.tags import is_plain
from perdure.errors import InvalidArgument, RunNotFound
from perdure.insights.export import read_bundle
from perdure.operations.changes import Changes
from perdure.operations.forks import Fork, forked
from perdure.operations.outcome import KEEP, Keep, Outcome, Preview, compare, records
from perdure.operations.starts import OperatorStarter
from perdure.runtime.acts import copy_acts, new_act, write_act
from perdure.runtime.definition import Definition
from perdure.runtime.requests import Request, Verb
from perdure.snapshot import Snapshot, rest_status
from perdure.store import (
    Store,
    can_search,
)
from perdure.validation import (
    check_event,
    check_flag,
    check_id,
    check_text,
    check_user_id,
    is_encodable,
)

_MAX_NAME, _MAX_WHY = 200, 2000


class RunOperations:
    """Changes single runs on behalf of operators; `Operations` can do more.

    `via` names the operator's tool: "cli", "dashboard" or "python". Payloads for the definitions in
    `workflows` are checked before anything is written; other payloads are checked by the first
    worker. A store opened from a URL is closed by `close` or `async with`.

    Each method takes `by`, the name of the operator, and `why`. It raises `RunNotFound`, or
    `Refused` if it does not apply to the run in its current state.
    """

    def __init__(
        self,
        store: Store | str,
        *,
        via: str = "python",
        workflows: Iterable[Definition[Any, Any]] = (),
        clock: Clock = SystemClock(),
        random: Random | None = None,
    ) -> None:
        self._starter = OperatorStarter(store, workflows=workflows, clock=clock, random=random)
        self.store = self._starter.store
        self.clock = clock
        self.via = via
        self._random = random or SystemRandom()
        self.changes = Changes(self.store, clock, self._random)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def workflow_names(self) -> tuple[str, ...]:
        """The names of the workflows that were passed in."""
        return tuple(self._starter.registry.names)

    async def close(self) -> None:
        """Close the store if it was opened from a URL."""
        await self._starter.close()

    async def start(
        self,
        workflow: str,
        payload: object = None,
        *,
        run_id: str | None = None,
        tags: Mapping[str, str] | None = None,
        by: str,
        why: str = "",
    ) -> Outcome:
        """Create a run for a worker; the payload is JSON."""
        act = self.act("start", by, why)
        run = await self._starter.start(workflow, payload, run_id, tags, act)
        await copy_acts(self.store, run.id, [act])
        return Outcome(run.id, "start", "done", run.status, f"Started {run.id}.")

    async def signal(
        self,
        run_id: str,
        event: str,
        payload: object = None,
        *,
        dedup_id: str | None = None,
        by: str,
        why: str = "",
    ) -> Outcome:
        """Deliver an event to a run, whether or not it waits for it yet; the payload is JSON.

        A `dedup_id` that was used before for this run is refused.
        """
        request = self._request("signal", by, why, check_event(event, "event"), payload)
        if dedup_id is not None:
            request = replace(request, id=f"={check_user_id(dedup_id, 'dedup_id')}")
        return await self.changes.apply(check_id(run_id, "run_id"), request)

    async def cancel(self, run_id: str, *, undo: bool = True, by: str, why: str = "") -> Outcome:
        """Cancel a run. If another process owns it, its current step is cancelled.

        Steps that can be undone are undone first, unless `undo=False`, which also ends a run that
        is being rolled back.
        """
        request = replace(self._request("cancel", by, why), undo=check_flag(undo, "undo"))
        return await self.changes.apply(check_id(run_id, "run_id"), request)

    async def pause(self, run_id: str, *, by: str, why: str = "") -> Outcome:
        """Pause a run: it begins no more steps until it is resumed; steps in flight end first."""
        return await self._apply(run_id, "pause", by, why)

    async def unpause(self, run_id: str, *, by: str, why: str = "") -> Outcome:
        """Let a worker continue a paused run."""
        return await self._apply(run_id, "unpause", by, why)

    async def retry(self, run_id: str, *, by: str, why: str = "") -> Outcome:
        """Let a worker continue a failed run: the steps that ended it run again.

        A failed rollback is continued. A run whose steps were undone continues from the first of
        them.
        """
        return await self._apply(run_id, "retry", by, why)

    async def wake(
        self, run_id: str, wait: str | None = None, *, by: str, why: str = ""
    ) -> Outcome:
        """End a sleep, start the next attempt, or let a wait for an event time out, now.

        `wait` is the id of one wait; without it, all waits of the run end.
        """
        return await self._apply(run_id, "wake", by, why, wait or "")

    async def complete_step(
        self, run_id: str, step: str, value: object, *, by: str, why: str = ""
    ) -> Outcome:
        """Record a value, which is JSON, for a step that failed or has no record yet."""
        return await self._apply(run_id, "complete_step", by, why, _check_key(step), value)

    async def skip_step(self, run_id: str, step: str, *, by: str, why: str = "") -> Outcome:
        """Let a step that failed or has no record yet return `None`."""
        return await self._apply(run_id, "skip_step", by, why, _check_key(step))

    async def fail_step(
        self, run_id: str, step: str, error: object, *, by: str, why: str = ""
    ) -> Outcome:
        """Let a step that failed or has no record yet fail with this error, which is JSON."""
        return await self._apply(run_id, "fail_step", by, why, _check_key(step), error)

    async def retry_step(self, run_id: str, step: str, *, by: str, why: str = "") -> Outcome:
        """Let a worker run a failed step again, even if the function handled the failure."""
        return await self._apply(run_id, "retry_step", by, why, _check_key(step))

    async def rewind(self, run_id: str, at: str, *, by: str, why: str = "") -> Outcome:
        """Drop the record of a step and all later records, and continue from there."""
        return await self._apply(run_id, "rewind", by, why, _check_key(at, "at"))

    async def edit_payload(
        self, run_id: str, payload: object, *, by: str, why: str = ""
    ) -> Outcome:
        """Replace the payload of a run that has no records yet."""
        data = self._starter.check_payload((await self._load(run_id)).get("workflowName"), payload)
        return await self._apply(run_id, "edit_payload", by, why, "", data)

    async def preview(
        self, run_id: str, verb: Verb, step: str | None = None, value: object = None
    ) -> Preview:
        """Return what a verb would do to the records of a run, without writing anything."""
        request = Request("preview", verb, "preview", self.via, "", step or "", value)
        run, before = await self.changes.preview(check_id(run_id, "run_id"), request)
        kept_keys, dropped_keys = compare(run, before)
        sentence = (
            f"{records(len(kept_keys))} kept, {len(dropped_keys)} dropped." if dropped_keys else ""
        )
        return Preview(kept_keys, dropped_keys, dropped_keys, sentence)

    async def fork(
        self,
        run_id: str,
        at: str | None = None,
        *,
        new_id: str | None = None,
        payload: object | Keep = KEEP,
        values: Mapping[str, Any] | None = None,
        version: int | None = None,
        by: str,
        why: str = "",
    ) -> Outcome:
        """Start a new run with the records before `at`, or without records.

        `payload` and `values` (by key) replace those of the original; `version` is another version
        of its workflow. The original is not touched, and keeps its unconsumed events.
        """
        source = await self._load(check_id(run_id, "run_id"))
        if payload is not KEEP:
            payload = self._starter.check_payload(source.get("workflowName"), payload)
        act = self.act("fork", by, why, at or "")
        fork = Fork(at, payload, values or {}, version)
        snapshot, dropped_keys = forked(run_id, source, fork, act, self.clock.now(), by)
        fork_id = new_id or f"{run_id[:400]}~fork-{self.new_id()[:8]}"
        await self._starter.create(fork_id, snapshot)
        await copy_acts(self.store, fork_id, [{**act, "was": f"forked from {run_id}"}])
        kept_count = len(snapshot["steps"])
        sentence = f"Forked as {fork_id}. {records(kept_count)} kept, {len(dropped_keys)} left out."
        return Outcome(fork_id, "fork", "done", "queued", sentence, kept_count, tuple(dropped_keys))

    async def import_run(
        self, bundle: object, *, run_id: str | None = None, by: str, why: str = ""
    ) -> Outcome:
        """Create a run from a bundle of `Insights.export`, as plain JSON.

        A run that is not over is paused: the original may still be executed elsewhere.
        """
        parsed_bundle = read_bundle(bundle)
        act = self.act("import", by, why)
        new_id = run_id or parsed_bundle.run_id
        snapshot = await self._starter.create_imported(parsed_bundle, new_id, act)
        await copy_acts(self.store, new_id, [act])
        redaction_note = " Redacted values are masked in it." if parsed_bundle.redacted else ""
        sentence = f"Imported as {new_id}, {rest_status(snapshot)}.{redaction_note}"
        kept_count = len(snapshot["steps"])
        return Outcome(new_id, "import", "done", rest_status(snapshot), sentence, kept_count)

    async def delete(self, run_id: str, *, by: str, why: str = "") -> Outcome:
        """Delete a run and everything that belongs to it; the act remains."""
        act = self.act("delete", by, why)
        await self.changes.delete(check_id(run_id, "run_id"), act)
        return Outcome(run_id, "delete", "done", None, "Deleted.")

    async def _apply(
        self, run_id: str, verb: Verb, by: str, why: str, step: str = "", value: object = None
    ) -> Outcome:
        request = self._request(verb, by, why, step, value)
        return await self.changes.apply(check_id(run_id, "run_id"), request)

    def _request(
        self, verb: Verb, by: str, why: str, step: str = "", value: object = None
    ) -> Request:
        check_json(value)
        by, why = check_by(by), check_why(why)
        return Request(self.new_id(), verb, by, self.via, why, step, value)

    def act(self, verb: str, by: str, why: str, step: str = "") -> dict[str, Any]:
        """Return the act for a verb that an operator applies now."""
        # Acts that are not requests to a run have the same fields.
        request = self._request(cast(Verb, verb), by, why, step)
        return new_act(request, self.clock.now())

    async def note(self, act: dict[str, Any]) -> None:
        """Record an act that does not belong to a single run."""
        if can_search(self.store):
            await write_act(self.store, act)

    def new_id(self) -> str:
        """Return a new random id."""
        return f"{self._random.getrandbits(64):016x}"

    async def _load(self, run_id: str) -> Snapshot:
        snapshot = await self.store.load(check_id(run_id, "run_id"))
        if snapshot is None:
            raise RunNotFound(run_id)
        return snapshot


def _check_key(step: object, parameter: str = "step") -> str:
    return check_text(step, parameter, "the key of a step")


def check_by(by: object) -> str:
    """Return the name of an operator, or raise `InvalidArgument`."""
    expected = f"the operator's name, at most {_MAX_NAME} characters"
    if len(name := check_text(by, "by", expected)) > _MAX_NAME:
        raise InvalidArgument("by", by, expected)
    return name


def check_why(why: object) -> str:
    """Return the operator's reason, or raise `InvalidArgument`."""
    if not isinstance(why, str) or len(why) > _MAX_WHY or not is_encodable(why):
        raise InvalidArgument("why", why, f"a string of at most {_MAX_WHY} characters")
    return why


def check_json(value: object) -> None:
    """Raise `InvalidArgument` unless the value is plain JSON."""
    if not is_plain(value):
        raise InvalidArgument("value", value, "JSON: dicts, lists, strings, numbers, bools, None")
