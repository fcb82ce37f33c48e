-- The collation compares strings byte for byte, including trailing spaces. With four bytes per
-- character, an index on three columns allows no longer id than this.
-- Times are UTC. While a run has an owner, wake_at is the end of its lease.
CREATE TABLE IF NOT EXISTS {runs} (
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
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC CHARACTER SET utf8mb4 COLLATE {collation};
