"""The statements of the PostgreSQL store, each one round trip and one commit.

A statement that writes runs first locks their rows, in the order of their ids, and decides based on
the locked rows. It reads other tables as of its own start, without what was committed while it
waited for a lock. Where that would matter, a column of the locked row (`clean`, `messages`, `xmin`)
shows it.

Arrays are passed as `(SELECT $1::text[])` to hide their length from the planner, which would make a
new plan for every length: planning takes longer than writing. `LATERAL` with its own lock costs one
index lookup per run; a join that was planned for a small table would still scan it after it has
grown.

Columns: `messages` counts the unconsumed messages in the run's inbox, and `clean` means that no
journal entry is older than the current lease.
"""

from collections.abc import Iterable

from perdure.store import INBOX_PAGE
from perdure.stores.postgres.schema import Tables

LOAD = """
    SELECT {snapshot} AS snapshot, run.updated_at, (
        SELECT string_agg(entry.data, ',' ORDER BY entry.epoch, entry.n) FROM {journal} AS entry
        WHERE entry.run = run.id AND (entry.epoch, entry.n) > (run.folded_epoch, run.folded_n)
    ) AS journal
    FROM {runs} AS run WHERE run.id = $1
"""

# Adds rows for the tags of the runs in `{source}`. An existing row was left behind by a deletion
# that did not see it. It does no harm, because searches compare the rows they find with the run.
_ADDED_TAGS = """
    new_tags AS MATERIALIZED (
        SELECT {source}.id, {source}.created_at, sha256(convert_to(tag, 'UTF8')) AS tag
        FROM {source} CROSS JOIN LATERAL jsonb_array_elements_text({source}.tags) AS tag
    ), added_tags AS (
        INSERT INTO {tags} AS tagged (run, tag, created_at)
        SELECT id, tag, created_at FROM new_tags
        ON CONFLICT (run, tag) DO UPDATE SET created_at = excluded.created_at
        WHERE tagged.created_at <> excluded.created_at
    )
"""

# Replaces the rows for the tags of the runs in `retagged`.
_REPLACED_TAGS = """
    {tags_of_retagged}, removed_tags AS (
        DELETE FROM {tags} AS tagged
        WHERE run = ANY (ARRAY(SELECT id FROM retagged)) AND NOT EXISTS (
            SELECT FROM new_tags WHERE new_tags.id = tagged.run AND new_tags.tag = tagged.tag
        )
    )
"""

SAVE = """
    WITH deleted_entries AS (
        DELETE FROM {journal} WHERE run = $1
    ), old AS MATERIALIZED (
        SELECT id, tags FROM {runs} WHERE id = $1 FOR NO KEY UPDATE
    ), saved AS (
        INSERT INTO {runs} AS run (
            id, snapshot, exact, workflow, status, wake_at, awaits, version, tags, summary,
            epoch, first_epoch, folded_epoch, updated_at, created_at
        )
        SELECT $1, {json_of_data}, {exact_of_data}, $3, $4, $5, $6::text::jsonb,
            $7, $8::text::jsonb, $9,
            {clock}, {clock}, {clock}, statement_timestamp(), statement_timestamp()
        FROM (SELECT $2::bytea AS data) AS input LEFT JOIN old ON true
        ON CONFLICT (id) DO UPDATE SET
            snapshot = excluded.snapshot, exact = excluded.exact, workflow = excluded.workflow,
            status = excluded.status, awaits = excluded.awaits, updated_at = excluded.updated_at,
            version = excluded.version, tags = excluded.tags, summary = excluded.summary,
            created_at = CASE WHEN excluded.tags = '[]'
                THEN run.created_at ELSE coalesce({created_at}, excluded.created_at) END,
            queue = '',
            wake_at = CASE WHEN run.messages > 0 AND (
                SELECT count(*) <> run.messages OR bool_or(excluded.awaits ? message.name)
                FROM {inbox} AS message
                WHERE message.run = run.id AND message.first_epoch = run.first_epoch
                    AND NOT message.consumed
            ) THEN statement_timestamp() ELSE excluded.wake_at END,
            epoch = greatest(run.epoch + 1, excluded.epoch),
            folded_epoch = greatest(run.epoch + 1, excluded.epoch), folded_n = -1,
            owner = NULL, takeovers = 0, clean = true
        RETURNING run.id, run.tags, run.created_at, {notify_if_due}
    ), retagged AS MATERIALIZED (
        SELECT saved.id, saved.tags, saved.created_at FROM saved LEFT JOIN old USING (id)
        WHERE saved.tags <> coalesce(old.tags, '[]')
    ), {replaced_tags}
    SELECT FROM saved
"""

DELETE = """
    WITH run AS (
        DELETE FROM {runs} WHERE id = $1 RETURNING id
    ), deleted_entries AS (
        DELETE FROM {journal} WHERE run = $1
    ), deleted_messages AS (
        DELETE FROM {inbox} WHERE run = $1
    ), deleted_tags AS (
        DELETE FROM {tags} WHERE run = $1
    )
    SELECT count(*) FROM run
"""

