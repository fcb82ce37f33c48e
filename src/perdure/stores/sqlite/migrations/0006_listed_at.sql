-- updated_at as perdure writes it, 2030-01-01T00:00:00.000000Z, whatever another program wrote: a
-- page of a list can then begin after any time. What is not a time counts as 1970.
DROP INDEX "${table}_list";
ALTER TABLE "$table" DROP COLUMN listed_at;
ALTER TABLE "$table" ADD COLUMN listed_at TEXT GENERATED ALWAYS AS (
    CASE
        WHEN strftime('%s', updated_at) IS NULL THEN '1970-01-01T00:00:00.000000Z'
        WHEN length(updated_at) = 27 THEN updated_at
        ELSE strftime('%Y-%m-%dT%H:%M:%f000Z', updated_at)
    END
) VIRTUAL;
CREATE INDEX "${table}_list" ON "$table" (listed_at, id, status, workflow);
