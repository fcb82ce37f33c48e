"""The statements of `SqlStore`, for any database and any client.

Each is committed by itself, for there is no session. So each leaves a state that loads right, and
what takes several is ordered:

* An entry is written by a statement that locks its run, or fails: the fence. An epoch is open
  while its run has an owner: a rest and a release end both.
* A rest is one update, which says up to which entry the snapshot holds the journal. Entries up to
  there count for nothing, and are removed afterwards.
* A message counts as taken when an entry, or the last rest, names it; it is marked afterwards.
* A run that rests awaiting events is due at first. When nothing lies in its inbox, and nothing has
  come since (`mail`), it is laid to sleep.

Values are texts, whole numbers and NULL. MySQL assigns from left to right and reads what it has
just assigned: what a column was is read before it is set.
"""

# Fragments that several statements share, by the names under which they are filled in.
FRAGMENTS = {
    "new_epoch": "{greatest}({now}, (SELECT lowest.epoch + 1 FROM {floor} AS lowest WHERE id = 1))",
    "after_fold": """
        (entry.epoch > run.folded_epoch
            OR entry.epoch = run.folded_epoch AND entry.n > run.folded_n)
    """,
    "named_in_journal": """
        EXISTS (
            SELECT 1 FROM {journal} AS taker
            WHERE taker.run = {message}.run AND {find}(taker.takes, {mark_of_message}) > 0
        )
    """,
    "named_in_rest": """
        EXISTS (
            SELECT 1 FROM {runs} AS taker
            WHERE taker.id = {message}.run AND {find}(taker.takes, {mark_of_message}) > 0
        )
    """,
    "leased": """
        takeovers = CASE
            WHEN EXISTS (
                SELECT 1 FROM {journal} AS entry
                WHERE entry.run = {runs}.id AND entry.epoch = {runs}.epoch
            ) THEN 0
            WHEN owner IS NOT NULL AND wake_at <= {now} THEN takeovers + 1
            ELSE takeovers
        END,
        epoch = {greatest}(epoch + 1, {now}), status = 'running', awaits = NULL,
        owner = ?, ticket = ?, wake_at = {now} + {number}
    """,
}

LOAD = """
    SELECT 0 AS part, 0 AS epoch, 0 AS n, run.snapshot AS data
    FROM {runs} AS run WHERE run.id = ?
    UNION ALL
    SELECT 1, entry.epoch, entry.n, entry.data
    FROM {journal} AS entry JOIN {runs} AS run ON run.id = entry.run
    WHERE entry.run = ? AND {after_fold}
    ORDER BY 1, 2, 3
"""

SAVE = """
    INSERT INTO {runs} {as_run} (
        id, snapshot, workflow, status, wake_at, awaits, updated_at, epoch, born, folded_epoch
    )
    VALUES (
        ?, ?, ?, ?, CASE WHEN {number} = 1 THEN {now} ELSE {number} END, ?,
        {now}, {new_epoch}, {new_epoch}, {new_epoch}
    )
    {on_same_id}
        snapshot = {given}snapshot{end}, workflow = {given}workflow{end},
        status = {given}status{end}, wake_at = {given}wake_at{end}, awaits = {given}awaits{end},
        updated_at = {given}updated_at{end}, owner = NULL, takeovers = 0, takes = NULL,
        folded_n = -1,
        folded_epoch = {greatest}({old}epoch + 1, {given}epoch{end}),
        epoch = {greatest}({old}epoch + 1, {given}epoch{end})
"""

REMOVE_FOLDED = """
    DELETE FROM {journal}
    WHERE run = ? AND EXISTS (
        SELECT 1 FROM {runs} AS run
        WHERE run.id = {journal}.run AND (
            {journal}.epoch < run.folded_epoch
            OR {journal}.epoch = run.folded_epoch AND {journal}.n <= run.folded_n
        )
    )
"""

RAISE_FLOOR = """
    UPDATE {floor} SET epoch = {greatest}(
        epoch, COALESCE((SELECT MAX(run.epoch) FROM {runs} AS run WHERE run.id IN ({marks})), 0)
    ) WHERE id = 1
"""

DELETE = "DELETE FROM {runs} WHERE id = ?"

DELETE_OLD = """
    DELETE FROM {runs}
    WHERE id IN ({marks}) AND status IN ('completed', 'failed', 'cancelled')
        AND updated_at < {now} - {number}
"""

