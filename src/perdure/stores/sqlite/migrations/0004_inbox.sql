-- AUTOINCREMENT: the number is the message's id and must never be reused.
CREATE TABLE "${table}_inbox" (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    run TEXT NOT NULL,
    name TEXT NOT NULL,
    payload TEXT NOT NULL,
    sent_at INTEGER NOT NULL,
    dedup_id TEXT,
    taken INTEGER NOT NULL DEFAULT 0
);

CREATE INDEX "${table}_inbox_waiting" ON "${table}_inbox" (run, seq, name) WHERE taken = 0;
CREATE UNIQUE INDEX "${table}_inbox_dedup" ON "${table}_inbox" (run, dedup_id) WHERE dedup_id IS NOT NULL;

-- A trigger, so that nothing is left behind when another program deletes a row.
CREATE TRIGGER "${table}_deleted" AFTER DELETE ON "$table"
BEGIN
    DELETE FROM "${table}_journal" WHERE run = OLD.id;
    DELETE FROM "${table}_inbox" WHERE run = OLD.id;
    UPDATE "${table}_floor" SET epoch = max(epoch, OLD.epoch);
END;
