-- Moments are microseconds since 1970. While a run has an owner, wake_at is the end of its lease.
-- maker and ticket are drawn by lot when a run is made and leased: who finds his own there did it.
-- What is compared is binary: text would be equal with a space after it, or in another case.
CREATE TABLE IF NOT EXISTS {runs} (
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
    born BIGINT NOT NULL,
    folded_epoch BIGINT NOT NULL,
    folded_n BIGINT NOT NULL DEFAULT -1,
    takes LONGTEXT,
    mail BIGINT NOT NULL DEFAULT 0,
    maker VARBINARY(32),
    ticket VARBINARY(32),
    INDEX {wake_idx} (wake_at, workflow(255)),
    INDEX {list_idx} (updated_at, id),
    INDEX {status_idx} (status, updated_at)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- takes are the messages that an entry consumes: ",12,15,". They count as taken from the moment
-- the entry is there; marking them comes later.
CREATE TABLE IF NOT EXISTS {journal} (
    run VARBINARY(2048) NOT NULL,
    epoch BIGINT NOT NULL,
    n BIGINT NOT NULL,
    data LONGTEXT NOT NULL,
    takes LONGTEXT,
    PRIMARY KEY (run, epoch, n)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- digest is that of the name; dedup that of the dedup_id.
CREATE TABLE IF NOT EXISTS {inbox} (
    seq BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY,
    run VARBINARY(2048) NOT NULL,
    born BIGINT NOT NULL,
    name LONGTEXT NOT NULL,
    digest VARBINARY(32) NOT NULL,
    payload LONGTEXT NOT NULL,
    sent_at BIGINT NOT NULL,
    dedup VARBINARY(32),
    taken BIGINT NOT NULL DEFAULT 0,
    UNIQUE INDEX {dedup_idx} (run, born, dedup),
    INDEX {inbox_idx} (run, taken, seq)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- The highest epoch of any deleted run: a new run of the same id begins above it.
CREATE TABLE IF NOT EXISTS {floor} (
    id BIGINT PRIMARY KEY,
    epoch BIGINT NOT NULL
) ENGINE = InnoDB;
INSERT IGNORE INTO {floor} (id, epoch) VALUES (1, 0);
