"""Lease a run with the message that makes it due: from a signal to its worker in one commit."""

from collections.abc import Sequence

from perdure.store import INBOX_PAGE, NewMessage, Receipt
from perdure.stores._handoff import Claimant
from perdure.stores._reading import Granted
from perdure.stores.postgres.database import Database
from perdure.stores.postgres.due import ranges_of
from perdure.stores.postgres.inbox import MessageBatch
from perdure.stores.postgres.leases import Leases
from perdure.stores.postgres.statements import Statements, compose

_IS_GRANTABLE = """
    owner IS NULL AND queue = '' AND EXISTS (
        SELECT FROM unnest(
            (SELECT $1::text[]), (SELECT $2::bigint[]), (SELECT $3::bigint[])
        ) AS supported (workflow, first, last)
        WHERE supported.workflow = run.workflow
            AND run.version BETWEEN supported.first AND supported.last
    )
"""

# Sends a message like SEND_ONE, and leases the run like CLAIM instead of making it due.
#
# `target` decides everything from the locked row: PostgreSQL evaluates its columns again on the
# newest version if the statement waited for the lock. So a run that another handoff or claim leased
# in the meantime is owned, and not granted; and one whose rest began to await the message in the
# meantime is granted. The updates find the version as of the statement's start, follow it to the
# locked one, which no other process can replace, and return the snapshot in that.
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
HAND_OFF_ONE = compose(
    """
    WITH target AS MATERIALIZED (
        SELECT id, first_epoch, messages,
            coalesce(status, 'running') IN ('completed', 'failed', 'cancelled') AS is_over,
            awaits ? $7 AND {is_grantable} AS is_granted
        FROM {runs} AS run WHERE id = $6 FOR NO KEY UPDATE
    ), sent AS (
        INSERT INTO {inbox} (run, first_epoch, name, payload, dedup, sent_at)
        SELECT id, first_epoch, $7, $8, $9, statement_timestamp() FROM target WHERE NOT is_over
        ON CONFLICT DO NOTHING
        RETURNING seq, name, payload, sent_at
    ), leased AS (
        UPDATE {runs} AS run SET
            {set_claimed}, owner = $4, wake_at = statement_timestamp() + $5::interval,
            messages = run.messages + 1
        WHERE run.id = (SELECT id FROM target WHERE is_granted) AND EXISTS (SELECT FROM sent)
        RETURNING {lease_columns}
    ), counted AS (
        UPDATE {runs} AS run SET
            messages = run.messages + 1,
            wake_at = CASE WHEN owner IS NULL AND awaits ? $7
                THEN statement_timestamp() ELSE run.wake_at END
        WHERE run.id = (SELECT id FROM target WHERE NOT is_granted) AND EXISTS (SELECT FROM sent)
        RETURNING {notify_others_if_due}
    )
    SELECT 1, is_over, sent.seq IS NOT NULL, target.messages, is_over AND EXISTS (
            SELECT FROM {inbox} AS stored
            WHERE stored.run = target.id AND stored.first_epoch = target.first_epoch
                AND stored.dedup = $9
        ),
        leased.*, target.messages > 0 AS stale,
        CASE WHEN leased.id IS NOT NULL
            THEN ARRAY[ROW(sent.seq, sent.name, sent.payload, sent.sent_at)] END AS inbox
    FROM target LEFT JOIN sent ON true LEFT JOIN leased ON true
    """,
    is_grantable=_IS_GRANTABLE,
)

