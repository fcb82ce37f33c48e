"""What the new owner of a run gets: the run as read under the lease, and its messages."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from types import MappingProxyType
from typing import Any

from pymongo import UpdateOne

from perdure.snapshot import Snapshot
from perdure.store import INBOX_PAGE, Lease, Message
from perdure.stores._reading import Granted, read_grant
from perdure.stores.mongo.connection import relaxed
from perdure.stores.mongo.documents import read_run
from perdure.stores.mongo.inbox import (
    first_messages,
    inbox_of,
    inboxes_of,
    mark_consumed,
    message_keys,
    unconsumed_count,
)
from perdure.stores.mongo.journal import (
    Log,
    Positions,
    consumed_by,
    consumed_messages,
    journal_data,
    message_name,
    seal_logs,
)
from perdure.stores.mongo.schema import Collections
from perdure.stores.mongo.updates import incarnation_of, to_milliseconds


class Grants:
    """Creates the grants of leased runs, and remembers their positions."""

    def __init__(self, prefix: str, positions: Positions) -> None:
        self._prefix = prefix
        self._positions = positions

    async def read(
        self,
        db: Collections,
        runs: Mapping[str, Any],
        ttls: Mapping[str, timedelta],
        read_messages: Mapping[str, list[Message]] = MappingProxyType({}),
    ) -> dict[str, Granted]:
        """Fence out the previous owners of leased runs, and return the grants by `_id`.

        `read_messages` are the messages of some runs, if they were read with the lease.
        """
        older = {key: run["epochs"][:-1] for key, run in runs.items() if len(run["epochs"]) > 1}
        unread = {key: run for key, run in runs.items() if key not in read_messages}
        messages = {**read_messages, **await first_messages(db, inboxes_of(unread))}
        logs = await seal_logs(db, older) if older else {}
        lost_keys = await _lost_runs(db, [runs[key] for key in older])
        grants: dict[str, Granted] = {}
        to_mark: list[str] = []
        for key, run in runs.items():
            if key in lost_keys:
                continue
            consumed_names = consumed_messages(run, logs.get(key, ()))
            run_messages = messages.get(key, [])
            # A crash may have come between an entry and the mark on the message it consumed.
            names = {each.id: message_name(each.id) for each in run_messages}
            to_mark += message_keys(
                key, (id for id, name in names.items() if name in consumed_names)
            )
            inbox = tuple(each for each in run_messages if names[each.id] not in consumed_names)
            grants[key] = self._grant(run, ttls[key], logs.get(key, ()), inbox)
        if to_mark:
            await mark_consumed(db.inbox, to_mark)
        await _reset_takeovers(db, runs.values(), logs)
        return grants

    def _grant(
        self, run: Any, ttl: timedelta, logs: Sequence[Log], inbox: tuple[Message, ...]
    ) -> Granted:
        id, expires_at = run["_id"][len(self._prefix) :], run["wakeAt"]
        lease = Lease(id, run["owner"], int(run["epoch"]), expires_at, bool(inbox))
        is_whole = len(inbox) < INBOX_PAGE and unconsumed_count(run) < INBOX_PAGE
        consumed_names = consumed_by(logs)
        embedded_names = inbox_of(run).embedded_names if consumed_names else set[str]()
        self._positions.add(
            run["_id"],
            lease.epoch,
            incarnation_of(run),
            has_older_logs=bool(logs),
            # If there may be more, the owner does not know all of them, so no count may match.
            message_count=run.get("messageCount", 0) if is_whole else -1,
            messages={message_name(message.id): message.name for message in inbox},
            consumed=consumed_names,
            consumed_count=run.get("consumedCount", 0),
            unmarked=consumed_names & embedded_names,
        )
        now = expires_at - timedelta(milliseconds=to_milliseconds(ttl))
        created = run.get("incarnation") == run["claim"]
        # Counted only now, because entries could still be added until the logs were sealed.
        takeovers = sum(epoch > _last_written(logs) for epoch in run["expired"])
        read = partial(_read, id, run, logs)
        header = {"queue": run["queue"], "version": run["version"]}
        return read_grant(lease, read, now, inbox, takeovers, created, **header)


def _read(id: str, run: Mapping[str, Any], logs: Sequence[Log]) -> Snapshot:
    return read_run(id, run, journal_data(logs))


def _last_written(logs: Iterable[Log]) -> int:
    return max((log.epoch for log in logs if log.entries), default=0)


async def _reset_takeovers(
    db: Collections, runs: Iterable[Any], logs: Mapping[str, Sequence[Log]]
) -> None:
    """Forget expired leases up to one that wrote an entry; lists show the others."""
    writes = [
        UpdateOne(
            {"_id": run["_id"], "epoch": run["epoch"]}, {"$pull": {"expired": {"$lte": last}}}
        )
        for run in runs
        if run["expired"]
        and (last := _last_written(logs.get(run["_id"], ()))) >= min(run["expired"])
    ]
    if writes:
        await relaxed(db.runs).bulk_write(writes, ordered=False)


async def _lost_runs(db: Collections, runs: Sequence[Any]) -> set[str]:
    """Return the runs that got another owner, or were settled, since they were leased.

    Their logs, as read, do not belong to the snapshot of the lease: an owner in between may have
    removed parts of them, and finished steps would be executed again. Messages need no such check:
    a wait that receives a message or misses one is recorded first, and that is refused.
    """
    if not runs:
        return set()
    keys = [run["_id"] for run in runs]
    fields = {"owner": 1, "settled": 1}
    cursor = db.runs.find({"_id": {"$in": keys}}, fields, batch_size=len(keys) + 1)
    current = {run["_id"]: run async for run in cursor}
    return {run["_id"] for run in runs if not _is_same_lease(run, current.get(run["_id"]))}


def _is_same_lease(run: Any, current: Any) -> bool:
    # Compares the owner rather than the epoch: of two concurrent requests of one owner, the second
    # would otherwise make the first lose its grant.
    if current is None or current.get("owner") != run["owner"]:
        return False
    return bool(current.get("settled", {}).get("epoch", 0) < run["epoch"])
