"""The records of one run in the order they were made, found again by identity.

A call reserves its key when it begins. Its record is published here when the store has accepted it,
so nothing sees a record that a crash could take back. Fresh records are kept as the bytes that went
to the store: one encoding serves both, and code that later changes the value cannot change what
was recorded. Loaded records stay dicts.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, Literal, NamedTuple, TypeAlias, cast

import msgspec

from perdure import codec
from perdure.engine.ahead import Ahead
from perdure.engine.branches import Branch, join_path, split_path
from perdure.snapshot import (
    ExecutionBlock,
    OutboxItem,
    PendingWait,
    Rollback,
    Snapshot,
    StepRecord,
    generation_of,
    open_waits,
    outbox_of,
)
from perdure.snapshot.acts import with_act
from perdure.snapshot.asks import asking_call, is_ask, open_asks
from perdure.snapshot.patches import moved_patches, without_patches
from perdure.snapshot.rollback import UNDO, rollback_of
from perdure.snapshot.summary import encode_summary
from perdure.validation import RESERVED

logger = logging.getLogger(__name__)

Include: TypeAlias = Literal["all", "completed", "failed"]


class EncodedRecord(msgspec.Struct, frozen=True, gc=False):
    """A record on its way to the store: its key and JSON, when it was made, the value the function
    will see, and warnings about what of it was lost.
    """

    key: str
    json: bytes
    at: str
    value: Any
    warnings: tuple[dict[str, str], ...] = ()


class Marked(NamedTuple):
    """A recorded step that can be undone: its branch, and the scopes it belongs to."""

    branch: str
    sagas: Sequence[str]


class Children(NamedTuple):
    """Runs that one call started and that end with this run; `branch` is the one that called."""

    run_ids: Sequence[str]
    branch: str = ""


class History:
    """The records of one run, its open waits, its metadata and its outbox.

    `outbox` contains what the run does to other runs and what is not known to have been delivered,
    `children` the runs that it started and that are cancelled with it. `asks` are waits that a
    token answers, by the name of the message: those that are stored, whose answer is not recorded
    and that were not closed, even if they are no longer among `waits`. `rollback` is why its steps
    are undone, `marked` are the steps that can be undone, by key.
    """

    __slots__ = (
        "_ahead",
        "_calls",
        "_foreign",
        "_loaded",
        "_next",
        "_records",
        "_silent",
        "_skipped",
        "_stored_items",
        "_stored_waits",
        "asks",
        "changed_metadata",
        "changed_outbox",
        "changed_waits",
        "children",
        "last_key",
        "marked",
        "metadata",
        "name",
        "outbox",
        "rollback",
        "unclaimed",
        "waits",
        "warnings",
    )

    def __init__(self, name: str, snapshot: Snapshot | None = None) -> None:
        self.name = name
        self._records: dict[str, bytes | StepRecord] = {}
        self._calls: dict[str, dict[str, str]] = {}
        self._next: dict[str, int] = {}
        self._foreign: set[str] = set()
        self._loaded: set[str] = set()
        self._silent: set[str] = set()
        self._skipped: frozenset[str] = frozenset()
        self.last_key: str | None = None
        self.metadata: dict[str, Any] = {}
        self.changed_metadata: dict[str, Any] = {}
        self.warnings: list[Any] = []
        self.unclaimed: dict[str, StepRecord] = {}
        self.waits: dict[str, PendingWait] = {}
        self.changed_waits: dict[str, PendingWait | None] = {}
        self._stored_waits: set[str] = set()
        self.asks: dict[str, PendingWait] = {}
        self.outbox: dict[str, OutboxItem] = {}
        self.changed_outbox: dict[str, OutboxItem | None] = {}
        self._stored_items: set[str] = set()
        self.children: dict[str, dict[int, Children]] = {}
        self.marked: dict[str, Marked] = {}
        self.rollback: Rollback | None = None
        self._ahead: Ahead | None = None
        if snapshot is not None:
            self._restore(snapshot)

    def _restore(self, snapshot: Snapshot) -> None:
        self.name = snapshot.get("workflowName") or self.name
        self.metadata.update(snapshot.get("metadata") or {})
        self.warnings.extend(snapshot.get("warnings") or ())
        self.waits = {wait["id"]: wait for wait in open_waits(snapshot)}
        self._stored_waits.update(self.waits)
        self.asks = open_asks(snapshot)
        self.outbox = outbox_of(snapshot)
        self._stored_items.update(self.outbox)
        self.rollback = rollback_of(snapshot)
        self.load(snapshot["steps"])

    @property
    def generation(self) -> int:
        """How often the run began again from an earlier point, counted from 1."""
        return generation_of(self.metadata)

    def load(self, records: Mapping[str, StepRecord]) -> None:
        """Add records that were made before, by us or by another writer of the format."""
        self._records.update(records)
        self._loaded.update(records)
        root = self._calls.setdefault("", {})
        for key, record in records.items():
            if "at" not in record:
                self._foreign.add(key)
            elif "branch" in record:
                self._calls.setdefault(record["branch"], {})[record.get("call", key)] = key
            else:
                root[record.get("call", key)] = key
            if record.get("kind") in ("start", "map") and "run" in record:
                self._load_child(record)
            if "undo" in record and record["ok"]:
                self.marked[key] = Marked(record.get("branch", ""), record.get("sagas", ()))
            if "unclaimed" in record:
                self._silent.add(key)
                if record["unclaimed"]:
                    self.unclaimed[key] = record

    def find(self, branch: str, call: str) -> str | None:
        """Return the key of the record that this call of this branch made, if there is one."""
        calls = self._calls.get(branch)
        key = calls.get(call) if calls is not None else None
        if key is None and call in self._foreign:
            # Another writer of the format knows no branches: the first call that asks owns it.
            self._foreign.discard(call)
            self._calls.setdefault(branch, {})[call] = key = call
        if key is None or key not in self._records or key in self._silent:
            return None
        self._loaded.discard(key)
        return key

    def skip(self, branch: str, call: str) -> None:
        """Count a call as asked for, with all below it, although nothing needs its answer."""
        self._skipped |= {f"{join_path(branch, call)}>"}
        self._loaded.discard(self._calls.get(branch, {}).get(call, ""))

    def is_ahead_of(self, branch: Branch) -> bool:
        """Return whether records or open waits belong to calls that this branch has not made yet,
        or to branches that it has not created yet. Those that lost a race do not count.
        """
        if self._ahead is None:
            self._ahead = Ahead(self._stored_calls(), self._is_asked)
        # Another writer of the format does not say which branch made a record.
        return bool(self._foreign) or self._ahead.is_before(branch)

    def _is_asked(self, key: str) -> bool:
        return bool(key) and key not in self._loaded

    def _stored_calls(self) -> Iterator[tuple[str, str, str]]:
        """Yield branch, call and key of each record that nothing has asked for, and branch and call
        of each wait.
        """
        for key in tuple(self._records):
            if key in self._loaded and key not in self._silent:
                record = self._peek(key)
                branch, call = record.get("branch", ""), record.get("call", key)
                asking = asking_call(call)
                if asking != call and asking in self._calls.get(branch, ()):
                    # Its record is enough: nothing asks for the approval of a recorded step, nor
                    # for the notification of an answered question.
                    continue
                # An explicit key is an identity in the whole run, and yet a branch has used it.
                yield record.get("within") or branch, asking, key
        for id in tuple(self.waits):
            branch, call = split_path(id)
            yield branch, asking_call(call), ""

    def get(self, key: str) -> StepRecord:
        """Return a record as a dict of the caller's own: changing it changes nothing here."""
        record = self._records[key]
        if type(record) is bytes:
            return codec.loads(record)  # type: ignore[no-any-return]  # our own bytes
        # The loaded dict is given away, and what it says is kept.
        self._records[key] = codec.dumps(record)
        return cast(StepRecord, record)

    def _peek(self, key: str) -> StepRecord:
        """Return a record that the caller only reads."""
        record = self._records[key]
        return codec.loads(record) if type(record) is bytes else cast(StepRecord, record)

    @property
    def last_record(self) -> str:
        """The key of the record that was made last; empty if there is none."""
        return next(reversed(self._records), "")

    def attempts(self, key: str) -> int:
        """Return how many attempts a step took; 1 if that is not recorded."""
        return self.get(key).get("attempts", 1) if key in self._records else 1

    def reserve(self, branch: str, call: str) -> str:
        """Return the key of this call's record and keep it from all other calls.

        The call itself is the key unless a call of another branch was first.
        """
        calls = self._calls.get(branch)
        if calls is None:
            calls = self._calls[branch] = {}
        key = calls.get(call)
        if key is None:
            # Several branches may call one id: all but the first get `id#2`, `id#3` … as key. A key
            # is not used again in this process, even if its call records nothing.
            n = self._next.get(call, 1)
            key = call if n == 1 else f"{call}#{n}"
            while key in self._records or key in self._next:
                n += 1
                key = f"{call}#{n}"
            self._next[call] = n + 1
            self._next.setdefault(key, 1)
            calls[call] = key
        return key

    def publish(self, record: EncodedRecord) -> None:
        """Make a record answer its calls from now on; it replaces one under the same key."""
        key = self.last_key = record.key
        self._records[key] = record.json
        if self._silent:
            self._silent.discard(key)
        if self._loaded:
            self._loaded.discard(key)
        if self.warnings:
            self.warnings = [w for w in self.warnings if w["stepId"] != key]
        if record.warnings:
            self.warnings += record.warnings

    def silence(self, key: str, json: bytes) -> None:
        """Replace a published record by one that no longer answers any call."""
        self._records[key] = json
        self._silent.add(key)

    def drop(self, keys: Iterable[str]) -> None:
        """Forget records, so that their steps run again."""
        keys = list(keys)
        for name, answer in moved_patches(self.metadata, self, {*keys}).items():
            self.set_metadata(name, answer)
        for key in keys:
            record = self._records.pop(key, None)
            if record is None:
                continue
            self._foreign.discard(key)
            self._loaded.discard(key)
            self.marked.pop(key, None)
            fields = codec.loads(record) if isinstance(record, bytes) else record
            self._calls.get(fields.get("branch", ""), {}).pop(fields.get("call", key), None)
            if fields.get("kind") == "start":
                self.children.pop(fields.get("run", ""), None)

    def steps(self) -> dict[str, StepRecord]:
        """Return the records by key, in the order they were made."""
        return {key: self.get(key) for key in self}

    def owed(self, saga: str | None = None) -> list[str]:
        """Return the keys of the steps that can be undone and were not, in their order: all, or
        those that belong to a scope.
        """
        marked = self.marked.items()
        keys = (key for key, each in marked if saga is None or saga in each.sagas)
        return [key for key in keys if not self.is_undone(key)]

    def is_undone(self, key: str) -> bool:
        """Return whether a step was undone."""
        record = self._records.get(UNDO + key)
        return record is not None and not _is_failure(record)

    def forget_waits(self) -> None:
        """Forget what the run waits for: the next write contains the whole run."""
        self.waits, self.changed_waits = {}, {}

    def mark_unclaimed(self, key: str) -> dict[str, bytes]:
        """Make the event of a wait's record available to the next wait for it.

        Return what the next write makes of the record; nothing if the wait received no event.
        """
        record = self.get(key)
        event = record.get("event")
        if not event:
            return {}
        record["unclaimed"] = event
        self.unclaimed[key] = record
        return {key: codec.dumps(record)}

    def claim(self, key: str, by: str) -> dict[str, bytes]:
        """Hand the event of an unclaimed record to the wait whose record gets the key `by`.

        Return what the same write makes of the first record: a mark that its event was received.
        """
        record = self.unclaimed.pop(key)
        record["unclaimed"] = ""
        return {} if key == by else {key: codec.dumps(record)}

    def untouched(self) -> list[str]:
        """Return the keys of loaded records that nothing has asked for.

        Steps in the branches of a race that answered from its record had no need to be asked, nor
        had those of the engine.
        """
        if not self._loaded:
            return []
        answered = self._skipped | {
            f"{join_path(branch, call)}>"
            for branch, calls in self._calls.items()
            for call, key in calls.items()
            if key not in self._loaded
        }
        return [
            key
            for key in self._records
            if key in self._loaded
            and not key.startswith(RESERVED)
            and not _is_below(self.get(key).get("branch", ""), answered)
        ]

    def __len__(self) -> int:
        return len(self._records)

    def __contains__(self, key: object) -> bool:
        return key in self._records

    def __iter__(self) -> Iterator[str]:
        """Yield the keys of the records, in the order the records were made."""
        return iter(tuple(self._records))

    def summarize(self, execution: ExecutionBlock, size: int) -> bytes:
        """Return the summary of the run whose snapshot has so many bytes."""
        records = self._records
        failed = sum(map(_is_failure, records.values()))
        last, waits = self.last_record, execution.get("pending", ())
        count = len(records)
        return encode_summary(self.metadata, execution, count, failed, last, size, waits)

    def open_wait(self, wait: PendingWait) -> PendingWait:
        """Begin a wait, or return the one that began under this id in an earlier activation."""
        # A wait that began before a crash or suspension keeps the wake time that was stored then.
        known = self.waits.get(wait["id"])
        if known is None:
            self.waits[wait["id"]] = self.changed_waits[wait["id"]] = known = wait
        return known

    def change_wait(self, wait: PendingWait) -> PendingWait:
        """Begin a wait, or replace the one that has this id."""
        self.waits[wait["id"]] = self.changed_waits[wait["id"]] = wait
        if is_ask(wait):
            self.asks[wait.get("event", "")] = wait
        return wait

    def close_wait(self, id: str) -> None:
        """End a wait; one with a token stays among `asks` until its answer is recorded."""
        self.waits.pop(id, None)
        if id in self._stored_waits:
            self.changed_waits[id] = None
        else:
            self.changed_waits.pop(id, None)

    def close_ask(self, id: str) -> None:
        """End a wait with a token that nothing can answer any more."""
        self.asks.pop(self.waits[id].get("event", ""), None)
        self.close_wait(id)

    def take_changed_waits(self) -> Mapping[str, PendingWait | None]:
        """Return the waits that began or ended since the last call, for the next write.

        A wait is written once, when it begins: an activation that only finds it again changes
        nothing, and so makes no progress.
        """
        changed = self.changed_waits
        if changed:
            self.changed_waits = {}
            self._stored_waits.update(changed)
        return changed

    def set_metadata(self, name: str, value: Any) -> None:
        """Change the run's metadata: durable with the next write, whatever that is for."""
        if self.metadata.get(name) != value:
            self.metadata[name] = self.changed_metadata[name] = value

    def add_act(self, act: dict[str, Any]) -> None:
        """Record who intervened in the run: durable with the next write."""
        for name, value in with_act(self.metadata, act).items():
            self.set_metadata(name, value)

    def take_changed_metadata(self) -> Mapping[str, Any]:
        """Return the metadata that changed since the last call, for the next write."""
        changed = self.changed_metadata
        if changed:
            self.changed_metadata = {}
        return changed

    def _load_child(self, record: Any) -> None:
        if record["kind"] == "start":
            self.add_child(record.get("value"), record.get("branch", ""))
        else:
            # The last record of a map: its runs have ended.
            self.forget_children(record["run"])

    def add_child(self, facts: Any, branch: str) -> None:
        """Remember runs that end with this one; `facts` is what their start recorded."""
        if facts.get("cancels"):
            base, first = facts.get("base") or facts["id"], facts.get("first", 0)
            run_ids = [base]
            if "base" in facts:
                run_ids = [f"{base}/{first + n}" for n in range(facts["count"])]
            self.children.setdefault(base, {})[first] = Children(run_ids, branch)

    def forget_children(self, base: str) -> list[str]:
        """Forget the runs that a call started; return their ids."""
        started = self.children.pop(base, {}).values()
        return [run_id for children in started for run_id in children.run_ids]

    def open_children(self, branches: Set[str] | None = None) -> list[str]:
        """Return the ids of runs that are to end with this one, or with one of these branches.

        Some of them may have ended.
        """
        started = [each for calls in self.children.values() for each in calls.values()]
        started += (
            Children([wait.get("run", "")], split_path(wait["id"])[0])
            for wait in self.waits.values()
            if wait.get("cancels")
        )
        if branches is not None:
            started = [each for each in started if _is_below(each.branch, branches)]
        return [run_id for each in started for run_id in each.run_ids]

    def cancel_runs(self, name: str, run_ids: Sequence[str], at: str, tag: str = "") -> None:
        """Cancel runs that this run started; they are told after its next write.

        They have the `tag`, or else that of the children of this run.
        """
        if run_ids:
            # They must recognise a request that is repeated after a crash, and no other as one.
            facts: OutboxItem = {"id": f"{name}@{at}", "runs": list(run_ids)}
            if tag:
                facts["tag"] = tag
            self.put_item(f"cancel:{name}", {"cancel": facts})

    def put_item(self, name: str, item: OutboxItem) -> None:
        """Add what the run does to another run: delivered after the next write, whatever that is
        for.
        """
        self.outbox[name] = self.changed_outbox[name] = item

    def acknowledge(self, name: str) -> None:
        """Drop an item that was delivered; the next write says so."""
        self.outbox.pop(name, None)
        if name in self._stored_items:
            self._stored_items.discard(name)
            self.changed_outbox[name] = None

    def take_changed_outbox(self) -> Mapping[str, OutboxItem | None]:
        """Return the items that were added or delivered since the last call, for the next write."""
        changed = self.changed_outbox
        if changed:
            self.changed_outbox = {}
            self._stored_items.update(name for name, item in changed.items() if item is not None)
        return changed

    def next_generation(self, data: object) -> "History":
        """Return the history with which the run begins again with the input `data`.

        Events that a wait received and whose branch never saw them are kept: they are consumed, and
        no longer in the inbox.
        """
        generation = self.generation + 1
        following = History(self.name)
        kept = without_patches(self.metadata)
        following.metadata = {**kept, "input": data, "generation": generation}
        following.outbox, following.asks = self.outbox, self.asks
        # The call that triggered the run may be repeated, and must recognise its payload.
        following.metadata.setdefault("firstInput", self.metadata.get("input"))
        for key, record in self.unclaimed.items():
            # Under a name that no call of the next generation has.
            name = f"~unclaimed:{generation}:{key}"
            facts: Any = {**record, "branch": "", "call": name}
            following.load({name: facts})
        return following

    def without_records(self) -> "History":
        """Return a history that has the run's name, metadata and children, and no records."""
        empty = History(self.name)
        empty.metadata = self.metadata
        empty.waits, empty.children, empty.outbox = self.waits, self.children, self.outbox
        empty.asks = self.asks
        return empty

    def copy(self) -> "History":
        """Return the history as it is now; what is recorded later is not in it."""
        copied = History(self.name)
        copied._records = dict(self._records)
        copied.metadata = self.metadata
        copied.warnings = list(self.warnings)
        return copied

    def encode(
        self,
        execution: ExecutionBlock,
        *,
        include: Include = "all",
        limit: int | None = None,
        since: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        staged: Sequence[EncodedRecord] = (),
    ) -> bytes:
        """Return the snapshot as JSON, with records that are `staged` but not yet published."""
        keys = self._chosen(include, limit, since)
        snapshot: dict[str, Any] = {"formatVersion": 1, "workflowName": self.name}
        steps = snapshot["steps"] = {key: _embeddable(self._records[key]) for key in keys}
        steps.update((record.key, msgspec.Raw(record.json)) for record in staged)
        snapshot["execution"] = execution
        if metadata := self.metadata if metadata is None else metadata:
            snapshot["metadata"] = metadata
        if self.outbox:
            snapshot["outbox"] = self.outbox
        warnings = [w for w in self.warnings if w["stepId"] in steps]
        warnings += (warning for record in staged for warning in record.warnings)
        if warnings:
            snapshot["warnings"] = warnings
        return codec.dumps(snapshot)

    def _chosen(self, include: Include, limit: int | None, since: str | None) -> list[str]:
        keys = list(self._records)
        if since is not None and since in self._records:
            keys = keys[keys.index(since) + 1 :]
        if include != "all":
            keys = [key for key in keys if self.get(key)["ok"] == (include == "completed")]
        return keys if limit is None else keys[:limit]