FORGET = """
    DELETE FROM {runs}
    WHERE id = ? AND epoch = ? AND owner IS NOT NULL
"""

# What belongs to no run, or to an earlier one of the same id.
REMOVE_ENTRIES = """
    DELETE FROM {journal}
    WHERE run IN ({marks}) AND NOT EXISTS (
        SELECT 1 FROM {runs} AS run WHERE run.id = {journal}.run AND run.born <= {journal}.epoch
    )
"""
REMOVE_MESSAGES = """
    DELETE FROM {inbox}
    WHERE run IN ({marks}) AND NOT EXISTS (
        SELECT 1 FROM {runs} AS run WHERE run.id = {inbox}.run AND run.born = {inbox}.born
    )
"""

LIST = """
    SELECT run.id, run.updated_at, run.status, run.workflow FROM {runs} AS run
    WHERE {find}(run.id, ?) = 1 {more}
    ORDER BY run.updated_at DESC, run.id DESC
    LIMIT ?
"""
OF_STATUS = "AND run.status = ?"
OF_WORKFLOW = "AND run.workflow = ?"
AFTER = "AND (run.updated_at < ? OR run.updated_at = ? AND run.id < ?)"

APPEND = """
    {insert} {journal} (run, epoch, n, data, takes)
    SELECT entry.run, entry.epoch, entry.n, entry.data, entry.takes
    FROM ({rows}) AS entry
    JOIN {runs} AS run ON run.id = entry.run
    WHERE run.epoch = entry.epoch AND run.owner IS NOT NULL
    {lock_run} {or_ignore}
"""
ENTRY = """
    SELECT {key} AS run, {number} AS epoch, {number} AS n, {text} AS data, {text} AS takes
"""

PLACES = """
    SELECT run.id, run.epoch, run.folded_epoch, run.folded_n FROM {runs} AS run
    WHERE run.id IN ({marks})
"""
WRITTEN = "SELECT run, epoch, n FROM {journal} WHERE run IN ({marks})"

REST = """
    UPDATE {runs} SET
        snapshot = ?, status = ?, awaits = ?, takes = ?,
        wake_at = CASE WHEN {number} = 1 THEN {now} ELSE {number} END,
        updated_at = {now}, owner = NULL, takeovers = 0, folded_n = {number},
        folded_epoch = {number}
    WHERE id = ? AND epoch = ? AND owner IS NOT NULL
"""

LOOK_FOR_MAIL = """
    SELECT run.epoch, run.folded_n, run.mail, (
        SELECT COUNT(*) FROM {inbox} AS message
        WHERE message.run = run.id AND message.born = run.born
            AND {find}(run.awaits, {mark_of_name}) > 0 AND {untaken}
    )
    FROM {runs} AS run WHERE run.id = ?
"""

LAY_TO_SLEEP = """
    UPDATE {runs} SET wake_at = {number}
    WHERE id = ? AND epoch = ? AND folded_n = ? AND mail = ? AND owner IS NULL AND awaits = ?
"""

MARK_TAKEN = """
    UPDATE {inbox} SET taken = 1, payload = ''
    WHERE run = ? AND taken = 0 AND dedup IS NOT NULL AND {named}
"""
REMOVE_TAKEN = """
    DELETE FROM {inbox} WHERE run = ? AND taken = 0 AND dedup IS NULL AND {named}
"""

CREATE = """
    {insert} {runs} (
        id, snapshot, workflow, owner, maker, ticket, status, wake_at, updated_at,
        epoch, born, folded_epoch
    )
    SELECT made.id, made.snapshot, made.workflow, made.owner, made.maker, made.maker, 'running',
        CASE WHEN made.ttl IS NULL THEN COALESCE(made.wake_at, {now}) ELSE {now} + made.ttl END,
        {now}, {new_epoch}, {new_epoch}, {new_epoch}
    FROM ({rows}) AS made
    WHERE 1 = 1 {or_ignore}
"""
NEW = """
    SELECT {key} AS id, {text} AS snapshot, {key} AS workflow, {key} AS owner, {key} AS maker,
        {number} AS ttl, {number} AS wake_at
"""
MADE = "SELECT id FROM {runs} WHERE id IN ({marks}) AND maker = ?"

