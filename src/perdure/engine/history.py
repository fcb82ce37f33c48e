"""The history of one run: its records, and everything else that is stored about it."""

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec

from perdure import codec
from perdure.engine.ahead import Ahead
from perdure.engine.branches import Branch
from perdure.engine.paths import is_below, split_path
from perdure.engine.records import EncodedRecord, Records, decoded, is_failure
from perdure.engine.started_runs import Start, StartedRuns
from perdure.engine.tracked import Tracked
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
from perdure.snapshot.asks import ANSWERS, answer_in, asking_call, asks_among, is_ask
from perdure.snapshot.patches import moved_patches, without_patches
from perdure.snapshot.rollback import UNDO, rollback_of
from perdure.snapshot.summary import encode_summary

Include: TypeAlias = Literal["all", "completed", "failed"]

_MARKS = frozenset({"run", "undo", "unclaimed"})
"""Fields of records that matter to the run as a whole, not only to the call that finds them."""


class UndoableStep(NamedTuple):
    """A recorded step that can be undone: its branch, and the scopes it belongs to."""

    branch: str
    sagas: Sequence[str]


class History(Records):
    """The records of one run, its open waits, its metadata and its outbox.

    `outbox` contains actions on other runs: they are delivered after the next write, and removed
    once they are delivered. `children` are the runs that it started and that are cancelled with it.
    `asks` are stored waits that a token answers, by the name of the message, until their answer is
    recorded or they are closed, even if they are no longer among `waits`. `unclaimed` are records
    of events that a wait has received but no code has seen, by key. `rollback` is why its steps are
    undone, `undoable_steps` are the steps that can be undone, by key.
    """

    __slots__ = (
        "_ahead",
        "asks",
        "children",
        "metadata",
        "name",
        "outbox",
        "rollback",
        "unclaimed",
        "undoable_steps",
        "waits",
    )

    def __init__(self, name: str, snapshot: Snapshot | None = None) -> None:
        super().__init__()
        waits = () if snapshot is None else open_waits(snapshot)
        self.name = name
        self.metadata: Tracked[Any] = Tracked(
            None if snapshot is None else snapshot.get("metadata")
        )
        self.waits: Tracked[PendingWait] = Tracked()
        self.asks: dict[str, PendingWait] = {}
        if waits:
            self.waits.update((wait["id"], wait) for wait in waits)
            self.asks = asks_among(waits)
        self.outbox: Tracked[OutboxItem] = Tracked(
            None if snapshot is None else outbox_of(snapshot)
        )
        self.children = StartedRuns()
        self.unclaimed: dict[str, StepRecord] = {}
        self.undoable_steps: dict[str, UndoableStep] = {}
        self.rollback: Rollback | None = None
        self._ahead: Ahead | None = None
        if snapshot is not None:
            self.name = snapshot.get("workflowName") or name
            self.warnings = tuple(snapshot.get("warnings") or ())
            self.rollback = rollback_of(snapshot)
            if snapshot["steps"]:
                self.load(snapshot["steps"])

    @property
    def generation(self) -> int:
        """How often the run has started over from an earlier point, counted from 1."""
        return generation_of(self.metadata)

    def load(self, records: Mapping[str, StepRecord]) -> None:
        """Add earlier records, made by us or by another writer of the format."""
        super().load(records)
        for key, record in records.items():
            if not _MARKS.isdisjoint(record):
                self._load_marks(key, record)

    def _load_marks(self, key: str, record: StepRecord) -> None:
        if record.get("kind") in ("start", "map") and "run" in record:
            self.children.load(record)
        if "undo" in record and record["ok"]:
            self.undoable_steps[key] = UndoableStep(
                record.get("branch", ""), record.get("sagas", ())
            )
        if "unclaimed" in record:
            self._silent[key] = None
            if record["unclaimed"]:
                self.unclaimed[key] = record

    def drop(self, keys: Iterable[str]) -> None:
        """Forget records, so that their steps run again."""
        keys = list(keys)
        for name, answer in moved_patches(self.metadata, self, {*keys}).items():
            self.set_metadata(name, answer)
        for key in keys:
            record = self.discard(key)
            self.undoable_steps.pop(key, None)
            if record is not None and record.get("kind") == "start":
                self.children.forget(record.get("run", ""))

    def is_ahead_of(self, branch: Branch) -> bool:
        """Return whether the branch has recorded work ahead of it.

        That is the case if records or open waits belong to calls that it has not made yet, or to
        branches that it has not created yet. Branches that lost a race do not count.
        """
        if self._ahead is None:
            self._ahead = Ahead(self._stored_calls(), self._is_asked)
        # Other writers of the format do not record which branch made a record.
        return bool(self._foreign) or self._ahead.is_before(branch)

    def _is_asked(self, key: str) -> bool:
        return bool(key) and key not in self._loaded

    def _stored_calls(self) -> Iterator[tuple[str, str, str]]:
        """Yield branch, call and key of each unused record, and branch and call of each wait."""
        for key in tuple(self._records):
            if key in self._loaded and key not in self._silent:
                record = self._peek(key)
                branch, call = record.get("branch", ""), record.get("call", key)
                asking = asking_call(call)
                if asking != call and asking in self._calls.get(branch, ()):
                    # Skipped: the approval of a recorded step, and the notification of an answered
                    # question, are never asked for again.
                    continue
                # An explicit key is unique in the whole run, but a particular branch has used it.
                yield record.get("within") or branch, asking, key
        for id in tuple(self.waits):
            branch, call = split_path(id)
            yield branch, asking_call(call), ""

    def steps_to_undo(self, saga: str | None = None) -> list[str]:
        """Return the keys of the steps that have to be undone, in order, optionally of a scope."""
        steps = self.undoable_steps.items()
        keys = (key for key, each in steps if saga is None or saga in each.sagas)
        return [key for key in keys if not self.is_undone(key)]

    def is_undone(self, key: str) -> bool:
        """Return whether a step was undone."""
        record = self._records.get(UNDO + key)
        return record is not None and not is_failure(record)

    def mark_unclaimed(self, key: str) -> dict[str, bytes]:
        """Make the event of a wait's record available to the next wait for it.

        Return the changed record for the next write; empty if the wait received no event.
        """
        record = self.get(key)
        event = record.get("event")
        if not event:
            return {}
        # The published record changes only when the write is accepted: if the process dies first,
        # the wait is answered from its record, and its branch may win the race instead.
        record["unclaimed"] = event
        self.unclaimed[key] = record
        return {key: codec.dumps(record)}

    def claim(self, key: str, by: str) -> dict[str, bytes]:
        """Hand the event of an unclaimed record to the wait whose record gets the key `by`.

        Return the changed first record for the same write, marked as received.
        """
        record = self.unclaimed.pop(key)
        # Emptied, because an entry of the journal can replace a record but not remove it.
        record["unclaimed"] = ""
        return {} if key == by else {key: codec.dumps(record)}

    def open_wait(self, wait: PendingWait) -> PendingWait:
        """Begin a wait, or return the wait with this id that began in an earlier activation."""
        # A wait that began before a crash or suspension keeps its stored wake time.
        return self.waits.get(wait["id"]) or self.waits.put(wait["id"], wait)

    def change_wait(self, wait: PendingWait) -> PendingWait:
        """Begin a wait, or replace the wait with this id."""
        if is_ask(wait):
            self.asks[wait.get("event", "")] = wait
        return self.waits.put(wait["id"], wait)

    def close_wait(self, id: str) -> None:
        """End a wait; a wait with a token stays among `asks` until its answer is recorded."""
        self.waits.remove(id)

    def close_ask(self, id: str) -> None:
        """End a wait whose token can no longer be answered."""
        self.asks.pop(self.waits[id].get("event", ""), None)
        self.close_wait(id)

    def forget_waits(self) -> None:
        """Forget all waits; the next write contains the whole run."""
        # `asks` is kept: the tokens are closed before the write that drops the waits.
        self.waits = Tracked()

    def set_metadata(self, name: str, value: Any) -> None:
        """Change the run's metadata; the change is stored with the next write."""
        if self.metadata.get(name) != value:
            self.metadata.put(name, value)

    def add_act(self, act: dict[str, Any]) -> None:
        """Record an operator's act; it is stored with the next write."""
        for name, value in with_act(self.metadata, act).items():
            self.set_metadata(name, value)

    def open_children(self, branches: Set[str] | None = None) -> list[str]:
        """Return the ids of child runs that must end with this run, or with one of these branches.

        Some of them may already have ended.
        """
        if not self.waits and not self.children:
            return []
        # A call that still waits for its run has no record; the wait names the run.
        starts = [
            *self.children,
            *(
                Start([wait.get("run", "")], split_path(wait["id"])[0])
                for wait in self.waits.values()
                if wait.get("cancels")
            ),
        ]
        if branches is not None:
            starts = [start for start in starts if is_below(start.branch, branches)]
        return [run_id for start in starts for run_id in start.run_ids]

    def cancel_runs(self, name: str, run_ids: Sequence[str], at: str, tag: str = "") -> None:
        """Cancel runs that this run started; the request is delivered after the next write.

        They have the `tag`, by default the tag of this run's children.
        """
        if run_ids:
            # The id lets them recognize a request that is repeated after a crash, and only that.
            facts: OutboxItem = {"id": f"{name}@{at}", "runs": list(run_ids)}
            if tag:
                facts["tag"] = tag
            self.outbox.put(f"cancel:{name}", {"cancel": facts})

    def next_generation(self, data: object) -> "History":
        """Return the history with which the run starts over with the input `data`.

        Events that a wait received but no branch saw are kept: they are consumed, and no longer in
        the inbox.
        """
        generation = self.generation + 1
        successor = History(self.name)
        metadata = without_patches(self.metadata)
        successor.metadata.update({**metadata, "input": data, "generation": generation})
        successor.outbox, successor.asks = self.outbox, self.asks
        # The call that triggered the run may be repeated, and must recognize its payload.
        successor.metadata.setdefault("firstInput", self.metadata.get("input"))
        for key, record in self.unclaimed.items():
            # Under a name that no call of the next generation can have.
            name = f"~unclaimed:{generation}:{key}"
            facts: Any = {**record, "branch": "", "call": name}
            successor.load({name: facts})
        return successor

    def without_records(self) -> "History":
        """Return a history with the run's name, metadata and children, but no records.

        The names of those who answered its questions stay in the metadata, for late answers.
        """
        empty = History(self.name)
        empty.metadata = self.metadata
        if answers := self._answers():
            empty.metadata = Tracked({**self.metadata, ANSWERS: answers})
        empty.waits, empty.children, empty.outbox = self.waits, self.children, self.outbox
        empty.asks = self.asks
        return empty

    def _answers(self) -> dict[str, Any]:
        """Return the answers to the run's questions, by the names of the messages."""
        answers: dict[str, Any] = {}
        for record in self._records.values():
            # Most records are not of questions, and need not be decoded.
            if type(record) is not bytes or b'"answer":' in record:
                facts = decoded(record)
                if answer := answer_in(facts):
                    answers[facts.get("event", "")] = {
                        name: answer[name] for name in ("by", "at", "expired") if name in answer
                    }
        return answers

    def replica(self) -> "History":
        """Return a history with the same records, which code may use without a change to this."""
        replica = History(self.name)
        # The replayed code sets tags and reports again, which must not reach the run.
        replica.metadata = Tracked(self.metadata)
        replica.load(self.steps())
        return replica

    def copy(self) -> "History":
        """Return a copy of the history, which later records do not change."""
        duplicate = History(self.name)
        duplicate._records = dict(self._records)
        duplicate.metadata = self.metadata
        duplicate.warnings = self.warnings
        return duplicate

    def encode(
        self,
        execution: ExecutionBlock,
        *,
        include: Include = "all",
        limit: int | None = None,
        since: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        staged_records: Sequence[EncodedRecord] = (),
    ) -> bytes:
        """Encode the snapshot as JSON, with records that are `staged` but not yet published."""
        records = self._records
        keys: Iterable[str] = records
        if include != "all" or limit is not None or since is not None:
            keys = self._select_keys(include, limit, since)
        snapshot: dict[str, Any] = {"formatVersion": 1, "workflowName": self.name}
        steps: dict[str, object] = {}
        for key in keys:
            # Without a call per record, because a run is encoded whenever it is settled.
            record = records[key]
            steps[key] = msgspec.Raw(record) if type(record) is bytes else record
        snapshot["steps"] = steps
        for staged in staged_records:
            steps[staged.key] = msgspec.Raw(staged.json)
        snapshot["execution"] = execution
        if metadata := self.metadata if metadata is None else metadata:
            snapshot["metadata"] = metadata
        if self.outbox:
            snapshot["outbox"] = self.outbox
        if self.warnings or staged_records:
            warnings = [w for w in self.warnings if w["stepId"] in steps]
            for staged in staged_records:
                warnings += staged.warnings
            if warnings:
                snapshot["warnings"] = warnings
        return codec.dumps(snapshot)

    def _select_keys(self, include: Include, limit: int | None, since: str | None) -> list[str]:
        keys = list(self._records)
        if since is not None and since in self._records:
            keys = keys[keys.index(since) + 1 :]
        if include != "all":
            keys = [key for key in keys if self.get(key)["ok"] == (include == "completed")]
        return keys if limit is None else keys[:limit]

    def summarize(self, execution: ExecutionBlock, size: int) -> bytes:
        """Return the summary of the run, whose snapshot has `size` bytes."""
        count, failures = len(self._records), self.count_failures()
        last, waits = self.last_record, execution.get("pending", ())
        return encode_summary(self.metadata, execution, count, failures, last, size, waits)
