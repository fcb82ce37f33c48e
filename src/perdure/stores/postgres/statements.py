"""The statements of the PostgreSQL store, each one round trip and one commit.

A statement that writes runs first locks their rows, in the order of their ids, and decides by what
it reads from the locked rows. Other tables it reads as of its own start, without what was committed
while it waited for a lock. Where that would matter, a column of the locked row (`clean`,
`messages`, `xmin`) shows it.

Arrays are passed as `(SELECT $1::text[])` to hide their length from the planner, which would make a
new plan for every length: planning takes longer than writing. `LATERAL` with a lock of its own
costs one index lookup per run; a join planned for a small table would still scan it after it has
grown.

Columns: `messages` counts the messages in the run's inbox that are not consumed, and `clean` means
that no journal entry is older than the current lease.
"""

from perdure.stores.postgres.schema import Tables

LOAD = """
    SELECT {snapshot} AS snapshot, run.updated_at, (
        SELECT string_agg(entry.data, ',' ORDER BY entry.epoch, entry.n) FROM {journal} AS entry
        WHERE entry.run = run.id AND (entry.epoch, entry.n) > (run.folded_epoch, run.folded_n)
    ) AS journal
    FROM {runs} AS run WHERE run.id = $1
"""

SAVE = """
    WITH deleted_entries AS (
        DELETE FROM {journal} WHERE run = $1
    )
    INSERT INTO {runs} AS run (
        id, snapshot, exact, workflow, status, wake_at, awaits,
        epoch, first_epoch, folded_epoch, updated_at
    )
    SELECT $1, {json_of_data}, {exact_of_data}, $3, $4, $5, $6::text::jsonb,
        {clock}, {clock}, {clock}, statement_timestamp()
    FROM (SELECT $2::bytea AS data) AS input
    ON CONFLICT (id) DO UPDATE SET
        snapshot = excluded.snapshot, exact = excluded.exact, workflow = excluded.workflow,
        status = excluded.status, awaits = excluded.awaits, updated_at = excluded.updated_at,
        wake_at = CASE WHEN run.messages > 0 AND (
            SELECT count(*) <> run.messages OR bool_or(excluded.awaits ? message.name)
            FROM {inbox} AS message
            WHERE message.run = run.id AND message.first_epoch = run.first_epoch
                AND NOT message.consumed
        ) THEN statement_timestamp() ELSE excluded.wake_at END,
        epoch = greatest(run.epoch + 1, excluded.epoch),
        folded_epoch = greatest(run.epoch + 1, excluded.epoch), folded_n = -1,
        owner = NULL, takeovers = 0, clean = true
    RETURNING {notify_if_due}
"""

DELETE = """
    WITH run AS (
        DELETE FROM {runs} WHERE id = $1 RETURNING id
    ), deleted_entries AS (
        DELETE FROM {journal} WHERE run = $1
    ), deleted_messages AS (
        DELETE FROM {inbox} WHERE run = $1
    )
    SELECT count(*) FROM run
"""

LIST = """
    SELECT run.id, run.updated_at, {status} AS status, {workflow} AS workflow, run.owner
    FROM {runs} AS run
    WHERE starts_with(run.id, $1) {extra}
    ORDER BY run.updated_at DESC, run.id DESC
    LIMIT $2
"""

# The time of its start distinguishes a transaction from one that the user's code began instead.
FENCE = """
    SELECT epoch = $2 AND owner IS NOT NULL, transaction_timestamp() FROM {runs} WHERE id = $1
"""

# Locks the row in a statement of its own: the next one sees everything written before the lock.
FENCE_LOCKED = FENCE + " FOR NO KEY UPDATE"

HAS_ENTRY = "SELECT EXISTS (SELECT FROM {journal} WHERE run = $1 AND epoch = $2 AND n = $3)"

CREATE_ONE = """
    INSERT INTO {runs} (
        id, snapshot, exact, workflow, status, owner, wake_at,
        epoch, first_epoch, folded_epoch, clean, updated_at
    )
    SELECT $1, {json_of_data}, {exact_of_data}, $5, 'running', $2,
        statement_timestamp() + $3::interval, {clock}, {clock}, {clock}, false,
        statement_timestamp()
    FROM (SELECT $4::bytea AS data) AS request
    ON CONFLICT (id) DO NOTHING
    RETURNING id, epoch
"""

