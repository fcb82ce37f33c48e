-- Every default is a constant, so that existing rows are not rewritten.
-- awaited has the names of the events that a run awaits, tags its tags, both as JSON; summary is in
-- base64. A run without created_at was created at its first epoch.
-- unless: $has_column 'queue'
ALTER TABLE $runs ADD COLUMN queue TEXT NOT NULL DEFAULT '';
-- unless: $has_column 'version'
ALTER TABLE $runs ADD COLUMN version INTEGER NOT NULL DEFAULT 0;
-- unless: $has_column 'tags'
ALTER TABLE $runs ADD COLUMN tags TEXT;
-- unless: $has_column 'summary'
ALTER TABLE $runs ADD COLUMN summary TEXT;
-- unless: $has_column 'awaited'
ALTER TABLE $runs ADD COLUMN awaited TEXT;
-- unless: $has_column 'created_at'
ALTER TABLE $runs ADD COLUMN created_at INTEGER;

CREATE INDEX IF NOT EXISTS $due_idx ON $runs (queue, workflow, wake_at, version, id)
    WHERE wake_at IS NOT NULL;
DROP INDEX IF EXISTS $schema$wake_idx;
CREATE INDEX IF NOT EXISTS $workflow_idx ON $runs (workflow, status, updated_at, id);
DROP INDEX IF EXISTS $schema$status_idx;

-- A sender recognizes its own messages by the ticket.
-- unless: $inbox_has_column 'ticket'
ALTER TABLE $inbox ADD COLUMN ticket TEXT;
CREATE INDEX IF NOT EXISTS $unconsumed_idx ON $inbox (run, consumed, created_epoch, seq);
DROP INDEX IF EXISTS $schema$inbox_idx;

-- tag is a digest. A row counts while a run has this id, time of creation and tag.
CREATE TABLE IF NOT EXISTS $tags (
    tag TEXT NOT NULL,
    created_at INTEGER NOT NULL,
    run TEXT NOT NULL,
    PRIMARY KEY (tag, created_at, run)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS $tags_idx ON $tags (run);
