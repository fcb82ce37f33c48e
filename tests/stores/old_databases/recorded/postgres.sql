CREATE TABLE IF NOT EXISTS "perdure_runs_migrations" (
    version integer PRIMARY KEY,
    name text NOT NULL,
    applied_at timestamptz NOT NULL DEFAULT now()
);

-- The same columns as awaitly's own table, which is used as it is if it exists.
-- json and not jsonb: it preserves the order of keys, the format of numbers, and NUL characters.
CREATE TABLE IF NOT EXISTS "perdure_runs" (
    id text COLLATE "C" PRIMARY KEY,
    snapshot json NOT NULL,
    updated_at timestamptz NOT NULL DEFAULT now()
);

-- Every default is a constant, so that existing rows are not rewritten.
-- While a run has an owner, wake_at is the end of its lease.
-- A status of NULL means that another program wrote the row: its snapshot contains the status.
ALTER TABLE "perdure_runs"
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

CREATE INDEX IF NOT EXISTS "perdure_runs_updated_at_idx" ON "perdure_runs" (updated_at DESC, id DESC);
CREATE INDEX IF NOT EXISTS "perdure_runs_status_idx" ON "perdure_runs" (status, updated_at DESC);
CREATE INDEX IF NOT EXISTS "perdure_runs_wake_at_idx" ON "perdure_runs" (wake_at, workflow) WHERE wake_at IS NOT NULL;

CREATE TABLE IF NOT EXISTS "perdure_runs_journal" (
    run text COLLATE "C" NOT NULL,
    epoch bigint NOT NULL,
    n bigint NOT NULL,
    data bytea NOT NULL,
    PRIMARY KEY (run, epoch, n)
);

-- A consumed message with a dedup id is kept, because the same event may be sent again. Only the
-- digest of the id is stored: the id itself may be too long for an index.
CREATE TABLE IF NOT EXISTS "perdure_runs_inbox" (
    seq bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    run text COLLATE "C" NOT NULL,
    first_epoch bigint NOT NULL,
    name text NOT NULL,
    payload bytea NOT NULL,
    sent_at timestamptz NOT NULL,
    dedup bytea,
    consumed boolean NOT NULL DEFAULT false
);

CREATE INDEX IF NOT EXISTS "perdure_runs_inbox_run_idx" ON "perdure_runs_inbox" (run, consumed, seq);
CREATE UNIQUE INDEX IF NOT EXISTS "perdure_runs_inbox_dedup_idx" ON "perdure_runs_inbox" (run, first_epoch, dedup) WHERE dedup IS NOT NULL;

INSERT INTO "perdure_runs_migrations" (version, name) VALUES (1, '0001_runs');
INSERT INTO "perdure_runs_migrations" (version, name) VALUES (2, '0002_journal');
INSERT INTO "perdure_runs_migrations" (version, name) VALUES (3, '0003_inbox');
