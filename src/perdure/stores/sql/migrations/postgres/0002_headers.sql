-- Building the indexes blocks writers. For a large table that is in use, run these statements
-- beforehand, with the name of the table in place of "workflow_runs"; what exists is not built
-- again. If one of them fails, drop its index before the next attempt.
--
--     ALTER TABLE workflow_runs
--         ADD COLUMN IF NOT EXISTS queue text COLLATE "C" NOT NULL DEFAULT '',
--         ADD COLUMN IF NOT EXISTS version bigint NOT NULL DEFAULT 0
--     CREATE INDEX CONCURRENTLY IF NOT EXISTS workflow_runs_due_idx ON workflow_runs
--         (queue, md5(workflow), wake_at, version) WHERE wake_at IS NOT NULL
--     CREATE INDEX CONCURRENTLY IF NOT EXISTS workflow_runs_workflow_idx ON workflow_runs
--         (md5(workflow), status, updated_at, id)
--     CREATE INDEX CONCURRENTLY IF NOT EXISTS workflow_runs_unconsumed_idx
--         ON workflow_runs_inbox (run, consumed, created_epoch, seq)

-- Every default is a constant, so that existing rows are not rewritten.
-- awaited has the names of the events that a run awaits, tags its tags, both as JSON; summary is in
-- base64. A run without created_at was created at its first epoch.
ALTER TABLE $runs
    ADD COLUMN IF NOT EXISTS queue text COLLATE "C" NOT NULL DEFAULT '',
    ADD COLUMN IF NOT EXISTS version bigint NOT NULL DEFAULT 0,
    ADD COLUMN IF NOT EXISTS tags text,
    ADD COLUMN IF NOT EXISTS summary text,
    ADD COLUMN IF NOT EXISTS awaited text,
    ADD COLUMN IF NOT EXISTS created_at bigint;

-- A queue, a workflow and an id may be too long for an index, if two of them are in it.
CREATE INDEX IF NOT EXISTS $due_idx ON $runs (queue, md5(workflow), wake_at, version)
    WHERE wake_at IS NOT NULL;
DROP INDEX IF EXISTS $schema$wake_idx;
CREATE INDEX IF NOT EXISTS $workflow_idx ON $runs (md5(workflow), status, updated_at, id);
DROP INDEX IF EXISTS $schema$status_idx;

-- A sender recognizes its own messages by the ticket.
ALTER TABLE $inbox ADD COLUMN IF NOT EXISTS ticket text;
CREATE INDEX IF NOT EXISTS $unconsumed_idx ON $inbox (run, consumed, created_epoch, seq);
DROP INDEX IF EXISTS $schema$inbox_idx;

-- tag is a digest. A row counts while a run has this id, time of creation and tag.
CREATE TABLE IF NOT EXISTS $tags (
    tag text COLLATE "C" NOT NULL,
    created_at bigint NOT NULL,
    run text COLLATE "C" NOT NULL,
    PRIMARY KEY (tag, created_at, run)
);
CREATE INDEX IF NOT EXISTS $tags_idx ON $tags (run);

-- Without numbers about md5(workflow), the indexes seem less useful than they are.
ANALYZE $runs;
