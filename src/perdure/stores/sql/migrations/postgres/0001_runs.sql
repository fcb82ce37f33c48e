-- Moments are microseconds since 1970. While a run has an owner, wake_at is the end of its lease.
-- maker and ticket are drawn by lot when a run is made and leased: who finds his own there did it.
CREATE TABLE IF NOT EXISTS {runs} (
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
    born bigint NOT NULL,
    folded_epoch bigint NOT NULL,
    folded_n bigint NOT NULL DEFAULT -1,
    takes text,
    mail bigint NOT NULL DEFAULT 0,
    maker text,
    ticket text
);
CREATE INDEX IF NOT EXISTS {wake_idx} ON {runs} (wake_at, workflow);
CREATE INDEX IF NOT EXISTS {list_idx} ON {runs} (updated_at, id);
CREATE INDEX IF NOT EXISTS {status_idx} ON {runs} (status, updated_at);

-- takes are the messages that an entry consumes: ",12,15,". They count as taken from the moment
-- the entry is there; marking them comes later.
CREATE TABLE IF NOT EXISTS {journal} (
    run text COLLATE "C" NOT NULL,
    epoch bigint NOT NULL,
    n bigint NOT NULL,
    data text NOT NULL,
    takes text,
    PRIMARY KEY (run, epoch, n)
);

-- digest is that of the name; dedup that of the dedup_id.
CREATE TABLE IF NOT EXISTS {inbox} (
    seq bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    run text COLLATE "C" NOT NULL,
    born bigint NOT NULL,
    name text NOT NULL,
    digest text NOT NULL,
    payload text NOT NULL,
    sent_at bigint NOT NULL,
    dedup text,
    taken bigint NOT NULL DEFAULT 0,
    UNIQUE (run, born, dedup)
);
CREATE INDEX IF NOT EXISTS {inbox_idx} ON {inbox} (run, taken, seq);

-- The highest epoch of any deleted run: a new run of the same id begins above it.
CREATE TABLE IF NOT EXISTS {floor} (
    id bigint PRIMARY KEY,
    epoch bigint NOT NULL
);
INSERT INTO {floor} (id, epoch) VALUES (1, 0) ON CONFLICT DO NOTHING;
