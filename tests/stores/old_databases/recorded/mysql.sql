CREATE TABLE IF NOT EXISTS `perdure_runs_migrations` (
    version INT NOT NULL PRIMARY KEY,
    name VARCHAR(100) NOT NULL,
    applied_at DATETIME(6) NOT NULL
) ENGINE = InnoDB;

-- The collation compares strings byte for byte, including trailing spaces. With four bytes per
-- character, an index on three columns allows no longer id than this.
-- Times are UTC. While a run has an owner, wake_at is the end of its lease.
CREATE TABLE IF NOT EXISTS `perdure_runs` (
    id VARCHAR(760) NOT NULL,
    snapshot LONGTEXT NOT NULL,
    updated_at DATETIME(6) NOT NULL DEFAULT CURRENT_TIMESTAMP(6),
    workflow VARCHAR(512) NULL,
    status VARCHAR(16) NOT NULL DEFAULT 'running',
    wake_at DATETIME(6) NULL,
    awaits LONGTEXT NULL,
    owner VARCHAR(512) NULL,
    epoch BIGINT NOT NULL,
    takeovers INT NOT NULL DEFAULT 0,
    -- The number of the last entry that the snapshot contains, within the run's epoch.
    folded BIGINT NOT NULL DEFAULT -1,
    PRIMARY KEY (id),
    KEY by_update (updated_at),
    KEY by_status (status, updated_at),
    KEY by_wake (wake_at, workflow)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin;

-- An entry that its run's fence refuses is written with epoch 0. The constraint rejects it, whatever
-- the session's mode, and with it the whole statement.
CREATE TABLE IF NOT EXISTS `perdure_runs_journal` (
    run VARCHAR(760) NOT NULL,
    epoch BIGINT NOT NULL,
    n BIGINT NOT NULL,
    data LONGBLOB NOT NULL,
    PRIMARY KEY (run, epoch, n),
    CONSTRAINT `perdure_runs_fence` CHECK (epoch > 0)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin;

-- A consumed message with a dedup id is kept, because the same event may be sent again. Only the
-- digest of the id is stored: the id itself may be too long for an index.
CREATE TABLE IF NOT EXISTS `perdure_runs_inbox` (
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
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin;

INSERT INTO `perdure_runs_migrations` (version, name, applied_at) VALUES (1, '0001_runs', UTC_TIMESTAMP(6));
INSERT INTO `perdure_runs_migrations` (version, name, applied_at) VALUES (2, '0002_journal', UTC_TIMESTAMP(6));
INSERT INTO `perdure_runs_migrations` (version, name, applied_at) VALUES (3, '0003_inbox', UTC_TIMESTAMP(6));
