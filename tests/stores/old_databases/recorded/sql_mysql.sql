CREATE TABLE IF NOT EXISTS `workflow_runs_migrations` (version INTEGER PRIMARY KEY);

-- Times are microseconds since 1970. While a run has an owner, wake_at is the end of its lease.
-- creator and ticket are random: a process that finds its own there has created or leased the run.
-- deliveries counts the messages that were sent.
-- What is compared is binary: text would also be equal in another case or with spaces at its end.
CREATE TABLE IF NOT EXISTS `workflow_runs` (
    id VARBINARY(2048) NOT NULL PRIMARY KEY,
    snapshot LONGTEXT NOT NULL,
    updated_at BIGINT NOT NULL,
    workflow VARBINARY(2048),
    status VARBINARY(32) NOT NULL,
    wake_at BIGINT,
    awaits LONGTEXT,
    owner VARBINARY(2048),
    epoch BIGINT NOT NULL,
    takeovers BIGINT NOT NULL DEFAULT 0,
    created_epoch BIGINT NOT NULL,
    folded_epoch BIGINT NOT NULL,
    folded_n BIGINT NOT NULL DEFAULT -1,
    consumes LONGTEXT,
    deliveries BIGINT NOT NULL DEFAULT 0,
    creator VARBINARY(32),
    ticket VARBINARY(32),
    INDEX `workflow_runs_wake_idx` (wake_at, workflow(255)),
    INDEX `workflow_runs_list_idx` (updated_at, id),
    INDEX `workflow_runs_status_idx` (status, updated_at)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- consumes lists the messages that an entry consumes: ",12,15,". They count as consumed as soon as
-- the entry exists; they are marked later.
CREATE TABLE IF NOT EXISTS `workflow_runs_journal` (
    run VARBINARY(2048) NOT NULL,
    epoch BIGINT NOT NULL,
    n BIGINT NOT NULL,
    data LONGTEXT NOT NULL,
    consumes LONGTEXT,
    PRIMARY KEY (run, epoch, n)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- digest is that of the name, dedup that of the dedup_id.
CREATE TABLE IF NOT EXISTS `workflow_runs_inbox` (
    seq BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY,
    run VARBINARY(2048) NOT NULL,
    created_epoch BIGINT NOT NULL,
    name LONGTEXT NOT NULL,
    digest VARBINARY(32) NOT NULL,
    payload LONGTEXT NOT NULL,
    sent_at BIGINT NOT NULL,
    dedup VARBINARY(32),
    consumed BIGINT NOT NULL DEFAULT 0,
    UNIQUE INDEX `workflow_runs_dedup_idx` (run, created_epoch, dedup),
    INDEX `workflow_runs_inbox_idx` (run, consumed, seq)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- The highest epoch of any deleted run: a new run with the same id starts above it.
CREATE TABLE IF NOT EXISTS `workflow_runs_floor` (
    id BIGINT PRIMARY KEY,
    epoch BIGINT NOT NULL
) ENGINE = InnoDB;

INSERT IGNORE INTO `workflow_runs_floor` (id, epoch) VALUES (1, 0);

INSERT INTO `workflow_runs_migrations` (version) VALUES (1);
