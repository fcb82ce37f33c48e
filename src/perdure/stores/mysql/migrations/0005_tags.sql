-- Only the digest of a tag is stored: a tag and an id together are too long for an index.
CREATE TABLE IF NOT EXISTS {tags} (
    run VARCHAR(760) NOT NULL,
    tag BINARY(16) NOT NULL,
    created_at DATETIME(6) NOT NULL,
    PRIMARY KEY (run, tag),
    KEY by_tag (tag, created_at, run)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC CHARACTER SET utf8mb4 COLLATE {collation};
