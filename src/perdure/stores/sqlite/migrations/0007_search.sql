-- Constants as defaults: no row is rewritten. created_at, in microseconds since 1970, stays NULL in
-- rows that exist already and in those that other programs insert.
ALTER TABLE "$table" ADD COLUMN queue TEXT NOT NULL DEFAULT '';
ALTER TABLE "$table" ADD COLUMN version INTEGER NOT NULL DEFAULT 0;
ALTER TABLE "$table" ADD COLUMN tags TEXT NOT NULL DEFAULT '[]';
ALTER TABLE "$table" ADD COLUMN summary BLOB NOT NULL DEFAULT x'';
ALTER TABLE "$table" ADD COLUMN created_at INTEGER;

-- Each queue and workflow is one range, ordered by wake time. A version that a worker cannot drive
-- is skipped without reading its row.
DROP INDEX "${table}_wake";
CREATE INDEX "${table}_due" ON "$table" (queue, workflow, wake_at, version, id) WHERE wake_at IS NOT NULL;

-- listed_at stays a virtual column: reading it from these indexes does not read the row either.
-- A column of its own would have to be filled in every row, and by a trigger in those of others.
DROP INDEX "${table}_list";
CREATE INDEX "${table}_list" ON "$table" (listed_at, id);
CREATE INDEX "${table}_status" ON "$table" (workflow, status, listed_at, id);

-- A run is under each of its tags while it has it, whatever changes or deletes its row.
CREATE TABLE "${table}_tags" (
    tag TEXT NOT NULL,
    created_at INTEGER NOT NULL,
    run TEXT NOT NULL,
    PRIMARY KEY (tag, created_at, run)
) WITHOUT ROWID;

CREATE TRIGGER "${table}_tags_inserted" AFTER INSERT ON "$table" WHEN NEW.tags <> '[]'
BEGIN
    INSERT INTO "${table}_tags" (tag, created_at, run)
    SELECT value, NEW.created_at, NEW.id FROM json_each(NEW.tags);
END;

CREATE TRIGGER "${table}_tags_updated" AFTER UPDATE OF tags ON "$table" WHEN NEW.tags <> OLD.tags
BEGIN
    DELETE FROM "${table}_tags"
    WHERE tag IN (SELECT value FROM json_each(OLD.tags)) AND created_at = OLD.created_at AND run = OLD.id;
    INSERT INTO "${table}_tags" (tag, created_at, run)
    SELECT value, NEW.created_at, NEW.id FROM json_each(NEW.tags);
END;

CREATE TRIGGER "${table}_tags_deleted" AFTER DELETE ON "$table" WHEN OLD.tags <> '[]'
BEGIN
    DELETE FROM "${table}_tags"
    WHERE tag IN (SELECT value FROM json_each(OLD.tags)) AND created_at = OLD.created_at AND run = OLD.id;
END;

-- How many unconsumed messages an inbox has: counting them takes longer the more there are. In a
-- table of its own, because SQLite would write the run's whole row, snapshot included, per message.
CREATE TABLE "${table}_unconsumed" (
    run TEXT PRIMARY KEY NOT NULL,
    messages INTEGER NOT NULL
) WITHOUT ROWID;
INSERT INTO "${table}_unconsumed" (run, messages)
SELECT run, count(*) FROM "${table}_inbox" WHERE taken = 0 GROUP BY run;

CREATE TRIGGER "${table}_message_sent" AFTER INSERT ON "${table}_inbox"
BEGIN
    INSERT INTO "${table}_unconsumed" (run, messages) VALUES (NEW.run, 1)
    ON CONFLICT (run) DO UPDATE SET messages = messages + 1;
END;

CREATE TRIGGER "${table}_message_taken" AFTER UPDATE OF taken ON "${table}_inbox" WHEN NEW.taken > OLD.taken
BEGIN
    UPDATE "${table}_unconsumed" SET messages = messages - 1 WHERE run = NEW.run;
END;

CREATE TRIGGER "${table}_message_deleted" AFTER DELETE ON "${table}_inbox" WHEN OLD.taken = 0
BEGIN
    UPDATE "${table}_unconsumed" SET messages = messages - 1 WHERE run = OLD.run;
END;

-- As in 0005, and the number of messages.
DROP TRIGGER "${table}_deleted";
CREATE TRIGGER "${table}_deleted" AFTER DELETE ON "$table"
BEGIN
    DELETE FROM "${table}_journal" WHERE run = OLD.id;
    DELETE FROM "${table}_unconsumed" WHERE run = OLD.id;
    DELETE FROM "${table}_inbox"
    WHERE (run = OLD.id AND taken = 0) OR (run = OLD.id AND dedup_id IS NOT NULL);
    UPDATE "${table}_floor" SET epoch = OLD.epoch WHERE epoch < OLD.epoch;
END;
