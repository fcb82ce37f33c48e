-- The shape awaitly gives its own table: one that is there already is taken as it is.
CREATE TABLE IF NOT EXISTS "$table" (
    id TEXT PRIMARY KEY NOT NULL,
    snapshot TEXT NOT NULL,
    updated_at TEXT NOT NULL DEFAULT CURRENT_TIMESTAMP
);
