-- This rebuilds the table, and writers wait for it. For a large table that is in use, run the
-- statement beforehand with a tool that copies tables online, such as pt-online-schema-change or
-- gh-ost; it is not run again if the columns exist.
--
-- One index cannot contain a queue and a workflow in full: `lane` is a digest of the workflow. It is
-- not a generated column, because MariaDB reads all rows of an index on one to find its distinct
-- values. `scheduled` makes `by_due` what elsewhere would be an index on some of the rows.
-- Every secondary index of InnoDB ends with the id.
-- Rows that were created before have no created_at, until they are given tags.
ALTER TABLE {runs}
    ADD COLUMN queue VARCHAR(512) NOT NULL DEFAULT '',
    ADD COLUMN version BIGINT NOT NULL DEFAULT 0,
    ADD COLUMN tags LONGTEXT NULL,
    ADD COLUMN summary VARBINARY(1024) NULL,
    ADD COLUMN created_at DATETIME(6) NULL,
    -- How many messages in the run's inbox are not consumed.
    ADD COLUMN messages INT NOT NULL DEFAULT 0,
    ADD COLUMN lane BINARY(16) NOT NULL
        DEFAULT (UNHEX(LEFT(SHA2(COALESCE(workflow, ''), 256), 32))),
    ADD COLUMN scheduled TINYINT AS (wake_at IS NOT NULL) STORED,
    ADD KEY by_due (scheduled, queue, lane, wake_at, version),
    ADD KEY by_workflow (workflow, status, updated_at),
    DROP KEY by_wake,
    DROP KEY by_status