# Creates a run without tags.
CREATE_ONE = """
    INSERT INTO {runs} (
        id, snapshot, exact, workflow, status, owner, wake_at, version, summary,
        epoch, first_epoch, folded_epoch, clean, updated_at, created_at
    )
    SELECT $1, {json_of_data}, {exact_of_data}, $5, 'running', $2,
        statement_timestamp() + $3::interval, $6, $7, {clock}, {clock}, {clock}, false,
        statement_timestamp(), statement_timestamp()
    FROM (SELECT $4::bytea AS data) AS request
    ON CONFLICT (id) DO NOTHING
    RETURNING id, epoch
"""

# In this statement and the next, {extra} is what `tags_added` returns.
CREATE = """
    WITH created AS (
        INSERT INTO {runs} (
            id, snapshot, exact, workflow, status, owner, wake_at, version, tags, summary,
            epoch, first_epoch, folded_epoch, clean, updated_at, created_at
        )
        SELECT request.id, {json_of_data}, {exact_of_data}, request.workflow, 'running',
            request.owner, statement_timestamp() + request.ttl, request.version,
            request.tags::jsonb, request.summary, {clock}, {clock}, {clock}, false,
            statement_timestamp(), statement_timestamp()
        FROM unnest(
            (SELECT $1::text[]), (SELECT $2::text[]), (SELECT $3::interval[]),
            (SELECT $4::bytea[]), (SELECT $5::text[]), (SELECT $6::bigint[]), (SELECT $7::text[]),
            (SELECT $8::bytea[])
        ) AS request (id, owner, ttl, data, workflow, version, tags, summary)
        ON CONFLICT (id) DO NOTHING
        RETURNING id, epoch, tags, created_at
    ) {extra}
    SELECT id, epoch FROM created
"""

ENQUEUE = """
    WITH created AS (
        INSERT INTO {runs} AS run (
            id, workflow, snapshot, exact, status, awaits, wake_at, queue, version, tags, summary,
            epoch, first_epoch, folded_epoch, updated_at, created_at
        )
        SELECT new.id, new.workflow, {json_of_data}, {exact_of_data}, new.status,
            new.awaits::jsonb, coalesce(statement_timestamp() - new.head_start, new.wake_at),
            new.queue, new.version, new.tags::jsonb, new.summary, {clock}, {clock}, {clock},
            statement_timestamp(), statement_timestamp()
        FROM unnest(
            (SELECT $1::text[]), (SELECT $2::text[]), (SELECT $3::bytea[]), (SELECT $4::text[]),
            (SELECT $5::text[]), (SELECT $6::interval[]), (SELECT $7::timestamptz[]),
            (SELECT $8::text[]), (SELECT $9::bigint[]), (SELECT $10::text[]),
            (SELECT $11::bytea[])
        ) AS new (
            id, workflow, data, status, awaits, head_start, wake_at, queue, version, tags, summary
        )
        ON CONFLICT (id) DO NOTHING
        RETURNING run.id, run.tags, run.created_at, {notify_others_if_due}
    ) {extra}
    SELECT id FROM created
"""

# In a transaction of the caller, which is committed later, and perhaps on one of the store's own
# connections.
ENQUEUE_JOINED = ENQUEUE.replace("{notify_others_if_due}", "{notify_if_due}")

# The time of its start distinguishes a transaction from one that the user's code began instead.
FENCE = """
    SELECT epoch = $2 AND owner IS NOT NULL, transaction_timestamp() FROM {runs} WHERE id = $1
"""

# Locks the row in a separate statement, so that the next one sees everything written before the
# lock.
FENCE_LOCKED = FENCE + " FOR NO KEY UPDATE"

HAS_ENTRY = "SELECT EXISTS (SELECT FROM {journal} WHERE run = $1 AND epoch = $2 AND n = $3)"

# `clean` is kept if the run was unowned, because its journal has not been written to since. An
# entry that was committed while this statement waited for the row is missed: `takeovers` is then
# too high until the next entry. EXISTS is avoided because the planner may read the whole journal
# for it. `{instead_of}` is NULL unless a request names the owner that it replaces.
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
_LEASE_COLUMNS = """
    run.id, run.owner, run.epoch, run.folded_epoch, run.wake_at, run.takeovers, run.clean,
    run.messages, run.updated_at, run.queue, run.version, {snapshot} AS snapshot,
    NULL::bytea AS journal, statement_timestamp() AS now
"""
_GRANT_COLUMNS = "{lease_columns}, {inbox_rows} AS inbox"
# Whether the row was written after the statement began, so that the inbox it read is outdated.
_IS_STALE = """
    leased.messages > 0
        AND locked.row_version <> (SELECT xmin FROM {runs} AS latest WHERE latest.id = locked.id)
"""
_INBOX_ROWS = """
    CASE WHEN run.messages > 0 THEN (
        SELECT array_agg(ROW(seq, name, payload, sent_at) ORDER BY seq) FROM (
            SELECT seq, name, payload, sent_at FROM {inbox} AS message
            WHERE message.run = run.id AND message.first_epoch = run.first_epoch
                AND NOT message.consumed
            ORDER BY seq
            LIMIT {inbox_page}
        ) AS message
    ) END
"""

