-- Every default is a constant, so that existing rows are not rewritten.
-- awaited has the names of the events that a run awaits, tags its tags, both as JSON; summary is in
-- base64. A run without created_at was created at its first epoch.
-- lane and kind are for the indexes: a run without a wake time is in no lane, and of queue, workflow
-- and id, two would be too long for an index.
-- unless: $has_column 'queue'
ALTER TABLE $runs
    ADD COLUMN queue VARBINARY(2048) NOT NULL DEFAULT '',
    ADD COLUMN version BIGINT NOT NULL DEFAULT 0,
    ADD COLUMN tags LONGTEXT,
    ADD COLUMN summary LONGTEXT,
    ADD COLUMN awaited LONGTEXT,
    ADD COLUMN created_at BIGINT;
-- unless: $has_column 'lane'
ALTER TABLE $runs
    ADD COLUMN lane VARBINARY(2048) AS (CASE WHEN wake_at IS NULL THEN NULL ELSE queue END) VIRTUAL,
    ADD COLUMN kind VARBINARY(32) AS (MD5(workflow)) VIRTUAL;

-- unless: $has_index '${name}_due_idx'
ALTER TABLE $runs
    ADD INDEX $due_idx (lane, kind, wake_at, version),
    ADD INDEX $workflow_idx (kind, status, updated_at, id),
    DROP INDEX $wake_idx,
    DROP INDEX $status_idx;

-- A sender recognizes its own messages by the ticket.
-- unless: $inbox_has_column 'ticket'
ALTER TABLE $inbox ADD COLUMN ticket VARBINARY(32);
-- unless: $has_index '${name}_unconsumed_idx'
ALTER TABLE $inbox
    ADD INDEX $unconsumed_idx (run, consumed, created_epoch, seq),
    DROP INDEX $inbox_idx;

-- tag is a digest. A row counts while a run has this id, time of creation and tag.
CREATE TABLE IF NOT EXISTS $tags (
    tag VARBINARY(32) NOT NULL,
    created_at BIGINT NOT NULL,
    run VARBINARY(2048) NOT NULL,
    PRIMARY KEY (tag, created_at, run),
    INDEX $tags_idx (run)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;
