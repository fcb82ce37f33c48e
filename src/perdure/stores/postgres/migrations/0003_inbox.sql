-- A message with a dedup_id stays when it was taken, for the same event may come again. Only the
-- digest of that id is kept: the id itself might be too long for an index.
CREATE TABLE IF NOT EXISTS {inbox} (
    seq bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    run text COLLATE "C" NOT NULL,
    born bigint NOT NULL,
    name text NOT NULL,
    payload bytea NOT NULL,
    sent_at timestamptz NOT NULL,
    dedup bytea,
    taken boolean NOT NULL DEFAULT false
);

CREATE INDEX IF NOT EXISTS {inbox_run_idx} ON {inbox} (run, taken, seq);
CREATE UNIQUE INDEX IF NOT EXISTS {inbox_dedup_idx} ON {inbox} (run, born, dedup) WHERE dedup IS NOT NULL;
