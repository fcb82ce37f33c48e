"""Lease a run with the message that makes it due: from a signal to its worker in one commit."""

from collections.abc import Sequence

from perdure.store import NewMessage, Receipt
from perdure.stores._handoff import Claimant
from perdure.stores._reading import Granted
from perdure.stores.postgres.database import Database
from perdure.stores.postgres.due import ranges_of
from perdure.stores.postgres.inbox import MessageBatch
from perdure.stores.postgres.leases import Leases
from perdure.stores.postgres.statements import Statements

# Sends a message like SEND_ONE, and leases the run like CLAIM instead of making it due.
#
# `target` decides everything from the locked row: PostgreSQL evaluates its columns again on the
# newest version if the statement waited for the lock. So a run that another handoff or claim leased
# in the meantime is owned, and not granted; and one whose rest began to await the message in the
# meantime is granted. No other process can change the row between this lock and the update, which
# finds the same version, and returns the snapshot in it.
#
# `sent` is empty if the run is over or the dedup id exists. Then nothing is leased: a repetition
# after a lost reply grants nothing.
#
# A run has either `leased` or `counted`, which alone sends a notification: a granted run is not
# due, and the others must learn of one that is.
#
# The inbox is read as of the statement's start, so neither the new message is in it, nor a message
# that was committed during the wait. The first is returned by `sent`. `messages` of the locked row
# counts all others: if there are any, the row is `stale`, and the inbox is read again under the
# lease. So is the journal, unless the locked row is `clean`.
HAND_OFF_ONE = """
    WITH target AS MATERIALIZED (
        SELECT id, first_epoch, messages,
            coalesce(status, 'running') IN ('completed', 'failed', 'cancelled') AS is_over,
            owner IS NULL AND queue = '' AND awaits ? $2 AND EXISTS (
                SELECT FROM unnest(
                    (SELECT $7::text[]), (SELECT $8::bigint[]), (SELECT $9::bigint[])
                ) AS supported (workflow, first, last)
                WHERE supported.workflow = run.workflow
                    AND run.version BETWEEN supported.first AND supported.last
            ) AS is_granted
        FROM {runs} AS run WHERE id = $1 FOR NO KEY UPDATE
    ), sent AS (
        INSERT INTO {inbox} (run, first_epoch, name, payload, dedup, sent_at)
        SELECT id, first_epoch, $2, $3, $4, statement_timestamp() FROM target WHERE NOT is_over
        ON CONFLICT DO NOTHING
        RETURNING seq, name, payload, sent_at
    ), leased AS (
        UPDATE {runs} AS run SET
            {set_claimed}, owner = $5, wake_at = statement_timestamp() + $6::interval,
            messages = run.messages + 1
        WHERE run.id = (SELECT id FROM target WHERE is_granted) AND EXISTS (SELECT FROM sent)
        RETURNING {lease_columns}
    ), counted AS (
        UPDATE {runs} AS run SET
            messages = run.messages + 1,
            wake_at = CASE WHEN owner IS NULL AND awaits ? $2
                THEN statement_timestamp() ELSE run.wake_at END
        WHERE run.id = (SELECT id FROM target WHERE NOT is_granted) AND EXISTS (SELECT FROM sent)
        RETURNING {notify_others_if_due}
    )
    SELECT 1, is_over, sent.seq IS NOT NULL, target.messages, is_over AND EXISTS (
            SELECT FROM {inbox} AS stored
            WHERE stored.run = target.id AND stored.first_epoch = target.first_epoch
                AND stored.dedup = $4
        ),
        leased.*, target.messages > 0 AS stale,
        CASE WHEN leased.id IS NOT NULL
            THEN ARRAY[ROW(sent.seq, sent.name, sent.payload, sent.sent_at)] END AS inbox
    FROM target LEFT JOIN sent ON true LEFT JOIN leased ON true
"""


_RECEIPT_COLUMNS = 5


class Handoffs:
    """Leases of the runs whose stored ids begin with `prefix`, granted with a message."""

    def __init__(
        self, database: Database, statements: Statements, leases: Leases, prefix: str
    ) -> None:
        self._fetch = database.fetch
        self._statements = statements
        self._leases = leases
        self._prefix = prefix

    async def hand_off(
        self, message: NewMessage, claimant: Claimant
    ) -> tuple[list[Receipt], list[Granted]]:
        """Send a message, and grant its run to the claimant if the run awaits it."""
        batch = MessageBatch([message], self._prefix)
        statement = self._statements.sql(HAND_OFF_ONE)
        values = (*batch.rows[0], claimant.owner, claimant.ttl, *_versions(claimant))
        rows = await self._fetch(statement, *values, repeatable=batch.is_repeatable)
        granted_rows = [row for row in rows if row["id"] is not None]
        grants = await self._leases.read(granted_rows) if granted_rows else {}
        return batch.receipts(row[:_RECEIPT_COLUMNS] for row in rows), list(grants.values())


def _versions(claimant: Claimant) -> Sequence[Sequence[object]]:
    """Return the workflows that the claimant supports, and the first and last version of each."""
    ranges = ranges_of(claimant.supports, {"": claimant.limit})
    return list(zip(*((each.workflow, each.first, each.last) for each in ranges), strict=True))
