CREATE TABLE IF NOT EXISTS "perdure_runs_migrations" (
    version INTEGER PRIMARY KEY,
    name TEXT NOT NULL,
    applied_at TEXT NOT NULL DEFAULT CURRENT_TIMESTAMP
);

-- The table as awaitly creates it: one that exists is used as it is.
CREATE TABLE IF NOT EXISTS "perdure_runs" (
    id TEXT PRIMARY KEY NOT NULL,
    snapshot TEXT NOT NULL,
    updated_at TEXT NOT NULL DEFAULT CURRENT_TIMESTAMP
);

-- Every column has a default, so that rows another program wrote need not be rewritten.
-- Times are microseconds since 1970. While a run has an owner, wake_at is the end of its lease.
ALTER TABLE "perdure_runs" ADD COLUMN workflow TEXT;
ALTER TABLE "perdure_runs" ADD COLUMN status TEXT NOT NULL DEFAULT 'running';
ALTER TABLE "perdure_runs" ADD COLUMN wake_at INTEGER;
ALTER TABLE "perdure_runs" ADD COLUMN awaits TEXT;
ALTER TABLE "perdure_runs" ADD COLUMN owner TEXT;
ALTER TABLE "perdure_runs" ADD COLUMN epoch INTEGER NOT NULL DEFAULT 0;
ALTER TABLE "perdure_runs" ADD COLUMN takeovers INTEGER NOT NULL DEFAULT 0;

-- updated_at in one format: awaitly separates date and time by a space.
ALTER TABLE "perdure_runs" ADD COLUMN listed_at TEXT
    GENERATED ALWAYS AS (coalesce(replace(updated_at, ' ', 'T'), '')) VIRTUAL;

CREATE INDEX "perdure_runs_wake" ON "perdure_runs" (wake_at, id, workflow) WHERE wake_at IS NOT NULL;
CREATE INDEX "perdure_runs_list" ON "perdure_runs" (listed_at, id, status, workflow);

-- The highest epoch of any deleted run: a new run of the same id begins above it.
CREATE TABLE "perdure_runs_floor" (
    epoch INTEGER NOT NULL
);
INSERT INTO "perdure_runs_floor" (epoch) VALUES (0);

-- The number of the last entry that the snapshot includes, within the run's epoch.
ALTER TABLE "perdure_runs" ADD COLUMN folded INTEGER NOT NULL DEFAULT -1;

-- A table that grows at its end: a commit shared by many runs writes few pages.
-- Clustered by run, it would write one page per run; measured, that took twice as long.
CREATE TABLE "perdure_runs_journal" (
    run TEXT NOT NULL,
    epoch INTEGER NOT NULL,
    n INTEGER NOT NULL,
    data TEXT NOT NULL,
    UNIQUE (run, epoch, n)
);

-- AUTOINCREMENT: the number is the message's id and must never be reused.
CREATE TABLE "perdure_runs_inbox" (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    run TEXT NOT NULL,
    name TEXT NOT NULL,
    payload TEXT NOT NULL,
    sent_at INTEGER NOT NULL,
    dedup_id TEXT,
    taken INTEGER NOT NULL DEFAULT 0
);

CREATE INDEX "perdure_runs_inbox_waiting" ON "perdure_runs_inbox" (run, seq, name) WHERE taken = 0;
CREATE UNIQUE INDEX "perdure_runs_inbox_dedup" ON "perdure_runs_inbox" (run, dedup_id) WHERE dedup_id IS NOT NULL;

-- A trigger, so that nothing is left behind when another program deletes a row.
CREATE TRIGGER "perdure_runs_deleted" AFTER DELETE ON "perdure_runs"
BEGIN
    DELETE FROM "perdure_runs_journal" WHERE run = OLD.id;
    DELETE FROM "perdure_runs_inbox" WHERE run = OLD.id;
    UPDATE "perdure_runs_floor" SET epoch = max(epoch, OLD.epoch);
END;

-- As in 0004, but by the indexes: those of the inbox have what was not taken, and what has a dedup_id.
DROP TRIGGER "perdure_runs_deleted";
CREATE TRIGGER "perdure_runs_deleted" AFTER DELETE ON "perdure_runs"
BEGIN
    DELETE FROM "perdure_runs_journal" WHERE run = OLD.id;
    DELETE FROM "perdure_runs_inbox"
    WHERE (run = OLD.id AND taken = 0) OR (run = OLD.id AND dedup_id IS NOT NULL);
    UPDATE "perdure_runs_floor" SET epoch = OLD.epoch WHERE epoch < OLD.epoch;
END;

-- updated_at as perdure writes it, 2030-01-01T00:00:00.000000Z, whatever another program wrote: a
-- page of a list can then begin after any time. What is not a time counts as 1970.
DROP INDEX "perdure_runs_list";
ALTER TABLE "perdure_runs" DROP COLUMN listed_at;
ALTER TABLE "perdure_runs" ADD COLUMN listed_at TEXT GENERATED ALWAYS AS (
    CASE
        WHEN strftime('%s', updated_at) IS NULL THEN '1970-01-01T00:00:00.000000Z'
        WHEN length(updated_at) = 27 THEN updated_at
        ELSE strftime('%Y-%m-%dT%H:%M:%f000Z', updated_at)
    END
) VIRTUAL;
CREATE INDEX "perdure_runs_list" ON "perdure_runs" (listed_at, id, status, workflow);

INSERT INTO "perdure_runs_migrations" (version, name) VALUES (1, '0001_runs');
INSERT INTO "perdure_runs_migrations" (version, name) VALUES (2, '0002_schedule');
INSERT INTO "perdure_runs_migrations" (version, name) VALUES (3, '0003_journal');
INSERT INTO "perdure_runs_migrations" (version, name) VALUES (4, '0004_inbox');
INSERT INTO "perdure_runs_migrations" (version, name) VALUES (5, '0005_deleted');
INSERT INTO "perdure_runs_migrations" (version, name) VALUES (6, '0006_listed_at');
