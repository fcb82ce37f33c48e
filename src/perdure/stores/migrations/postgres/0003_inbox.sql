-- A message with a dedup_id stays after it was taken: the same event may come again.
CREATE TABLE IF NOT EXISTS {inbox} (
    seq bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    run text COLLATE "C" NOT NULL,
    born bigint NOT NULL,
    name text NOT NULL,
    payload bytea NOT NULL,
    sent_at timestamptz NOT NULL,
    dedup_id text,
    taken boolean NOT NULL DEFAULT false
);

CREATE INDEX IF NOT EXISTS {inbox_waiting_idx} ON {inbox} (run, seq) WHERE NOT taken;
CREATE UNIQUE INDEX IF NOT EXISTS {inbox_dedup_idx} ON {inbox} (run, born, dedup_id) WHERE dedup_id IS NOT NULL;
