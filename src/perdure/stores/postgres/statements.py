"""The statements of the PostgreSQL store, each one round trip and one commit.

Every statement that writes runs locks their rows first, in the order of the ids, and decides by
what it reads from the locked rows. What it reads from other tables is as old as its snapshot and
may lack what was committed while it waited for a lock: where that would matter, a column of the
locked row (`clean`, `mail`, `xmin`) tells.

Arrays are passed as `(SELECT $1::text[])`, which hides their length from the planner: it would make
a new plan for every length, and planning takes longer than writing. `LATERAL` with a lock of its
own keeps it to one index lookup per run; a join that was planned for a small table would go on
scanning it when it has grown.
"""

from perdure.stores.postgres.schema import Names

LOAD = """
    SELECT {snapshot} AS snapshot, run.updated_at, (
        SELECT string_agg(entry.data, ',' ORDER BY entry.epoch, entry.n) FROM {journal} AS entry
        WHERE entry.run = run.id AND (entry.epoch, entry.n) > (run.folded_epoch, run.folded_n)
    ) AS journal
    FROM {runs} AS run WHERE run.id = $1
"""

SAVE = """
    WITH emptied AS (
        DELETE FROM {journal} WHERE run = $1
    )
    INSERT INTO {runs} AS run (
        id, snapshot, exact, workflow, status, wake_at, awaits,
        epoch, born, folded_epoch, updated_at
    )
    SELECT $1, {json_of_data}, {exact_of_data}, $3, $4, $5, $6::text::jsonb,
        {clock}, {clock}, {clock}, statement_timestamp()
    FROM (SELECT $2::bytea AS data) AS given
    ON CONFLICT (id) DO UPDATE SET
        snapshot = excluded.snapshot, exact = excluded.exact, workflow = excluded.workflow,
        status = excluded.status, awaits = excluded.awaits, updated_at = excluded.updated_at,
        wake_at = CASE WHEN run.mail > 0 AND (
            SELECT count(*) <> run.mail OR bool_or(excluded.awaits ? message.name)
            FROM {inbox} AS message
            WHERE message.run = run.id AND message.born = run.born AND NOT message.taken
        ) THEN statement_timestamp() ELSE excluded.wake_at END,
        epoch = greatest(run.epoch + 1, excluded.epoch),
        folded_epoch = greatest(run.epoch + 1, excluded.epoch), folded_n = -1,
        owner = NULL, takeovers = 0, clean = true
    RETURNING {hint_if_due}
"""

DELETE = """
    WITH run AS (
        DELETE FROM {runs} WHERE id = $1 RETURNING id
    ), emptied AS (
        DELETE FROM {journal} WHERE run = $1
    ), unread AS (
        DELETE FROM {inbox} WHERE run = $1
    )
    SELECT count(*) FROM run
"""

LIST = """
    SELECT run.id, run.updated_at, {status} AS status, {workflow} AS workflow
    FROM {runs} AS run
    WHERE starts_with(run.id, $1) {more}
    ORDER BY run.updated_at DESC, run.id DESC
    LIMIT $2
"""

# A transaction is told from the next one by when it began.
FENCE = """
    SELECT epoch = $2 AND owner IS NOT NULL, transaction_timestamp() FROM {runs} WHERE id = $1
"""

# Locks the row in one statement, so that the next one sees all that was written before.
HOLD = FENCE + " FOR NO KEY UPDATE"

IS_KNOWN = "SELECT EXISTS (SELECT FROM {journal} WHERE run = $1 AND epoch = $2 AND n = $3)"

CREATE_ONE = """
    INSERT INTO {runs} (
        id, snapshot, exact, workflow, status, owner, wake_at,
        epoch, born, folded_epoch, clean, updated_at
    )
    SELECT $1, {json_of_data}, {exact_of_data}, $5, 'running', $2,
        statement_timestamp() + $3::interval, {clock}, {clock}, {clock}, false,
        statement_timestamp()
    FROM (SELECT $4::bytea AS data) AS want
    ON CONFLICT (id) DO NOTHING
    RETURNING id, epoch
"""

