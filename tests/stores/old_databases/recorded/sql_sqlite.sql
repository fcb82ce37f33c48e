CREATE TABLE IF NOT EXISTS "workflow_runs_migrations" (version INTEGER PRIMARY KEY);

-- Times are microseconds since 1970. While a run has an owner, wake_at is the end of its lease.
-- creator and ticket are random: a process that finds its own there has created or leased the run.
-- deliveries counts the messages that were sent.
CREATE TABLE IF NOT EXISTS "workflow_runs" (
    id TEXT PRIMARY KEY,
    snapshot TEXT NOT NULL,
    updated_at INTEGER NOT NULL,
    workflow TEXT,
    status TEXT NOT NULL,
    wake_at INTEGER,
    awaits TEXT,
    owner TEXT,
    epoch INTEGER NOT NULL,
    takeovers INTEGER NOT NULL DEFAULT 0,
    created_epoch INTEGER NOT NULL,
    folded_epoch INTEGER NOT NULL,
    folded_n INTEGER NOT NULL DEFAULT -1,
    consumes TEXT,
    deliveries INTEGER NOT NULL DEFAULT 0,
    creator TEXT,
    ticket TEXT
);

CREATE INDEX IF NOT EXISTS "workflow_runs_wake_idx" ON "workflow_runs" (wake_at, workflow);

CREATE INDEX IF NOT EXISTS "workflow_runs_list_idx" ON "workflow_runs" (updated_at, id);

CREATE INDEX IF NOT EXISTS "workflow_runs_status_idx" ON "workflow_runs" (status, updated_at);

-- consumes lists the messages that an entry consumes: ",12,15,". They count as consumed as soon as
-- the entry exists; they are marked later.
CREATE TABLE IF NOT EXISTS "workflow_runs_journal" (
    run TEXT NOT NULL,
    epoch INTEGER NOT NULL,
    n INTEGER NOT NULL,
    data TEXT NOT NULL,
    consumes TEXT,
    PRIMARY KEY (run, epoch, n)
);

-- digest is that of the name, dedup that of the dedup_id.
CREATE TABLE IF NOT EXISTS "workflow_runs_inbox" (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    run TEXT NOT NULL,
    created_epoch INTEGER NOT NULL,
    name TEXT NOT NULL,
    digest TEXT NOT NULL,
    payload TEXT NOT NULL,
    sent_at INTEGER NOT NULL,
    dedup TEXT,
    consumed INTEGER NOT NULL DEFAULT 0,
    UNIQUE (run, created_epoch, dedup)
);

CREATE INDEX IF NOT EXISTS "workflow_runs_inbox_idx" ON "workflow_runs_inbox" (run, consumed, seq);

-- The highest epoch of any deleted run: a new run with the same id starts above it.
CREATE TABLE IF NOT EXISTS "workflow_runs_floor" (
    id INTEGER PRIMARY KEY,
    epoch INTEGER NOT NULL
);

INSERT INTO "workflow_runs_floor" (id, epoch) VALUES (1, 0) ON CONFLICT DO NOTHING;

INSERT INTO "workflow_runs_migrations" (version) VALUES (1);
