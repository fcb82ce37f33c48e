CREATE TABLE IF NOT EXISTS {journal} (
    run text COLLATE "C" NOT NULL,
    epoch bigint NOT NULL,
    n bigint NOT NULL,
    data bytea NOT NULL,
    PRIMARY KEY (run, epoch, n)
);
