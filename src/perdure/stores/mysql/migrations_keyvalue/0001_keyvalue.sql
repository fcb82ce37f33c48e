-- Keys are binary: text would also be equal in another case or with spaces at its end.
-- revision changes with every update: the server does not count rows that stay as they are.
CREATE TABLE IF NOT EXISTS {table} (
    id VARBINARY(2500) NOT NULL,
    value LONGTEXT NOT NULL,
    expires_at DATETIME(6) NULL,
    revision BIGINT NOT NULL DEFAULT 0,
    PRIMARY KEY (id),
    KEY by_expiry (expires_at)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC CHARACTER SET utf8mb4 COLLATE {collation};