LEASE = """
    UPDATE {runs} SET {leased}
    WHERE id IN ({marks}) AND (owner IS NULL OR owner = ? OR wake_at <= {now})
"""
CLAIM = "UPDATE {runs} SET {leased} WHERE id IN ({marks}) AND wake_at <= {now}"

LEASED_RUNS = """
    SELECT run.id, run.epoch, run.wake_at, run.takeovers, run.snapshot, {now}
    FROM {runs} AS run WHERE run.id IN ({marks}) AND run.ticket = ?
"""
JOURNALS = """
    SELECT run.id, run.epoch, entry.data
    FROM {runs} AS run LEFT JOIN {journal} AS entry ON entry.run = run.id AND {after_fold}
    WHERE run.id IN ({marks})
    ORDER BY run.id, entry.epoch, entry.n
"""
INBOXES = """
    SELECT message.run, message.seq, message.name, message.payload, message.sent_at
    FROM {inbox} AS message
    JOIN {runs} AS run ON run.id = message.run AND run.born = message.born
    WHERE message.run IN ({marks}) AND {untaken}
    ORDER BY message.seq
"""
OWNERS = "SELECT id, owner FROM {runs} WHERE id IN ({marks})"

RENEW = "UPDATE {runs} SET wake_at = {now} + {number} WHERE {leases}"
LEASE_OF = "(id = ? AND owner = ? AND epoch = ?)"
RENEWED = """
    SELECT run.id, run.epoch, run.wake_at, (
        SELECT COUNT(*) FROM {inbox} AS message
        WHERE message.run = run.id AND message.born = run.born AND {untaken}
    )
    FROM {runs} AS run WHERE {leases}
"""
RELEASE = "UPDATE {runs} SET owner = NULL, wake_at = COALESCE({number}, {now}) WHERE {leases}"

DUE = """
    SELECT run.id, run.wake_at FROM {runs} AS run
    WHERE run.wake_at <= {number} AND (run.owner IS NULL OR run.wake_at <= {now})
        AND {find}(run.id, ?) = 1 {more}
    ORDER BY run.wake_at, run.id
    LIMIT ?
"""
DUE_NOW = """
    SELECT run.id, run.wake_at FROM {runs} AS run
    WHERE run.wake_at <= {now} AND {find}(run.id, ?) = 1 {more}
    ORDER BY run.wake_at, run.id
    LIMIT ?
"""
IN_WORKFLOWS = "AND run.workflow IN ({marks})"

SEND = """
    {insert} {inbox} (run, born, name, digest, payload, sent_at, dedup)
    SELECT run.id, run.born, {text}, {key}, {text}, {now}, {key}
    FROM {runs} AS run
    WHERE run.id = ? AND run.status NOT IN ('completed', 'failed', 'cancelled')
    {lock_run} {or_ignore}
"""
KNOWN = """
    SELECT (
        SELECT COUNT(*) FROM {inbox} AS message
        WHERE message.run = run.id AND message.born = run.born AND message.dedup = ?
    )
    FROM {runs} AS run WHERE run.id = ?
"""
WAKE = """
    UPDATE {runs} SET mail = mail + 1, wake_at = CASE
        WHEN owner IS NULL AND {find}(awaits, ?) > 0 AND (wake_at IS NULL OR wake_at > {now})
            AND EXISTS (
                SELECT 1 FROM {inbox} AS message
                WHERE message.run = ? AND message.digest = ? AND {untaken_of_row}
            )
        THEN {now} ELSE wake_at END
    WHERE id = ?
"""

OLD = """
    SELECT id FROM {runs} AS run
    WHERE status IN ({marks}) AND updated_at < {now} - {number} AND {find}(id, ?) = 1
    ORDER BY updated_at
    LIMIT ?
"""
COUNT = """
    SELECT run.status, COUNT(*) FROM {runs} AS run
    WHERE {find}(run.id, ?) = 1
    GROUP BY run.status
"""
OLDEST_DUE = """
    SELECT MIN(run.wake_at) FROM {runs} AS run
    WHERE run.wake_at <= {now} AND {find}(run.id, ?) = 1
"""

KEEP_COUNT = "CREATE TABLE IF NOT EXISTS {migrations} (version INTEGER PRIMARY KEY)"
APPLIED = "SELECT version FROM {migrations}"
COUNT_MIGRATION = """
    {insert} {migrations} (version)
    SELECT given.version FROM (SELECT {number} AS version) AS given WHERE 1 = 1 {or_ignore}
"""