CREATE = """
    INSERT INTO {runs} (
        id, snapshot, exact, workflow, status, owner, wake_at,
        epoch, born, folded_epoch, clean, updated_at
    )
    SELECT want.id, {json_of_data}, {exact_of_data}, want.workflow, 'running', want.owner,
        statement_timestamp() + want.ttl, {clock}, {clock}, {clock}, false, statement_timestamp()
    FROM unnest(
        (SELECT $1::text[]), (SELECT $2::text[]), (SELECT $3::interval[]), (SELECT $4::bytea[]),
        (SELECT $5::text[])
    ) AS want (id, owner, ttl, data, workflow)
    ON CONFLICT (id) DO NOTHING
    RETURNING id, epoch
"""

# `clean` stays when the run was at rest: nobody has written to its journal since. An entry that was
# committed while this waited for the row is missed: `takeovers` is then too high until another one.
# Not EXISTS, for which the planner may read the whole journal.
_LEASED = """
    status = 'running', awaits = '[]', clean = run.clean AND run.owner IS NULL,
    takeovers = CASE
        WHEN run.clean AND run.owner IS NULL THEN 0
        WHEN (
            SELECT true FROM {journal} AS entry
            WHERE entry.run = run.id AND entry.epoch = run.epoch LIMIT 1
        ) THEN 0
        ELSE run.takeovers
            + (run.owner IS NOT NULL AND run.wake_at <= statement_timestamp())::integer
    END,
    epoch = greatest(run.epoch + 1, {clock})
"""
_GRANTED = """
    run.id, run.owner, run.epoch, run.folded_epoch, run.wake_at, run.takeovers, run.clean,
    run.mail, run.updated_at, {snapshot} AS snapshot, {unread} AS inbox, NULL::bytea AS journal,
    statement_timestamp() AS now
"""
# Whether the row was written after the statement began: the inbox it read is then an older one.
_IS_STALE = """
    leased.mail > 0 AND held.version <> (SELECT xmin FROM {runs} AS seen WHERE seen.id = held.id)
"""
_UNREAD = """
    CASE WHEN run.mail > 0 THEN (
        SELECT array_agg(ROW(seq, name, payload, sent_at) ORDER BY seq) FROM {inbox} AS message
        WHERE message.run = run.id AND message.born = run.born AND NOT message.taken
    ) END
"""

LEASE = """
    WITH held AS MATERIALIZED (
        SELECT want.owner, want.ttl, run.id, run.version,
            run.owner IS NULL OR run.owner = want.owner
                OR run.wake_at <= statement_timestamp() AS free
        FROM unnest((SELECT $1::text[]), (SELECT $2::text[]), (SELECT $3::interval[]))
            AS want (id, owner, ttl)
        CROSS JOIN LATERAL (
            SELECT id, owner, wake_at, xmin AS version FROM {runs} AS run
            WHERE run.id = want.id FOR NO KEY UPDATE
        ) AS run
    ), leased AS (
        UPDATE {runs} AS run SET
            {leased}, owner = held.owner, wake_at = statement_timestamp() + held.ttl
        FROM held
        WHERE run.id = held.id AND held.free
        RETURNING {granted}
    )
    SELECT held.id AS held, leased.*, {is_stale} AS stale FROM held LEFT JOIN leased USING (id)
"""

CLAIM = """
    WITH held AS MATERIALIZED (
        SELECT id, wake_at AS since, xmin AS version FROM {runs} AS run
        WHERE wake_at <= statement_timestamp() AND starts_with(id, $4) {more}
        ORDER BY wake_at
        LIMIT $3
        FOR NO KEY UPDATE SKIP LOCKED
    ), leased AS (
        UPDATE {runs} AS run SET
            {leased}, owner = $1, wake_at = statement_timestamp() + $2::interval
        WHERE run.id = ANY (ARRAY(SELECT id FROM held))
        RETURNING {granted}
    )
    SELECT leased.*, {is_stale} AS stale
    FROM held JOIN leased USING (id) ORDER BY held.since, held.id
"""