CREATE = """
    INSERT INTO {runs} (
        id, snapshot, exact, workflow, status, owner, wake_at,
        epoch, first_epoch, folded_epoch, clean, updated_at
    )
    SELECT request.id, {json_of_data}, {exact_of_data}, request.workflow, 'running', request.owner,
        statement_timestamp() + request.ttl, {clock}, {clock}, {clock}, false, statement_timestamp()
    FROM unnest(
        (SELECT $1::text[]), (SELECT $2::text[]), (SELECT $3::interval[]), (SELECT $4::bytea[]),
        (SELECT $5::text[])
    ) AS request (id, owner, ttl, data, workflow)
    ON CONFLICT (id) DO NOTHING
    RETURNING id, epoch
"""

# `clean` stays if the run was unowned: its journal has not been written to since. An entry that was
# committed while this statement waited for the row is missed: `takeovers` is then too high until
# the next entry. EXISTS is avoided because the planner may read the whole journal for it.
# `{instead_of}` is NULL unless a request names the owner that it replaces.
_SET_LEASED = """
    status = 'running', awaits = '[]', clean = run.clean AND run.owner IS NULL,
    takeovers = CASE
        WHEN run.clean AND run.owner IS NULL THEN 0
        WHEN (
            SELECT true FROM {journal} AS entry
            WHERE entry.run = run.id AND entry.epoch = run.epoch LIMIT 1
        ) THEN 0
        ELSE run.takeovers + (run.owner IS NOT NULL AND (
            run.wake_at <= statement_timestamp() OR run.owner IS NOT DISTINCT FROM {instead_of}
        ))::integer
    END,
    epoch = greatest(run.epoch + 1, {clock})
"""
_GRANT_COLUMNS = """
    run.id, run.owner, run.epoch, run.folded_epoch, run.wake_at, run.takeovers, run.clean,
    run.messages, run.updated_at, {snapshot} AS snapshot, {inbox_rows} AS inbox,
    NULL::bytea AS journal, statement_timestamp() AS now
"""
# Whether the row was written after the statement began, so that the inbox it read is outdated.
_IS_STALE = """
    leased.messages > 0
        AND locked.version <> (SELECT xmin FROM {runs} AS latest WHERE latest.id = locked.id)
"""
_INBOX_ROWS = """
    CASE WHEN run.messages > 0 THEN (
        SELECT array_agg(ROW(seq, name, payload, sent_at) ORDER BY seq) FROM {inbox} AS message
        WHERE message.run = run.id AND message.first_epoch = run.first_epoch
            AND NOT message.consumed
    ) END
"""

LEASE = """
    WITH locked AS MATERIALIZED (
        SELECT request.owner, request.ttl, request.instead_of, run.id, run.version,
            run.owner IS NULL OR run.owner = request.owner OR run.owner = request.instead_of
                OR run.wake_at <= statement_timestamp() AS free
        FROM unnest(
            (SELECT $1::text[]), (SELECT $2::text[]), (SELECT $3::interval[]), (SELECT $4::text[])
        ) AS request (id, owner, ttl, instead_of)
        CROSS JOIN LATERAL (
            SELECT id, owner, wake_at, xmin AS version FROM {runs} AS run
            WHERE run.id = request.id FOR NO KEY UPDATE
        ) AS run
    ), leased AS (
        UPDATE {runs} AS run SET
            {set_leased}, owner = locked.owner, wake_at = statement_timestamp() + locked.ttl
        FROM locked
        WHERE run.id = locked.id AND locked.free
        RETURNING {grant_columns}
    )
    SELECT locked.id AS existing, leased.*, {is_stale} AS stale
    FROM locked LEFT JOIN leased USING (id)
"""

