-- Moments are microseconds since 1970. While a run has an owner, wake_at is the end of its lease.
-- maker and ticket are drawn by lot when a run is made and leased: who finds his own there did it.
CREATE TABLE IF NOT EXISTS {runs} (
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
    born INTEGER NOT NULL,
    folded_epoch INTEGER NOT NULL,
    folded_n INTEGER NOT NULL DEFAULT -1,
    takes TEXT,
    mail INTEGER NOT NULL DEFAULT 0,
    maker TEXT,
    ticket TEXT
);
CREATE INDEX IF NOT EXISTS {wake_idx} ON {runs} (wake_at, workflow);
CREATE INDEX IF NOT EXISTS {list_idx} ON {runs} (updated_at, id);
CREATE INDEX IF NOT EXISTS {status_idx} ON {runs} (status, updated_at);

-- takes are the messages that an entry consumes: ",12,15,". They count as taken from the moment
-- the entry is there; marking them comes later.
CREATE TABLE IF NOT EXISTS {journal} (
    run TEXT NOT NULL,
    epoch INTEGER NOT NULL,
    n INTEGER NOT NULL,
    data TEXT NOT NULL,
    takes TEXT,
    PRIMARY KEY (run, epoch, n)
);

-- digest is that of the name; dedup that of the dedup_id.
CREATE TABLE IF NOT EXISTS {inbox} (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    run TEXT NOT NULL,
    born INTEGER NOT NULL,
    name TEXT NOT NULL,
    digest TEXT NOT NULL,
    payload TEXT NOT NULL,
    sent_at INTEGER NOT NULL,
    dedup TEXT,
    taken INTEGER NOT NULL DEFAULT 0,
    UNIQUE (run, born, dedup)
);
CREATE INDEX IF NOT EXISTS {inbox_idx} ON {inbox} (run, taken, seq);

-- The highest epoch of any deleted run: a new run of the same id begins above it.
CREATE TABLE IF NOT EXISTS {floor} (
    id INTEGER PRIMARY KEY,
    epoch INTEGER NOT NULL
);
INSERT INTO {floor} (id, epoch) VALUES (1, 0) ON CONFLICT DO NOTHING;
