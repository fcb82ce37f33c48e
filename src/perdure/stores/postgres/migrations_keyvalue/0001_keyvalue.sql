-- The same columns as awaitly's own table, which is used as it is if it exists.
CREATE TABLE IF NOT EXISTS {table} (
    key text COLLATE "C" PRIMARY KEY,
    value text NOT NULL,
    expires_at timestamptz,
    updated_at timestamptz DEFAULT now()
);

CREATE INDEX IF NOT EXISTS {expires_at_idx} ON {table} (expires_at) WHERE expires_at IS NOT NULL;
