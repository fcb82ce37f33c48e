-- expires_at is in microseconds since 1970; NULL never expires.
CREATE TABLE "$table" (
    key TEXT PRIMARY KEY NOT NULL,
    value TEXT NOT NULL,
    expires_at INTEGER
);

CREATE INDEX "${table}_expiry" ON "$table" (expires_at) WHERE expires_at IS NOT NULL;