READ_LEASED = """
    SELECT run.id, run.owner, run.folded_epoch, (
        SELECT string_agg(entry.data, ',' ORDER BY entry.epoch, entry.n) FROM {journal} AS entry
        WHERE entry.run = run.id AND (entry.epoch, entry.n) > (run.folded_epoch, run.folded_n)
    ) AS journal, {unread} AS inbox
    FROM {runs} AS run WHERE run.id = ANY ($1::text[])
"""

INBOXES = """
    SELECT message.run, message.seq, message.name, message.payload, message.sent_at
    FROM {runs} AS run
    JOIN {inbox} AS message ON message.run = run.id AND message.born = run.born
    WHERE run.id = ANY ($1::text[]) AND NOT message.taken
    ORDER BY message.seq
"""

RENEW = """
    {held}
    UPDATE {runs} AS run SET wake_at = statement_timestamp() + $4::interval
    WHERE run.id = ANY (ARRAY(SELECT id FROM held))
    RETURNING run.id, run.epoch, run.wake_at, run.mail > 0 AS mail
"""

RELEASE = """
    {held}
    UPDATE {runs} AS run SET
        owner = NULL, clean = false, wake_at = coalesce($4, statement_timestamp())
    WHERE run.id = ANY (ARRAY(SELECT id FROM held))
    RETURNING {hint_if_due}
"""

ENQUEUE = """
    INSERT INTO {runs} AS run (
        id, workflow, snapshot, exact, status, wake_at, epoch, born, folded_epoch, updated_at
    )
    SELECT new.id, new.workflow, {json_of_data}, {exact_of_data}, 'running',
        coalesce(new.wake_at, statement_timestamp()), {clock}, {clock}, {clock},
        statement_timestamp()
    FROM unnest(
        (SELECT $1::text[]), (SELECT $2::text[]), (SELECT $3::bytea[]), (SELECT $4::timestamptz[])
    ) AS new (id, workflow, data, wake_at)
    ON CONFLICT (id) DO NOTHING
    RETURNING run.id, {hint_if_due}
"""

DUE = """
    SELECT run.id, run.wake_at FROM {runs} AS run
    WHERE run.wake_at <= $1 AND starts_with(run.id, $3)
        AND (run.owner IS NULL OR run.wake_at <= statement_timestamp()) {more}
    ORDER BY run.wake_at, run.id
    LIMIT $2
"""

SEND = """
    WITH run AS MATERIALIZED (
        SELECT id, born, owner IS NULL AND awaits ? $2 AS awaited,
            coalesce(status, 'running') IN ('completed', 'failed', 'cancelled') AS over
        FROM {runs} WHERE id = $1 FOR NO KEY UPDATE
    ), sent AS (
        INSERT INTO {inbox} (run, born, name, payload, dedup, sent_at)
        SELECT id, born, $2, $3, $4, statement_timestamp() FROM run WHERE NOT over
        ON CONFLICT DO NOTHING
        RETURNING seq
    ), told AS (
        UPDATE {runs} AS run SET
            mail = run.mail + 1,
            wake_at = CASE WHEN owner IS NULL AND awaits ? $2
                THEN statement_timestamp() ELSE run.wake_at END
        WHERE run.id = $1 AND EXISTS (SELECT FROM sent)
        RETURNING {hint_if_due}
    )
    SELECT run.over, EXISTS (SELECT FROM sent) AS sent, EXISTS (
        SELECT FROM {inbox} AS message
        WHERE message.run = run.id AND message.born = run.born AND message.dedup = $4
    ) AS known
    FROM run
"""

PRUNE = """
    WITH old AS MATERIALIZED (
        SELECT id FROM {runs} AS run
        WHERE status = ANY ($1::text[]) AND updated_at < statement_timestamp() - $2::interval
            AND starts_with(id, $3)
        LIMIT $4
        FOR UPDATE SKIP LOCKED
    ), emptied AS (
        DELETE FROM {journal} WHERE run = ANY (ARRAY(SELECT id FROM old))
    ), unread AS (
        DELETE FROM {inbox} WHERE run = ANY (ARRAY(SELECT id FROM old))
    ), pruned AS (
        DELETE FROM {runs} WHERE id = ANY (ARRAY(SELECT id FROM old)) RETURNING id
    )
    SELECT count(*) FROM pruned
"""

