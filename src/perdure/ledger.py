"""The records of one run in the order they were made, found again by identity.

Fresh records are kept as the bytes that went to the store: one encoding serves both, and nobody who
later changes the value in hand can change what was recorded. Loaded records are the dicts they came
as.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias, cast

import msgspec

from perdure import codec
from perdure.lineage import inner_path
from perdure.snapshot import Execution, Snapshot, StepRecord

logger = logging.getLogger(__name__)

Include: TypeAlias = Literal["all", "completed", "failed"]


class Ledger:
    """What is recorded of one run."""

    __slots__ = (
        "_calls",
        "_foreign",
        "_loaded",
        "_records",
        "metadata",
        "name",
        "pending",
        "warnings",
    )

    def __init__(self, name: str, snapshot: Snapshot | None = None) -> None:
        self.name = name
        self._records: dict[str, bytes | StepRecord] = {}
        self._calls: dict[str, dict[str, str]] = {}
        self._foreign: set[str] = set()
        self._loaded: set[str] = set()
        self.metadata: dict[str, Any] = {}
        self.warnings: list[Any] = []
        self.pending: dict[str, Any] = {}
        if snapshot is not None:
            self._restore(snapshot)

    def _restore(self, snapshot: Snapshot) -> None:
        self.name = snapshot.get("workflowName") or self.name
        self.metadata.update(snapshot.get("metadata") or {})
        self.warnings.extend(snapshot.get("warnings") or ())
        for wait in snapshot["execution"].get("pending") or ():
            self.pending[wait["id"]] = wait
        self.load(snapshot["steps"])

    def load(self, records: Mapping[str, StepRecord]) -> None:
        """Take in records that were made before, by us or by a writer of the seeds' format."""
        self._records.update(records)
        self._loaded.update(records)
        root = self._calls.setdefault("", {})
        for key, record in records.items():
            if "at" not in record:
                self._foreign.add(key)
            elif "branch" in record:
                self._index(record["branch"], record.get("call", key), key)
            else:
                root[record.get("call", key)] = key

    def _index(self, branch: str, call: str, key: str) -> None:
        self._calls.setdefault(branch, {})[call] = key

    def find(self, branch: str, call: str) -> str | None:
        """Give the key of the record that this call of this branch made, if there is one."""
        calls = self._calls.get(branch)
        key = calls.get(call) if calls is not None else None
        if key is None and call in self._foreign:
            # Another writer of the format knows no branches: the first that asks owns the record.
            self._foreign.discard(call)
            self._index(branch, call, call)
            key = call
        if key is not None:
            self._loaded.discard(key)
        return key

    def get(self, key: str) -> StepRecord:
        """Give a record as a dict of the caller's own: changing it changes nothing here."""
        record = self._records[key]
        if type(record) is bytes:
            return codec.loads(record)  # type: ignore[no-any-return]  # our own bytes
        # The loaded dict is given away, and what it says is kept.
        self._records[key] = codec.dumps(record)
        return cast(StepRecord, record)

    def key_for(self, branch: str, call: str) -> str:
        """Give the key under which this call's record stands or will stand: the call itself when
        that is free.
        """
        calls = self._calls.get(branch)
        if calls is not None and call in calls:
            return calls[call]
        key, n = call, 1
        while key in self._records:
            n += 1
            key = f"{call}#{n}"
        return key

    def put(self, branch: str, call: str, key: str, record: bytes) -> None:
        """Add a record; one under the same key is replaced and keeps its place."""
        self._records[key] = record
        self._loaded.discard(key)
        calls = self._calls.get(branch)
        if calls is None:
            calls = self._calls[branch] = {}
        calls[call] = key
        if self.warnings:
            self.warnings = [w for w in self.warnings if w["stepId"] != key]

    def drop(self, keys: Iterable[str]) -> None:
        """Forget records, so that their steps run again."""
        gone = set(keys)
        for key in gone:
            self._records.pop(key, None)
            self._foreign.discard(key)
            self._loaded.discard(key)
        for calls in self._calls.values():
            for call in [call for call, key in calls.items() if key in gone]:
                del calls[call]

    def lies_within(self, key: str, path: str) -> bool:
        """Tell whether the record under `key` belongs to a branch at or below `path`."""
        if key not in self._records:
            return False
        branch = self.get(key).get("branch", "")
        return branch == path or branch.startswith(f"{path}/")

    def failed(self) -> list[str]:
        """Give the keys of failed steps."""
        return [key for key in tuple(self._records) if not self.get(key)["ok"]]

    def untouched(self) -> list[str]:
        """Give the keys of loaded records that nothing has asked for.

        Steps inside a step that answered from its record had no need to be asked.
        """
        if not self._loaded:
            return []
        answered = {
            inner_path(branch, call)
            for branch, calls in self._calls.items()
            for call, key in calls.items()
            if key not in self._loaded
        }
        return [
            key
            for key in self._records
            if key in self._loaded and not _lies_within(self.get(key).get("branch", ""), answered)
        ]

    def __len__(self) -> int:
        return len(self._records)

    def keys(self) -> list[str]:
        """Give the keys in order."""
        return list(self._records)

    def warn(self, key: str, losses: Sequence[codec.Loss]) -> None:
        """Keep a warning for each part of a value that could not be recorded as it was."""
        for path, reason in losses:
            logger.warning(
                "step %r: %s cannot come back after a crash as it was (%s), so the function sees "
                "what was recorded. Where the type is known, pass the function and its arguments "
                "instead of a lambda, or returns=",
                key,
                path,
                reason,
            )
            self.warnings.append(
                {"type": "lossy_value", "stepId": key, "path": path, "reason": reason}
            )

    def warnings_of(self, key: str) -> list[Any]:
        """Give the warnings about one record."""
        return [warning for warning in self.warnings if warning["stepId"] == key]

    def copy(self) -> "Ledger":
        """Give the ledger as it is now; what is recorded later is not in it."""
        copied = Ledger(self.name)
        copied._records = dict(self._records)
        copied.metadata = self.metadata
        copied.warnings = list(self.warnings)
        return copied

    def encode(
        self,
        execution: Execution,
        *,
        include: Include = "all",
        limit: int | None = None,
        since: str | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> bytes:
        """Give the snapshot as JSON."""
        keys = self._chosen(include, limit, since)
        snapshot: dict[str, Any] = {"formatVersion": 1, "workflowName": self.name}
        snapshot["steps"] = {key: _embeddable(self._records[key]) for key in keys}
        snapshot["execution"] = execution
        if metadata := self.metadata if metadata is None else metadata:
            snapshot["metadata"] = metadata
        chosen = set(keys)
        if warnings := [w for w in self.warnings if w["stepId"] in chosen]:
            snapshot["warnings"] = warnings
        return codec.dumps(snapshot)

    def _chosen(self, include: Include, limit: int | None, since: str | None) -> list[str]:
        keys = list(self._records)
        if since is not None and since in self._records:
            keys = keys[keys.index(since) + 1 :]
        if include != "all":
            keys = [key for key in keys if self.get(key)["ok"] == (include == "completed")]
        return keys if limit is None else keys[:limit]


def _lies_within(branch: str, paths: set[str]) -> bool:
    parts = branch.split("/")
    return any("/".join(parts[:length]) in paths for length in range(1, len(parts) + 1))


def _embeddable(record: bytes | StepRecord) -> object:
    return msgspec.Raw(record) if isinstance(record, bytes) else record
