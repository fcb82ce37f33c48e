-- Every column has a default, so that rows another program wrote need not be rewritten.
-- Times are microseconds since 1970. While a run has an owner, wake_at is the end of its lease.
ALTER TABLE "$table" ADD COLUMN workflow TEXT;
ALTER TABLE "$table" ADD COLUMN status TEXT NOT NULL DEFAULT 'running';
ALTER TABLE "$table" ADD COLUMN wake_at INTEGER;
ALTER TABLE "$table" ADD COLUMN awaits TEXT;
ALTER TABLE "$table" ADD COLUMN owner TEXT;
ALTER TABLE "$table" ADD COLUMN epoch INTEGER NOT NULL DEFAULT 0;
ALTER TABLE "$table" ADD COLUMN takeovers INTEGER NOT NULL DEFAULT 0;

-- updated_at in one format: awaitly separates date and time by a space.
ALTER TABLE "$table" ADD COLUMN listed_at TEXT
    GENERATED ALWAYS AS (coalesce(replace(updated_at, ' ', 'T'), '')) VIRTUAL;

CREATE INDEX "${table}_wake" ON "$table" (wake_at, id, workflow) WHERE wake_at IS NOT NULL;
CREATE INDEX "${table}_list" ON "$table" (listed_at, id, status, workflow);

-- The highest epoch of any deleted run: a new run of the same id begins above it.
CREATE TABLE "${table}_floor" (
    epoch INTEGER NOT NULL
);
INSERT INTO "${table}_floor" (epoch) VALUES (0);
