-- The number of the last entry that the snapshot includes, within the run's epoch.
ALTER TABLE "$table" ADD COLUMN folded INTEGER NOT NULL DEFAULT -1;

-- A table that grows at its end: a commit shared by many runs writes few pages.
-- Clustered by run, it would write one page per run; measured, that took twice as long.
CREATE TABLE "${table}_journal" (
    run TEXT NOT NULL,
    epoch INTEGER NOT NULL,
    n INTEGER NOT NULL,
    data TEXT NOT NULL,
    UNIQUE (run, epoch, n)
);