def warnings_of(key: str, losses: Sequence[codec.Loss]) -> tuple[dict[str, str], ...]:
    """Log and return a warning for each part of a value that could not be recorded as it was."""
    for loss in losses:
        logger.warning("step %r: %s", key, _explain(loss))
    return tuple(
        {"type": "lossy_value", "stepId": key, "path": loss.path, "reason": loss.reason}
        for loss in losses
    )


def _explain(loss: codec.Loss) -> str:
    """Return what cannot be restored, and what to write if only its class has to be known."""
    what = "" if loss.cls is None else f" ({loss.cls.__name__})"
    text = (
        f"{loss.path}{what} cannot come back after a crash as it was ({loss.reason}), so the "
        "function sees what was recorded."
    )
    if loss.path.startswith(f"{codec.EXCEPTION}."):
        return f"{text} Raise an exception in the step whose attributes are plain data"
    if loss.cls is None or loss.reason != "non-json" or not codec.is_restorable(loss.cls):
        return f"{text} Return plain data, or objects with fields, from the step"
    name = loss.cls.__name__
    # A part of a value is restored by the type of the whole, which is not known here.
    whole = name if loss.path.isidentifier() else f"…{name}…"
    return (
        f"{text} Write returns={whole}, or pass a function with that return annotation instead of "
        f"a lambda, or declare types=[{name}] for the workflow"
    )


def _is_below(branch: str, paths: Set[str]) -> bool:
    parts = branch.split("/")
    return any("/".join(parts[:length]) in paths for length in range(1, len(parts) + 1))


def _is_failure(record: bytes | StepRecord) -> bool:
    # Records are encoded with `ok` first: those of successful steps need not be decoded.
    if isinstance(record, bytes):
        return not record.startswith(b'{"ok":true') and not codec.loads(record)["ok"]
    return not record["ok"]


def _embeddable(record: bytes | StepRecord) -> object:
    return msgspec.Raw(record) if isinstance(record, bytes) else record