# The same for several messages. The runs are locked in the order of their ids, so that concurrent
# calls cannot deadlock. `decided` depends on the locked rows only, and puts each run in one of the
# two updates; those beyond the limit, which is $6, become due.
HAND_OFF = compose(
    """
    WITH target AS MATERIALIZED (
        SELECT run.* FROM unnest((SELECT $7::text[])) AS target (id)
        CROSS JOIN LATERAL (
            SELECT id, first_epoch, messages, awaits, owner IS NULL AS is_unowned,
                {is_grantable} AS is_grantable,
                coalesce(status, 'running') IN ('completed', 'failed', 'cancelled') AS is_over
            FROM {runs} AS run WHERE run.id = target.id FOR NO KEY UPDATE
        ) AS run
    ), message AS MATERIALIZED (
        SELECT message.*, target.first_epoch, target.messages, target.is_over, target.is_grantable,
            target.is_unowned AND target.awaits ? message.name AS is_awaited
        FROM unnest(
            (SELECT $8::text[]), (SELECT $9::text[]), (SELECT $10::bytea[]), (SELECT $11::bytea[])
        ) WITH ORDINALITY AS message (id, name, payload, dedup, i)
        JOIN target USING (id)
    ), sent AS (
        INSERT INTO {inbox} (run, first_epoch, name, payload, dedup, sent_at)
        SELECT id, first_epoch, name, payload, dedup, statement_timestamp()
        FROM message WHERE NOT is_over ORDER BY i
        ON CONFLICT DO NOTHING
        RETURNING run, dedup, seq, name, payload, sent_at
    ), receipt AS MATERIALIZED (
        SELECT message.*, NOT is_over AND (message.dedup IS NULL OR sent.run IS NOT NULL) AS is_sent
        FROM message LEFT JOIN sent ON sent.run = message.id AND sent.dedup = message.dedup
    ), counted AS (
        SELECT id, count(*) AS messages, min(i) AS i, bool_or(is_awaited) AS is_awaited,
            bool_or(is_awaited AND is_grantable) AS is_grantable
        FROM receipt WHERE is_sent GROUP BY id
    ), decided AS MATERIALIZED (
        SELECT id, messages, i, is_awaited, is_grantable
            AND row_number() OVER (PARTITION BY is_grantable ORDER BY i) <= $6 AS is_granted
        FROM counted
    ), leased AS (
        UPDATE {runs} AS run SET
            {set_claimed}, owner = $4, wake_at = statement_timestamp() + $5::interval,
            messages = run.messages + decided.messages
        FROM decided WHERE run.id = decided.id AND decided.is_granted
        RETURNING decided.i, {lease_columns}
    ), updated AS (
        UPDATE {runs} AS run SET
            messages = run.messages + decided.messages,
            wake_at = CASE WHEN decided.is_awaited
                THEN statement_timestamp() ELSE run.wake_at END
        FROM decided WHERE run.id = decided.id AND NOT decided.is_granted
        RETURNING {notify_others_if_due}
    ), new_inbox AS (
        SELECT run, (
            array_agg(ROW(seq, name, payload, sent_at) ORDER BY seq)
        )[1:{inbox_page}] AS messages
        FROM sent GROUP BY run
    )
    SELECT receipt.i, is_over, is_sent, receipt.messages, is_over AND (
            SELECT true FROM {inbox} AS stored
            WHERE stored.run = receipt.id AND stored.first_epoch = receipt.first_epoch
                AND stored.dedup = receipt.dedup
        ) IS NOT NULL,
        leased.*, receipt.messages > 0 AS stale, new_inbox.messages AS inbox
    FROM receipt LEFT JOIN (leased JOIN new_inbox ON new_inbox.run = leased.id) USING (i)
    """,
    is_grantable=_IS_GRANTABLE,
    inbox_page=str(INBOX_PAGE),
)

# The first columns of both statements, before those of the grant.
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
        self, messages: Sequence[NewMessage], claimant: Claimant
    ) -> tuple[list[Receipt], list[Granted]]:
        """Send messages, and grant runs that await them to the claimant."""
        batch = MessageBatch(messages, self._prefix)
        values = [*_versions(claimant), claimant.owner, claimant.ttl]
        if len(batch.rows) == 1:
            template, values = HAND_OFF_ONE, [*values, *batch.rows[0]]
        else:
            template, values = HAND_OFF, [*values, claimant.limit, *batch.columns()]
        statement = self._statements.sql(template)
        rows = await self._fetch(statement, *values, repeatable=batch.is_repeatable)
        granted_rows = [row for row in rows if row["id"] is not None]
        grants = await self._leases.read(granted_rows) if granted_rows else {}
        return batch.receipts(row[:_RECEIPT_COLUMNS] for row in rows), list(grants.values())


def _versions(claimant: Claimant) -> Sequence[Sequence[object]]:
    """Return the workflows that the claimant supports, and the first and last version of each."""
    ranges = ranges_of(claimant.supports, {"": claimant.limit})
    return list(zip(*((each.workflow, each.first, each.last) for each in ranges), strict=True))