COUNT = """
    SELECT {status} AS status, count(*) FROM {runs} AS run {more} GROUP BY 1
"""

OLDEST_DUE = """
    SELECT run.wake_at FROM {runs} AS run
    WHERE run.wake_at <= statement_timestamp() AND starts_with(run.id, $1)
    ORDER BY run.wake_at
    LIMIT 1
"""

_HELD = """
    WITH held AS MATERIALIZED (
        SELECT run.id
        FROM unnest((SELECT $1::text[]), (SELECT $2::text[]), (SELECT $3::bigint[]))
            AS lease (id, owner, epoch)
        CROSS JOIN LATERAL (
            SELECT id, owner, epoch FROM {runs} AS run WHERE run.id = lease.id FOR NO KEY UPDATE
        ) AS run
        WHERE run.owner = lease.owner AND run.epoch = lease.epoch
    )
"""
_HINT_IF_DUE = """
    CASE WHEN run.owner IS NULL AND run.wake_at <= statement_timestamp()
        THEN pg_notify('{channel}', '') END
"""

# jsonb holds no NUL character. Another reader finds a replacement character in its place.
_WITHOUT_NUL = r"""
    CASE WHEN position('\\u0000'::bytea IN {bytes}) > 0
        THEN regexp_replace(
            convert_from({bytes}, 'UTF8'), '(?<!\\)((?:\\\\)*)\\u0000', '\1\\ufffd', 'g'
        )
        ELSE convert_from({bytes}, 'UTF8')
    END
"""

# Where the snapshot is json, it is what was written, to the letter. jsonb sorts keys and spells
# numbers anew: there what was written lies beside it, and counts as long as both say the same.
_PARTS = {
    "json": {
        "snapshot": "run.snapshot::text",
        "json_of_data": "convert_from(data, 'UTF8')::json",
        "exact_of_data": "NULL::bytea",
        "status": "run.status",
        "workflow": "run.workflow",
    },
    "jsonb": {
        "snapshot": f"""
            CASE WHEN ({_WITHOUT_NUL.format(bytes="run.exact")})::jsonb = run.snapshot
                THEN convert_from(run.exact, 'UTF8') ELSE run.snapshot::text END
        """,
        "json_of_data": f"({_WITHOUT_NUL.format(bytes='data')})::jsonb",
        "exact_of_data": "data",
        "status": "coalesce(run.status, run.snapshot #>> '{execution,status}', 'running')",
        "workflow": "coalesce(run.workflow, run.snapshot ->> 'workflowName')",
    },
}


class Statements:
    """The statements for one table: `statements[LOAD]`."""

    def __init__(self, names: Names, snapshot_type: str) -> None:
        self._names = names
        self._parts = {
            **_PARTS[snapshot_type],
            "clock": "(date_part('epoch', statement_timestamp()) * 1000000)::bigint",
            "held": names.fill(_HELD),
            "hint_if_due": _HINT_IF_DUE.format(channel=names.channel),
        }
        self._parts["unread"] = names.fill(_UNREAD)
        self._parts["is_stale"] = names.fill(_IS_STALE)
        self._parts["leased"] = names.fill(_LEASED, **self._parts)
        self._parts["granted"] = names.fill(_GRANTED, **self._parts)
        self._filled: dict[tuple[str, str], str] = {}

    def __getitem__(self, statement: str) -> str:
        return self.extended(statement, "")

    def extended(self, statement: str, more: str) -> str:
        """Give a statement with more words where it has room for them."""
        filled = self._filled.get((statement, more))
        if filled is None:
            more_filled = more.format(**self._parts)
            filled = self._names.fill(statement, more=more_filled, **self._parts)
            self._filled[statement, more] = filled
        return filled
