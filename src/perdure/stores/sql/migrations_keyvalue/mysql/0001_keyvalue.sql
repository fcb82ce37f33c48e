-- expires_at is in microseconds since 1970; NULL never expires.
-- revision changes with every update: some databases do not count rows that stay as they are.
-- What is compared is binary: text would also be equal with spaces at its end.
CREATE TABLE IF NOT EXISTS $table (
    id VARBINARY(2500) NOT NULL PRIMARY KEY,
    value LONGBLOB NOT NULL,
    expires_at BIGINT,
    revision BIGINT NOT NULL,
    INDEX $expiry_idx (expires_at)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC;
