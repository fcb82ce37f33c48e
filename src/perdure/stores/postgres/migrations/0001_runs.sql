-- The shape awaitly gives its own table: one that is there already is taken as it is.
-- json and not jsonb: it keeps the order of keys, the spelling of numbers, and NUL characters.
CREATE TABLE IF NOT EXISTS {runs} (
    id text COLLATE "C" PRIMARY KEY,
    snapshot json NOT NULL,
    updated_at timestamptz NOT NULL DEFAULT now()
);

-- Every column has a default that is no expression: rows another program wrote are not rewritten.
-- While a run has an owner, wake_at is the end of its lease.
-- A status of NULL means that another program wrote the row: its snapshot knows.
ALTER TABLE {runs}
    ADD COLUMN IF NOT EXISTS workflow text,
    ADD COLUMN IF NOT EXISTS status text,
    ADD COLUMN IF NOT EXISTS wake_at timestamptz,
    ADD COLUMN IF NOT EXISTS awaits jsonb NOT NULL DEFAULT '[]',
    ADD COLUMN IF NOT EXISTS owner text,
    ADD COLUMN IF NOT EXISTS epoch bigint NOT NULL DEFAULT 0,
    ADD COLUMN IF NOT EXISTS takeovers integer NOT NULL DEFAULT 0,
    -- The first epoch of the run: what an earlier run of the same id left behind is older.
    ADD COLUMN IF NOT EXISTS born bigint NOT NULL DEFAULT 0,
    -- The place of the last journal entry that the snapshot holds.
    ADD COLUMN IF NOT EXISTS folded_epoch bigint NOT NULL DEFAULT 0,
    ADD COLUMN IF NOT EXISTS folded_n bigint NOT NULL DEFAULT -1,
    -- No journal entry is older than the present lease, or than the rest when there is none.
    ADD COLUMN IF NOT EXISTS clean boolean NOT NULL DEFAULT true,
    -- How many messages lie untaken in the inbox.
    ADD COLUMN IF NOT EXISTS mail integer NOT NULL DEFAULT 0,
    -- What was written, to the letter, where the snapshot's own type (jsonb) forgets it.
    ADD COLUMN IF NOT EXISTS exact bytea;

CREATE INDEX IF NOT EXISTS {updated_at_idx} ON {runs} (updated_at DESC, id DESC);
CREATE INDEX IF NOT EXISTS {status_idx} ON {runs} (status, updated_at DESC);
CREATE INDEX IF NOT EXISTS {wake_at_idx} ON {runs} (wake_at, workflow) WHERE wake_at IS NOT NULL;
