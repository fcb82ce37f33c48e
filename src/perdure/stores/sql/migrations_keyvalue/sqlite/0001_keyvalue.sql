-- expires_at is in microseconds since 1970; NULL never expires.
-- revision changes with every update: some databases do not count rows that stay as they are.
CREATE TABLE IF NOT EXISTS $table (
    id TEXT PRIMARY KEY,
    value TEXT NOT NULL,
    expires_at INTEGER,
    revision INTEGER NOT NULL
);
CREATE INDEX IF NOT EXISTS $expiry_idx ON $table (expires_at);