CLAIM = """
    WITH locked AS MATERIALIZED (
        SELECT id, wake_at AS since, xmin AS version FROM {runs} AS run
        WHERE wake_at <= statement_timestamp() AND starts_with(id, $4) {extra}
        ORDER BY wake_at
        LIMIT $3
        FOR NO KEY UPDATE SKIP LOCKED
    ), leased AS (
        UPDATE {runs} AS run SET
            {set_claimed}, owner = $1, wake_at = statement_timestamp() + $2::interval
        WHERE run.id = ANY (ARRAY(SELECT id FROM locked))
        RETURNING {grant_columns}
    )
    SELECT leased.*, {is_stale} AS stale
    FROM locked JOIN leased USING (id) ORDER BY locked.since, locked.id
"""

READ_LEASED = """
    SELECT run.id, run.owner, run.folded_epoch, (
        SELECT string_agg(entry.data, ',' ORDER BY entry.epoch, entry.n) FROM {journal} AS entry
        WHERE entry.run = run.id AND (entry.epoch, entry.n) > (run.folded_epoch, run.folded_n)
    ) AS journal, {inbox_rows} AS inbox
    FROM {runs} AS run WHERE run.id = ANY ($1::text[])
"""

OWNERS = """
    SELECT id, owner, CASE WHEN owner IS NOT NULL THEN wake_at END FROM {runs}
    WHERE id = ANY ($1::text[])
"""

INBOX = """
    SELECT message.seq, message.name, message.payload, message.sent_at
    FROM {runs} AS run
    JOIN {inbox} AS message ON message.run = run.id AND message.first_epoch = run.first_epoch
    WHERE run.id = $1 AND NOT message.consumed
    ORDER BY message.seq
"""

RENEW = """
    {locked_leases}
    UPDATE {runs} AS run SET wake_at = statement_timestamp() + $4::interval
    WHERE run.id = ANY (ARRAY(SELECT id FROM locked))
    RETURNING run.id, run.epoch, run.wake_at, run.messages > 0 AS has_messages
"""

RELEASE = """
    {locked_leases}
    UPDATE {runs} AS run SET
        owner = NULL, clean = false, wake_at = coalesce($4, statement_timestamp())
    WHERE run.id = ANY (ARRAY(SELECT id FROM locked))
    RETURNING {notify_if_due}
"""

ENQUEUE = """
    INSERT INTO {runs} AS run (
        id, workflow, snapshot, exact, status, wake_at, epoch, first_epoch, folded_epoch, updated_at
    )
    SELECT new.id, new.workflow, {json_of_data}, {exact_of_data}, 'running',
        coalesce(new.wake_at, statement_timestamp()), {clock}, {clock}, {clock},
        statement_timestamp()
    FROM unnest(
        (SELECT $1::text[]), (SELECT $2::text[]), (SELECT $3::bytea[]), (SELECT $4::timestamptz[])
    ) AS new (id, workflow, data, wake_at)
    ON CONFLICT (id) DO NOTHING
    RETURNING run.id, {notify_if_due}
"""

DUE = """
    SELECT run.id, run.wake_at FROM {runs} AS run
    WHERE run.wake_at <= $1 AND starts_with(run.id, $3)
        AND (run.owner IS NULL OR run.wake_at <= statement_timestamp()) {extra}
    ORDER BY run.wake_at, run.id
    LIMIT $2
"""

SEND = """
    WITH run AS MATERIALIZED (
        SELECT id, first_epoch, owner IS NULL AND awaits ? $2 AS awaited,
            coalesce(status, 'running') IN ('completed', 'failed', 'cancelled') AS over
        FROM {runs} WHERE id = $1 FOR NO KEY UPDATE
    ), sent AS (
        INSERT INTO {inbox} (run, first_epoch, name, payload, dedup, sent_at)
        SELECT id, first_epoch, $2, $3, $4, statement_timestamp() FROM run WHERE NOT over
        ON CONFLICT DO NOTHING
        RETURNING seq
    ), updated AS (
        UPDATE {runs} AS run SET
            messages = run.messages + 1,
            wake_at = CASE WHEN owner IS NULL AND awaits ? $2
                THEN statement_timestamp() ELSE run.wake_at END
        WHERE run.id = $1 AND EXISTS (SELECT FROM sent)
        RETURNING {notify_if_due}
    )
    SELECT run.over, EXISTS (SELECT FROM sent) AS sent, EXISTS (
        SELECT FROM {inbox} AS message
        WHERE message.run = run.id AND message.first_epoch = run.first_epoch AND message.dedup = $4
    ) AS is_duplicate
    FROM run
"""

