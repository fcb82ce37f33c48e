-- The table as awaitly creates it: one that exists is used as it is.
CREATE TABLE IF NOT EXISTS "$table" (
    id TEXT PRIMARY KEY NOT NULL,
    snapshot TEXT NOT NULL,
    updated_at TEXT NOT NULL DEFAULT CURRENT_TIMESTAMP
);
