-- The same columns as awaitly's own table, which is used as it is if it exists.
-- json and not jsonb: it preserves the order of keys, the format of numbers, and NUL characters.
CREATE TABLE IF NOT EXISTS {runs} (
    id text COLLATE "C" PRIMARY KEY,
    snapshot json NOT NULL,
    updated_at timestamptz NOT NULL DEFAULT now()
);

-- Every default is a constant, so that existing rows are not rewritten.
-- While a run has an owner, wake_at is the end of its lease.
-- A status of NULL means that another program wrote the row: its snapshot contains the status.
ALTER TABLE {runs}
    ADD COLUMN IF NOT EXISTS workflow text,
    ADD COLUMN IF NOT EXISTS status text,
    ADD COLUMN IF NOT EXISTS wake_at timestamptz,
    ADD COLUMN IF NOT EXISTS awaits jsonb NOT NULL DEFAULT '[]',
    ADD COLUMN IF NOT EXISTS owner text,
    ADD COLUMN IF NOT EXISTS epoch bigint NOT NULL DEFAULT 0,
    ADD COLUMN IF NOT EXISTS takeovers integer NOT NULL DEFAULT 0,
    -- Messages of a previous run with the same id have an older one.
    ADD COLUMN IF NOT EXISTS first_epoch bigint NOT NULL DEFAULT 0,
    -- The last journal entry that the snapshot contains.
    ADD COLUMN IF NOT EXISTS folded_epoch bigint NOT NULL DEFAULT 0,
    ADD COLUMN IF NOT EXISTS folded_n bigint NOT NULL DEFAULT -1,
    -- Whether no journal entry is older than the current lease, or than the rest of an unowned run.
    ADD COLUMN IF NOT EXISTS clean boolean NOT NULL DEFAULT true,
    -- How many messages in the inbox are not consumed.
    ADD COLUMN IF NOT EXISTS messages integer NOT NULL DEFAULT 0,
    -- The exact bytes of the snapshot, if its type (jsonb) does not preserve them.
    ADD COLUMN IF NOT EXISTS exact bytea;

CREATE INDEX IF NOT EXISTS {updated_at_idx} ON {runs} (updated_at DESC, id DESC);
CREATE INDEX IF NOT EXISTS {status_idx} ON {runs} (status, updated_at DESC);
CREATE INDEX IF NOT EXISTS {wake_at_idx} ON {runs} (wake_at, workflow) WHERE wake_at IS NOT NULL;
