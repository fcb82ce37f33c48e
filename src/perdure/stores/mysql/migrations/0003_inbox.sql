-- A consumed message with a dedup id is kept, because the same event may be sent again. Only the
-- digest of the id is stored: the id itself may be too long for an index.
CREATE TABLE IF NOT EXISTS {inbox} (
    seq BIGINT NOT NULL AUTO_INCREMENT,
    run VARCHAR(760) NOT NULL,
    name LONGTEXT NOT NULL,
    payload LONGBLOB NOT NULL,
    sent_at DATETIME(6) NOT NULL,
    dedup BINARY(16) NULL,
    consumed TINYINT NOT NULL DEFAULT 0,
    PRIMARY KEY (seq),
    KEY by_run (run, consumed, seq),
    UNIQUE KEY by_dedup (run, dedup)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC CHARACTER SET utf8mb4 COLLATE {collation};
