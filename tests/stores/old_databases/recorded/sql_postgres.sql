CREATE TABLE IF NOT EXISTS "workflow_runs_migrations" (version INTEGER PRIMARY KEY);

-- Times are microseconds since 1970. While a run has an owner, wake_at is the end of its lease.
-- creator and ticket are random: a process that finds its own there has created or leased the run.
-- deliveries counts the messages that were sent.
CREATE TABLE IF NOT EXISTS "workflow_runs" (
    id text COLLATE "C" PRIMARY KEY,
    snapshot text NOT NULL,
    updated_at bigint NOT NULL,
    workflow text COLLATE "C",
    status text NOT NULL,
    wake_at bigint,
    awaits text,
    owner text COLLATE "C",
    epoch bigint NOT NULL,
    takeovers bigint NOT NULL DEFAULT 0,
    created_epoch bigint NOT NULL,
    folded_epoch bigint NOT NULL,
    folded_n bigint NOT NULL DEFAULT -1,
    consumes text,
    deliveries bigint NOT NULL DEFAULT 0,
    creator text,
    ticket text
);

CREATE INDEX IF NOT EXISTS "workflow_runs_wake_idx" ON "workflow_runs" (wake_at, workflow);

CREATE INDEX IF NOT EXISTS "workflow_runs_list_idx" ON "workflow_runs" (updated_at, id);

CREATE INDEX IF NOT EXISTS "workflow_runs_status_idx" ON "workflow_runs" (status, updated_at);

-- consumes lists the messages that an entry consumes: ",12,15,". They count as consumed as soon as
-- the entry exists; they are marked later.
CREATE TABLE IF NOT EXISTS "workflow_runs_journal" (
    run text COLLATE "C" NOT NULL,
    epoch bigint NOT NULL,
    n bigint NOT NULL,
    data text NOT NULL,
    consumes text,
    PRIMARY KEY (run, epoch, n)
);

-- digest is that of the name, dedup that of the dedup_id.
CREATE TABLE IF NOT EXISTS "workflow_runs_inbox" (
    seq bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    run text COLLATE "C" NOT NULL,
    created_epoch bigint NOT NULL,
    name text NOT NULL,
    digest text NOT NULL,
    payload text NOT NULL,
    sent_at bigint NOT NULL,
    dedup text,
    consumed bigint NOT NULL DEFAULT 0,
    UNIQUE (run, created_epoch, dedup)
);

CREATE INDEX IF NOT EXISTS "workflow_runs_inbox_idx" ON "workflow_runs_inbox" (run, consumed, seq);

-- The highest epoch of any deleted run: a new run with the same id starts above it.
CREATE TABLE IF NOT EXISTS "workflow_runs_floor" (
    id bigint PRIMARY KEY,
    epoch bigint NOT NULL
);

INSERT INTO "workflow_runs_floor" (id, epoch) VALUES (1, 0) ON CONFLICT DO NOTHING;

INSERT INTO "workflow_runs_migrations" (version) VALUES (1);
