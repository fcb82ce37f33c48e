-- As in 0004, but by the indexes: those of the inbox have what was not taken, and what has a dedup_id.
DROP TRIGGER "${table}_deleted";
CREATE TRIGGER "${table}_deleted" AFTER DELETE ON "$table"
BEGIN
    DELETE FROM "${table}_journal" WHERE run = OLD.id;
    DELETE FROM "${table}_inbox"
    WHERE (run = OLD.id AND taken = 0) OR (run = OLD.id AND dedup_id IS NOT NULL);
    UPDATE "${table}_floor" SET epoch = OLD.epoch WHERE epoch < OLD.epoch;
END;
