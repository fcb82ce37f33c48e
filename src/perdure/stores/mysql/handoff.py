"""Lease runs with the messages that make them due, in one transaction."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

from perdure.store import NewMessage, Receipt
from perdure.stores._handoff import Claimant
from perdure.stores._reading import Granted
from perdure.stores.mysql.database import Database, Result, Transaction
from perdure.stores.mysql.inbox import Inboxes, MessageBatch, Receiver, is_repeatable
from perdure.stores.mysql.leases import Leases, LockedRun, NewLease, timed_run
from perdure.stores.mysql.rows import read_names
from perdure.stores.mysql.statements import Statements

# The columns of LOCK_LEASED, and the last two. Snapshots may be large, so only those of the runs
# that are leased are read, together with their inboxes.
LOCK_CANDIDATES = """
    SELECT id, epoch, owner, wake_at, takeovers, NULL, queue, version, messages, status,
        UTC_TIMESTAMP(6), awaits, workflow
    FROM {runs} FORCE INDEX (PRIMARY) WHERE id IN (%s) ORDER BY id FOR UPDATE
"""
SNAPSHOTS = """
    SELECT id, CAST(snapshot AS BINARY) FROM {runs} FORCE INDEX (PRIMARY) WHERE id IN (%s)
"""


class _Candidate(NamedTuple):
    """A locked run, the names of the messages that it awaits, and its workflow."""

    run: LockedRun
    awaits: Sequence[str]
    workflow: str | None

    @property
    def receiver(self) -> Receiver:
        run = self.run
        is_unowned = run.owner is None
        return Receiver(run.status, is_unowned, self.awaits, run.wake_at, run.messages, run.now)

    def is_executed_by(self, claimant: Claimant) -> bool:
        """Return whether the claimant may get the run, if the run awaits a message."""
        return not self.run.queue and claimant.can_execute(self.workflow, self.run.version)


class Handoffs:
    """Leases of the runs whose stored ids begin with `prefix`, granted with a message."""

    def __init__(
        self,
        database: Database,
        statements: Statements,
        inboxes: Inboxes,
        leases: Leases,
        prefix: str,
    ) -> None:
        self._database = database
        self._bind = statements.bind
        self._inboxes = inboxes
        self._leases = leases
        self._prefix = prefix

    async def hand_off(
        self, messages: Sequence[NewMessage], claimant: Claimant
    ) -> tuple[list[Receipt], list[Granted]]:
        """Insert the messages, and lease or wake the runs that await them, which are locked."""

        async def work(transaction: Transaction) -> tuple[list[Receipt], list[Granted]]:
            batch = MessageBatch(messages, self._prefix)
            lock = self._bind(LOCK_CANDIDATES, batch.keys)
            find_duplicates = self._inboxes.find_duplicates(batch)
            locked, *duplicates = await transaction.run(lock, *find_duplicates)
            candidates = _candidates(locked)
            receivers = {key: candidate.receiver for key, candidate in candidates.items()}
            receipts = batch.judge(receivers, duplicates)
            leases = list(_new_leases(batch, candidates, claimant))
            return receipts, await self._finish(transaction, batch, leases)

        return await self._database.transact(work, repeatable=is_repeatable(messages))

    async def _finish(
        self, transaction: Transaction, batch: MessageBatch, leases: Sequence[NewLease]
    ) -> list[Granted]:
        """Write the messages and leases, and return the grants."""
        writes = [*self._inboxes.write(batch), *self._leases.lease(leases)]
        if not leases:
            if writes:
                await transaction.finish(*writes)
            return []
        snapshots = self._bind(SNAPSHOTS, [lease.run.key for lease in leases])
        results = await transaction.finish(*writes, snapshots, *self._leases.read(leases))
        data, *contents = results[len(writes) :]
        return [*self._leases.grants(_with_snapshots(leases, data), contents).values()]


def _candidates(locked: Result) -> dict[str, _Candidate]:
    """Return the locked runs by their stored ids."""
    runs = ((timed_run(row), awaits, workflow) for *row, awaits, workflow in locked.rows)
    return {
        run.key: _Candidate(run, read_names(awaits), workflow) for run, awaits, workflow in runs
    }


def _new_leases(
    batch: MessageBatch, candidates: Mapping[str, _Candidate], claimant: Claimant
) -> Iterator[NewLease]:
    """Yield leases of the first runs that the claimant can execute, up to its limit.

    The statement that leases a run also counts its messages, so the batch need not.
    """
    grantable = (key for key in batch.awaiting if candidates[key].is_executed_by(claimant))
    for key in islice(grantable, claimant.limit):
        sent = batch.sent_counts.pop(key)
        yield NewLease(candidates[key].run, claimant.owner, claimant.ttl, sent=sent)


def _with_snapshots(leases: Sequence[NewLease], result: Result) -> list[NewLease]:
    snapshots = dict(result.rows)
    return [
        lease._replace(run=lease.run._replace(snapshot=snapshots[lease.run.key]))
        for lease in leases
    ]
