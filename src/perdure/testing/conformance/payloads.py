"""Checks with values that break stores which parse JSON, and with values that are too large."""

from typing import Any

import pytest

from perdure.errors import InvalidArgument, ValueTooLarge
from perdure.store import Entry, LeaseRequest, NewMessage, Rest, Store, capabilities
from perdure.testing.conformance.harness import (
    LONG,
    Harness,
    acquire_run,
    need_inbox,
    need_journal,
    need_lease,
    send_one,
    steps_of,
    summary_of,
)
from perdure.testing.conformance.samples import as_json, snapshot, with_step

VALUES: dict[str, Any] = {
    "NUL": "a\0b\0",
    "control characters": "".join(map(chr, range(32))) + "\x7f\x80\x9f",
    "line separators": "\u2028\u2029\r\n",
    "emoji": "👩‍👩‍👧🦊",
    "noncharacters": "\ufffe\uffff",
    "looks like JSON": '{"a": [1, "\\u0000"]}',
    "looks like SQL": "'); DROP TABLE runs; --",
    "64-bit integers": [2**63 - 1, -(2**63), 2**53, 2**53 + 1, 0],
    "floats": [0.1, 1e308, 5e-324, -0.5, 1.5e-10, 123456789.123456789],
    "booleans and null": [True, False, None],
    "tags": {"~datetime": "2030-01-01T00:00:00"},
    "escaped tags": {"~": {"~datetime": 1}},
    "keys with dots and dollars": {"a.b": 1, "$set": {"$inc": {"x": 1}}, "$": 2, ".": 3},
    "empty key": {"": {"": ""}},
    "prototype keys": {"__proto__": {"x": 1}, "constructor": None, "hasOwnProperty": []},
    "keys that look like numbers": {"10": 1, "9": 2, "-1": 3, "1.0": 4},
    "keys with NUL": {"a\0": 1},
    "case pairs": {"A": 1, "a": 2},
    "Mongo types": {"$oid": "507f1f77bcf86cd799439011", "$date": 0},
    "empty": [[], {}, "", [[]], [{}]],
    "long text": "🦊x" * 100_000,
    "many items": list(range(20_000)),
}


def nested_value(depth: int) -> Any:
    """Return a value that is nested to this depth."""
    value: Any = "bottom"
    for level in range(depth):
        value = {"down": value} if level % 2 else [value]
    return value


class PayloadChecks(Harness):
    """Values of steps, metadata and payloads."""

    async def test_values_are_loaded_unchanged(self, store: Store) -> None:
        """A loaded snapshot is what was saved, including types and the order of keys."""
        run_snapshot = snapshot(metadata=VALUES, **VALUES)
        await store.save("run", run_snapshot)
        loaded = await store.load("run")
        assert loaded is not None
        assert exact(loaded["steps"]) == exact(run_snapshot["steps"])
        assert exact(loaded.get("metadata")) == exact(VALUES)

    async def test_journaled_values_are_loaded_unchanged(self, store: Store) -> None:
        """A loaded snapshot is what was appended, before a rest and after it."""
        journal = need_journal(store)
        grant = await acquire_run(journal)
        run_snapshot = snapshot(**VALUES)
        for n, (key, value) in enumerate(VALUES.items()):
            data = as_json(with_step(key, value))
            await journal.append([Entry("run", grant.lease.epoch, n, data, step=key)])
        loaded = await journal.load("run")
        assert loaded is not None
        assert exact(loaded["steps"]) == exact(run_snapshot["steps"])
        rest = Entry("run", grant.lease.epoch, 999, as_json(run_snapshot), rest=Rest("completed"))
        await journal.append([rest])
        loaded = await journal.load("run")
        assert loaded is not None
        assert exact(loaded["steps"]) == exact(run_snapshot["steps"])

    async def test_deeply_nested_values_are_loaded_unchanged(self, store: Store) -> None:
        """A value may be deeply nested."""
        await store.save("run", snapshot(deep=nested_value(80)))
        assert await store.load("run") == snapshot(deep=nested_value(80))

    async def test_payloads_are_returned_byte_for_byte(self, store: Store) -> None:
        """`payload` is JSON and is returned as the same bytes."""
        inboxes = need_inbox(store)
        await acquire_run(inboxes)
        payloads = [as_json(value) for value in VALUES.values()] + [b'{ "b" : 1.0, "a":1e2 }']
        for payload in payloads:
            await send_one(inboxes, "run", "paid", payload)
        assert [message.payload for message in await inboxes.inbox("run")] == payloads

    async def test_a_snapshot_that_is_too_large_is_refused(self, store: Store) -> None:
        """More than `max_value_size` bytes are refused, and the stored run stays unchanged."""
        await store.save("run", snapshot("a"))
        with pytest.raises(ValueTooLarge):
            await store.save("run", snapshot(big="x" * capabilities(store).max_value_size))
        assert await steps_of(store) == ["a"]

    async def test_a_payload_that_is_too_large_is_refused(self, store: Store) -> None:
        """More than `max_value_size` bytes are refused in a message."""
        inboxes = need_inbox(store)
        await acquire_run(inboxes)
        with pytest.raises(ValueTooLarge):
            await send_one(
                inboxes, "run", "paid", as_json("x" * capabilities(store).max_value_size)
            )
        assert list(await inboxes.inbox("run")) == []

    async def test_no_message_of_a_refused_call_is_written(self, store: Store) -> None:
        """Arguments are refused before any message is written."""
        inboxes = need_inbox(store)
        await acquire_run(inboxes)
        big = as_json("x" * capabilities(store).max_value_size)
        for bad in (NewMessage("run", "paid", big), NewMessage("", "paid", b"null")):
            with pytest.raises((InvalidArgument, ValueTooLarge)):
                await inboxes.send([NewMessage("run", "sent", b"null"), bad])
        assert list(await inboxes.inbox("run")) == []

    async def test_a_first_snapshot_that_is_too_large_is_refused(self, store: Store) -> None:
        """More than `max_value_size` bytes are refused, and no run is created."""
        leases = need_lease(store)
        big = as_json(snapshot(big="x" * capabilities(store).max_value_size))
        with pytest.raises(ValueTooLarge):
            await leases.acquire([LeaseRequest("run", "ana", LONG, create=big)])
        assert await leases.load("run") is None

    async def test_steps_may_be_named_like_fields_of_a_run(self, store: Store) -> None:
        """Such a step does not change the run's own fields."""
        fields = [
            "status",
            "workflow",
            "id",
            "_id",
            "epoch",
            "owner",
            "wake_at",
            "steps",
            "snapshot",
        ]
        await store.save("run", snapshot(*fields, workflow="order"))
        run = await summary_of(store)
        assert (run.status, run.workflow) == ("running", "order")
        assert await steps_of(store) == fields


def exact(value: Any) -> Any:
    """Return a value in a form that compares equal only if types and key order are equal."""
    match value:
        case dict():
            return [(key, exact(item)) for key, item in value.items()]
        case list():
            return [exact(item) for item in value]
        case _:
            return (type(value).__name__, value)