PRUNE = """
    WITH old AS MATERIALIZED (
        SELECT id FROM {runs} AS run
        WHERE status = ANY ($1::text[]) AND updated_at < statement_timestamp() - $2::interval
            AND starts_with(id, $3)
        LIMIT $4
        FOR UPDATE SKIP LOCKED
    ), deleted_entries AS (
        DELETE FROM {journal} WHERE run = ANY (ARRAY(SELECT id FROM old))
    ), deleted_messages AS (
        DELETE FROM {inbox} WHERE run = ANY (ARRAY(SELECT id FROM old))
    ), pruned AS (
        DELETE FROM {runs} WHERE id = ANY (ARRAY(SELECT id FROM old)) RETURNING id
    )
    SELECT count(*) FROM pruned
"""

COUNT = """
    SELECT {status} AS status, count(*) FROM {runs} AS run {extra} GROUP BY 1
"""

OLDEST_DUE = """
    SELECT run.wake_at FROM {runs} AS run
    WHERE run.wake_at <= statement_timestamp() AND starts_with(run.id, $1)
    ORDER BY run.wake_at
    LIMIT 1
"""

_LOCKED_LEASES = """
    WITH locked AS MATERIALIZED (
        SELECT run.id
        FROM unnest((SELECT $1::text[]), (SELECT $2::text[]), (SELECT $3::bigint[]))
            AS lease (id, owner, epoch)
        CROSS JOIN LATERAL (
            SELECT id, owner, epoch FROM {runs} AS run WHERE run.id = lease.id FOR NO KEY UPDATE
        ) AS run
        WHERE run.owner = lease.owner AND run.epoch = lease.epoch
    )
"""
_NOTIFY_IF_DUE = """
    CASE WHEN run.owner IS NULL AND run.wake_at <= statement_timestamp()
        THEN pg_notify('{channel}', '') END
"""

# jsonb cannot contain NUL: other readers see a replacement character in its place.
_WITHOUT_NUL = r"""
    CASE WHEN position('\\u0000'::bytea IN {bytes}) > 0
        THEN regexp_replace(
            convert_from({bytes}, 'UTF8'), '(?<!\\)((?:\\\\)*)\\u0000', '\1\\ufffd', 'g'
        )
        ELSE convert_from({bytes}, 'UTF8')
    END
"""

# A json snapshot is stored exactly as it was written. jsonb reorders keys and reformats numbers:
# there the exact bytes are stored in a column beside it, and are used while both are equal.
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
    """The statements for the tables of one store, with their names filled in."""

    def __init__(self, tables: Tables, snapshot_type: str) -> None:
        self._tables = tables
        self._parts = {
            **_PARTS[snapshot_type],
            "clock": "(date_part('epoch', statement_timestamp()) * 1000000)::bigint",
            "locked_leases": tables.sql(_LOCKED_LEASES),
            "notify_if_due": _NOTIFY_IF_DUE.format(channel=tables.channel),
            "inbox_rows": tables.sql(_INBOX_ROWS),
            "is_stale": tables.sql(_IS_STALE),
        }
        self._parts |= {
            "set_leased": tables.sql(_SET_LEASED, instead_of="locked.instead_of", **self._parts),
            "set_claimed": tables.sql(_SET_LEASED, instead_of="NULL", **self._parts),
        }
        self._parts["grant_columns"] = tables.sql(_GRANT_COLUMNS, **self._parts)
        self._cache: dict[tuple[str, str], str] = {}

    def sql(self, template: str, extra: str = "") -> str:
        """Return a statement; `extra` replaces its `{extra}`."""
        statement = self._cache.get((template, extra))
        if statement is None:
            statement = self._tables.sql(template, extra=extra.format(**self._parts), **self._parts)
            self._cache[template, extra] = statement
        return statement
