"""The records of one run in the order they were made, looked up by identity.

A call reserves its key when it begins. Its record is published here once the store has accepted it,
so no code sees a record that a crash could undo. Fresh records are kept as the bytes that went to
the store: one encoding serves both, and code that later changes the value cannot change what was
recorded. Loaded records stay dicts.
"""

from bisect import bisect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias, cast

import msgspec

from perdure import codec
from perdure.engine.paths import is_below, join_path
from perdure.snapshot import StepRecord
from perdure.validation import RESERVED

_SUCCESS = b'{"ok":true'
_NOTHING: frozenset[str] = frozenset()

Stored: TypeAlias = bytes | StepRecord
"""A record as it is kept: encoded JSON, or the dict that was loaded."""


class EncodedRecord(msgspec.Struct, frozen=True, gc=False):
    """A record on its way to the store: its key and JSON, when it was made, the value the function
    will see, warnings about what of it was lost, how many milliseconds the step has taken, and its
    number among those of this process.
    """

    key: str
    json: bytes
    at: str
    value: Any
    warnings: tuple[dict[str, str], ...] = ()
    duration_ms: float = 0.0
    number: int = 0


class Records:
    """The records of one run, by key and by the call that made them.

    `last_key` is the key of the record that was last made or used.
    """

    __slots__ = (
        "_calls",
        "_early_records",
        "_foreign",
        "_loaded",
        "_next_counts",
        "_next_number",
        "_numbers",
        "_records",
        "_silent",
        "_skipped_paths",
        "last_key",
        "warnings",
    )

    def __init__(self) -> None:
        self._records: dict[str, Stored] = {}
        self._calls: dict[str, dict[str, str]] = {}
        self._numbers, self._next_number = 0, 1
        self._early_records: list[tuple[int, str]] | None = None
        self._next_counts: dict[str, int] = {}
        # Dicts, because thousands of runs have none of these keys: an empty set takes 216 bytes and
        # is examined by the garbage collector, an empty dict takes 64 and is not.
        self._foreign: dict[str, None] = {}
        self._loaded: dict[str, None] = {}
        self._silent: dict[str, None] = {}
        self._skipped_paths = _NOTHING
        self.last_key: str | None = None
        self.warnings: tuple[Any, ...] = ()

    def load(self, records: Mapping[str, StepRecord]) -> None:
        """Add earlier records, made by us or by another writer of the format."""
        self._records.update(records)
        self._loaded.update(dict.fromkeys(records))
        root = self._calls.setdefault("", {})
        for key, record in records.items():
            # Only perdure writes this field.
            if "at" not in record:
                self._foreign[key] = None
            elif "branch" in record:
                self._calls.setdefault(record["branch"], {})[record.get("call", key)] = key
            else:
                root[record.get("call", key)] = key

    def find(self, branch: str, call: str) -> str | None:
        """Return the key of the record of this call, or `None`."""
        calls = self._calls.get(branch)
        key = calls.get(call) if calls is not None else None
        if key is None and call in self._foreign:
            # Other writers of the format have no branches: the first call that asks for the record
            # owns it.
            del self._foreign[call]
            self._calls.setdefault(branch, {})[call] = key = call
        if key is None or key not in self._records or key in self._silent:
            return None
        # The record is used, so the code still contains its call.
        self._loaded.pop(key, None)
        return key

    @property
    def has_unused(self) -> bool:
        """Whether there are loaded records that were not used."""
        return bool(self._loaded)

    def is_used(self, key: str) -> bool:
        """Return whether a record was used in this activation, made in it, or answers no call."""
        return key not in self._loaded or key in self._silent

    def skip(self, branch: str, call: str) -> None:
        """Count the records of a call, and of all branches below it, as used."""
        self._skipped_paths |= {f"{join_path(branch, call)}>"}
        self._loaded.pop(self._calls.get(branch, {}).get(call, ""), None)

    def reserve(self, branch: str, call: str) -> str:
        """Reserve a key for this call's record, and return it.

        The key is the call itself, unless a call of another branch was first.
        """
        calls = self._calls.get(branch)
        if calls is None:
            calls = self._calls[branch] = {}
        key = calls.get(call)
        if key is None:
            if call in self._next_counts or call in self._records:
                key = self._free_key(call)
            else:
                key = call
                self._next_counts[call] = 2
            calls[call] = key
        return key

    def _free_key(self, call: str) -> str:
        """Return a key for a call whose name is the key of another call.

        Several branches may call the same id: all but the first get the keys `id#2`, `id#3` …. A
        key is not reused in this process, even if its call records nothing.
        """
        n = max(self._next_counts.get(call, 2), 2)
        while (key := f"{call}#{n}") in self._records or key in self._next_counts:
            n += 1
        self._next_counts[call] = n + 1
        self._next_counts[key] = 1
        return key

    def number(self) -> int:
        """Return the number of the next record."""
        self._numbers += 1
        return self._numbers

    def publish(self, record: EncodedRecord) -> None:
        """Publish a record, which answers its calls from now on; it may replace another one."""
        key = self.last_key = record.key
        self._records[key] = record.json
        if record.number == self._next_number and not self._early_records:
            self._next_number += 1
        else:
            self._reorder(record.number, key)
        # Most runs have none of these, and their steps do not pay for them.
        if self._silent or self._loaded or self.warnings or record.warnings:
            self._silent.pop(key, None)
            self._loaded.pop(key, None)
            warnings = (each for each in self.warnings if each["stepId"] != key)
            self.warnings = (*warnings, *record.warnings)

    def _reorder(self, number: int, key: str) -> None:
        """Move records with higher numbers, which were published earlier, behind this one.

        The store orders records by number, but a transaction is answered later than other writes.
        """
        if self._early_records is None:
            self._early_records = []
        early_records = self._early_records
        place = bisect(early_records, (number, key))
        for _, key_after in early_records[place:]:
            self._records[key_after] = self._records.pop(key_after)
        early_records.insert(place, (number, key))
        while early_records and early_records[0][0] <= self._next_number:
            self._next_number = max(self._next_number, early_records.pop(0)[0] + 1)

    def arrange(self, keys: Sequence[str]) -> None:
        """Put the records in the order of these keys; others come last."""
        order = dict.fromkeys([*(key for key in keys if key in self._records), *self._records])
        self._records = {key: self._records[key] for key in order}

    def silence(self, key: str, json: bytes) -> None:
        """Replace a published record with one that no longer answers any call."""
        self._records[key] = json
        self._silent[key] = None

    def discard(self, key: str) -> StepRecord | None:
        """Forget a record, so that its step runs again; return the record."""
        data = self._records.pop(key, None)
        if data is None:
            return None
        self._foreign.pop(key, None)
        self._loaded.pop(key, None)
        record = decoded(data)
        self._calls.get(record.get("branch", ""), {}).pop(record.get("call", key), None)
        return record

    def get(self, key: str) -> StepRecord:
        """Return a record as a new dict that the caller may change."""
        record = self._records[key]
        if type(record) is bytes:
            return codec.loads(record)  # type: ignore[no-any-return]  # our own bytes
        # The loaded dict goes to the caller; keep an encoded copy.
        self._records[key] = codec.dumps(record)
        return cast(StepRecord, record)

    def _peek(self, key: str) -> StepRecord:
        """Return a record that the caller only reads."""
        return decoded(self._records[key])

    @property
    def last_record(self) -> str:
        """The key of the latest record, or "" if there is none."""
        return next(reversed(self._records), "")

    def count_failures(self) -> int:
        """Return the number of records of failed steps."""
        count = 0
        for record in self._records.values():
            # Without a call for most records: see `is_failure`.
            if type(record) is not bytes or not record.startswith(_SUCCESS):
                count += is_failure(record)
        return count

    def attempts(self, key: str) -> int:
        """Return how many attempts a step took; 1 if that is not recorded."""
        return self._peek(key).get("attempts", 1) if key in self._records else 1

    def steps(self) -> dict[str, StepRecord]:
        """Return the records by key, in the order they were made."""
        return {key: self.get(key) for key in self}

    def unused_keys(self) -> list[str]:
        """Return the keys of loaded records that were not used.

        Records in the branches of a replayed race do not have to be used, nor do the engine's own.
        """
        if not self._loaded:
            return []
        used_paths = self._skipped_paths | {
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
            and not is_below(self._peek(key).get("branch", ""), used_paths)
        ]

    def __len__(self) -> int:
        return len(self._records)

    def __contains__(self, key: object) -> bool:
        return key in self._records

    def __iter__(self) -> Iterator[str]:
        """Yield the keys of the records, in the order the records were made."""
        return iter(tuple(self._records))


def is_failure(record: Stored) -> bool:
    """Return whether a step failed."""
    # Records are encoded with `ok` first, so records of successful steps need not be decoded.
    if isinstance(record, bytes):
        return not record.startswith(_SUCCESS) and not codec.loads(record)["ok"]
    return not record["ok"]


def decoded(record: Stored) -> StepRecord:
    """Return a record that the caller only reads."""
    return codec.loads(record) if type(record) is bytes else cast(StepRecord, record)