LEASE = """
    WITH locked AS MATERIALIZED (
        SELECT request.owner, request.ttl, request.instead_of, run.id, run.row_version,
            run.owner IS NULL OR run.owner = request.owner OR run.owner = request.instead_of
                OR run.wake_at <= statement_timestamp() AS free
        FROM unnest(
            (SELECT $1::text[]), (SELECT $2::text[]), (SELECT $3::interval[]), (SELECT $4::text[])
        ) AS request (id, owner, ttl, instead_of)
        CROSS JOIN LATERAL (
            SELECT id, owner, wake_at, xmin AS row_version FROM {runs} AS run
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
# A run in a system queue, such as a returned permit, means no work for a worker.
_NOTIFY_IF_DUE = """
    CASE WHEN run.owner IS NULL AND run.wake_at <= statement_timestamp()
            AND NOT starts_with(run.queue, '~')
        THEN pg_notify('{channel}', '{payload}') END
"""

ANNOUNCED = "announced"
"""The payload of a notification that the sender's process does not need: it knows already."""

# The first epoch of a run is the time of its creation, unless awaitly created it.
_CREATED_AT = """
    coalesce(
        run.created_at,
        'epoch'::timestamptz + nullif(run.first_epoch, 0) * interval '1 microsecond'
    )
"""

# jsonb cannot contain NUL; other readers see a replacement character instead.
_WITHOUT_NUL = r"""
    CASE WHEN position('\\u0000'::bytea IN {bytes}) > 0
        THEN regexp_replace(
            convert_from({bytes}, 'UTF8'), '(?<!\\)((?:\\\\)*)\\u0000', '\1\\ufffd', 'g'
        )
        ELSE convert_from({bytes}, 'UTF8')
    END
"""

# A json snapshot is stored exactly as it was written. jsonb reorders keys and reformats numbers, so
# the exact bytes are stored in another column, and are used while both are equal.
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


def compose(template: str, **parts: str) -> str:
    """Return a template with these parts filled in; `Statements.sql` fills in the others."""
    for name, part in parts.items():
        template = template.replace(f"{{{name}}}", part)
    return template


def tags_added(tags: Iterable[object]) -> str:
    """Return the part of a statement that adds the tags of new runs, each a JSON array.

    It is left out if there are none: for one run, it takes a quarter of the statement's time.
    """
    return ", {tags_of_created}" if any(each != "[]" for each in tags) else ""


class Statements:
    """The statements for the tables of one store, with their names filled in.

    `id_collation` is the collation of the ids; `C` orders them by code points.
    """

    def __init__(self, tables: Tables, snapshot_type: str, id_collation: str) -> None:
        self.id_collation = id_collation
        self._tables = tables
        self._parts = {
            **_PARTS[snapshot_type],
            "id_collation": f'"{id_collation}"',
            "created_at": _CREATED_AT,
            "clock": "(date_part('epoch', statement_timestamp()) * 1000000)::bigint",
            "locked_leases": tables.sql(_LOCKED_LEASES),
            "notify_if_due": _NOTIFY_IF_DUE.format(channel=tables.channel, payload=""),
            "notify_others_if_due": _NOTIFY_IF_DUE.format(
                channel=tables.channel, payload=ANNOUNCED
            ),
            "inbox_rows": tables.sql(_INBOX_ROWS, inbox_page=str(INBOX_PAGE)),
            "is_stale": tables.sql(_IS_STALE),
        }
        self._parts |= {
            "set_leased": tables.sql(_SET_LEASED, instead_of="locked.instead_of", **self._parts),
            "set_claimed": tables.sql(_SET_LEASED, instead_of="NULL", **self._parts),
        }
        tags_of = {name: tables.sql(_ADDED_TAGS, source=name) for name in ("created", "retagged")}
        self._parts["tags_of_created"] = tags_of["created"]
        self._parts["replaced_tags"] = tables.sql(
            _REPLACED_TAGS, tags_of_retagged=tags_of["retagged"]
        )
        self._parts["lease_columns"] = tables.sql(_LEASE_COLUMNS, **self._parts)
        self._parts["grant_columns"] = tables.sql(_GRANT_COLUMNS, **self._parts)
        self._cache: dict[tuple[str, str], str] = {}

    def sql(self, template: str, extra: str = "") -> str:
        """Return a statement; `extra` replaces its `{extra}`."""
        statement = self._cache.get((template, extra))
        if statement is None:
            statement = self._tables.sql(template, extra=extra.format(**self._parts), **self._parts)
            self._cache[template, extra] = statement
        return statement
