-- A consumed message with a dedup id is kept, because the same event may be sent again. Only the
-- digest of the id is stored: the id itself may be too long for an index.
CREATE TABLE IF NOT EXISTS {inbox} (
    seq bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    run text COLLATE "C" NOT NULL,
    first_epoch bigint NOT NULL,
    name text NOT NULL,
    payload bytea NOT NULL,
    sent_at timestamptz NOT NULL,
    dedup bytea,
    consumed boolean NOT NULL DEFAULT false
);

CREATE INDEX IF NOT EXISTS {inbox_run_idx} ON {inbox} (run, consumed, seq);
CREATE UNIQUE INDEX IF NOT EXISTS {inbox_dedup_idx} ON {inbox} (run, first_epoch, dedup) WHERE dedup IS NOT NULL;
