"""What the new owner of a run gets: the run as it is under the lease, and its messages."""

from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import partial
from types import MappingProxyType
from typing import Any

from perdure.snapshot import Snapshot
from perdure.store import Lease, Message
from perdure.stores._reading import Granted, read_grant
from perdure.stores.mongo.documents import read_run
from perdure.stores.mongo.inbox import mark_consumed, message_keys, unconsumed
from perdure.stores.mongo.journal import (
    Log,
    Positions,
    consumed_messages,
    journal_data,
    seal_logs,
)
from perdure.stores.mongo.schema import Collections
from perdure.stores.mongo.updates import incarnation_of, runs_with_count, to_milliseconds


class Grants:
    """Makes grants of leased runs, and remembers their positions."""

    def __init__(self, prefix: str, positions: Positions) -> None:
        self._prefix = prefix
        self._positions = positions

    async def read(
        self,
        db: Collections,
        leased: Mapping[str, Any],
        ttls: Mapping[str, timedelta],
        known: Mapping[str, list[Message]] = MappingProxyType({}),
    ) -> dict[str, Granted]:
        """Fence out the previous owners of leased runs, and return the grants by `_id`.

        `known` are the messages of some runs that were read with the lease.
        """
        older = {key: run["epochs"][:-1] for key, run in leased.items() if len(run["epochs"]) > 1}
        counted = runs_with_count(leased)
        unread = {key: counted[key] for key in counted if key not in known}
        messages = {**known, **await unconsumed(db, unread)}
        logs = await seal_logs(db, older) if older else {}
        lost = await _lost(db, [leased[key] for key in older])
        grants: dict[str, Granted] = {}
        to_mark: list[str] = []
        for key, run in leased.items():
            if key in lost:
                continue
            consumed = consumed_messages(run, logs.get(key, ()))
            stored = messages.get(key, [])
            # A crash may have come between an entry and the mark on the message it consumed.
            to_mark += message_keys(key, (each.id for each in stored if each.id in consumed))
            inbox = tuple(each for each in stored if each.id not in consumed)
            grants[key] = self._grant(run, ttls[key], logs.get(key, ()), inbox)
        if to_mark:
            await mark_consumed(db, to_mark)
        return grants

    def _grant(
        self, run: Any, ttl: timedelta, logs: Sequence[Log], inbox: tuple[Message, ...]
    ) -> Granted:
        id, expires_at = run["_id"][len(self._prefix) :], run["wakeAt"]
        lease = Lease(id, run["owner"], run["epoch"], expires_at, bool(inbox))
        self._positions.add(
            run["_id"],
            lease.epoch,
            incarnation_of(run),
            has_older_logs=bool(logs),
            message_count=run.get("messageCount", 0),
            messages={message.id: message.name for message in inbox},
        )
        now = expires_at - timedelta(milliseconds=to_milliseconds(ttl))
        created = run.get("incarnation") == run["claim"]
        # Counted only now: entries could still be added until the logs were sealed.
        last_written = max((log.epoch for log in logs if log.entries), default=0)
        takeovers = sum(epoch > last_written for epoch in run["expired"])
        read = partial(_read, id, run, logs)
        return read_grant(lease, read, now, inbox, takeovers, created)


def _read(id: str, run: Mapping[str, Any], logs: Sequence[Log]) -> Snapshot:
    return read_run(id, run, journal_data(logs))


async def _lost(db: Collections, leased: Sequence[Any]) -> set[str]:
    """Return the runs that got another owner, or were settled, since they were leased.

    What was read of their logs does not belong to the snapshot of the lease: an owner in between
    may have removed some of it, and finished steps would be executed again. Messages need no such
    check: a wait that receives a message or misses one is recorded first, and that is refused.
    """
    if not leased:
        return set()
    keys = [run["_id"] for run in leased]
    fields = {"owner": 1, "settled": 1}
    found = db.runs.find({"_id": {"$in": keys}}, fields, batch_size=len(keys) + 1)
    current = {run["_id"]: run async for run in found}
    return {run["_id"] for run in leased if not _is_same_lease(run, current.get(run["_id"]))}


def _is_same_lease(leased: Any, current: Any) -> bool:
    # By the owner and not by the epoch: one that asks twice at once would lose to itself.
    if current is None or current.get("owner") != leased["owner"]:
        return False
    return bool(current.get("settled", {}).get("epoch", 0) < leased["epoch"])
