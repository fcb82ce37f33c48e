-- Building the indexes blocks writers. For a large table that is in use, run these statements
-- beforehand, with the name of the table in place of "perdure_runs"; what exists is not built again.
--
--     ALTER TABLE perdure_runs
--         ADD COLUMN IF NOT EXISTS queue text COLLATE "C" NOT NULL DEFAULT '',
--         ADD COLUMN IF NOT EXISTS version bigint NOT NULL DEFAULT 0;
--     CREATE INDEX CONCURRENTLY IF NOT EXISTS perdure_runs_due_idx ON perdure_runs
--         (queue, coalesce(workflow, ''), wake_at, version) WHERE wake_at IS NOT NULL;
--     CREATE INDEX CONCURRENTLY IF NOT EXISTS perdure_runs_workflow_idx ON perdure_runs
--         (workflow, status, updated_at DESC, id DESC);
--
-- In a table that awaitly created, the last index is
--
--     CREATE INDEX CONCURRENTLY IF NOT EXISTS perdure_runs_workflow_idx ON perdure_runs (
--         coalesce(workflow, snapshot ->> 'workflowName'),
--         coalesce(status, snapshot #>> '{{execution,status}}', 'running'),
--         updated_at DESC, id DESC
--     );

-- Every default is a constant, so that existing rows are not rewritten.
-- Rows that were created before have no created_at, until they are given tags.
ALTER TABLE {runs}
    ADD COLUMN IF NOT EXISTS queue text COLLATE "C" NOT NULL DEFAULT '',
    ADD COLUMN IF NOT EXISTS version bigint NOT NULL DEFAULT 0,
    ADD COLUMN IF NOT EXISTS tags jsonb NOT NULL DEFAULT '[]',
    ADD COLUMN IF NOT EXISTS summary bytea NOT NULL DEFAULT '',
    ADD COLUMN IF NOT EXISTS created_at timestamptz;

DO $migration$
DECLARE
    failed regclass;
BEGIN
    -- A concurrent build that failed leaves an index that is never used.
    FOR failed IN SELECT indexrelid FROM pg_index
        WHERE indrelid = '{runs}'::regclass AND NOT indisvalid
    LOOP
        EXECUTE format('DROP INDEX %s', failed);
    END LOOP;
    IF (
        SELECT atttypid = 'jsonb'::regtype FROM pg_attribute
        WHERE attrelid = '{runs}'::regclass AND attname = 'snapshot'
    ) THEN
        -- Rows that awaitly writes have a workflow and a status in their snapshot only.
        CREATE INDEX IF NOT EXISTS {workflow_idx} ON {runs} (
            coalesce(workflow, snapshot ->> 'workflowName'),
            coalesce(status, snapshot #>> '{{execution,status}}', 'running'),
            updated_at DESC, id DESC
        );
    ELSE
        CREATE INDEX IF NOT EXISTS {workflow_idx} ON {runs} (
            workflow, status, updated_at DESC, id DESC
        );
    END IF;
END $migration$;

CREATE INDEX IF NOT EXISTS {due_idx} ON {runs} (
    queue, coalesce(workflow, ''), wake_at, version
) WHERE wake_at IS NOT NULL;
DROP INDEX IF EXISTS {schema}{status_idx};
DROP INDEX IF EXISTS {schema}{wake_at_idx};

-- Only the digest of a tag is stored: a tag and an id together may be too long for an index.
CREATE TABLE IF NOT EXISTS {tags} (
    run text COLLATE "C" NOT NULL,
    tag bytea NOT NULL,
    created_at timestamptz NOT NULL,
    PRIMARY KEY (run, tag)
);

CREATE INDEX IF NOT EXISTS {tags_tag_idx} ON {tags} (tag, created_at, run);
