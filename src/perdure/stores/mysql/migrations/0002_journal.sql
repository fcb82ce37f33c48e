-- An entry that its run's fence refuses is written with epoch 0. The constraint rejects it, whatever
-- the session's mode, and with it the whole statement.
CREATE TABLE IF NOT EXISTS {journal} (
    run VARCHAR(760) NOT NULL,
    epoch BIGINT NOT NULL,
    n BIGINT NOT NULL,
    data LONGBLOB NOT NULL,
    PRIMARY KEY (run, epoch, n),
    CONSTRAINT {fence} CHECK (epoch > 0)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC CHARACTER SET utf8mb4 COLLATE {collation};
