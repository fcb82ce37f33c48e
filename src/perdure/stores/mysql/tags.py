"""Tags of runs: one row for each, by which searches find the run."""

from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b

from perdure.stores.mysql.literals import Rows, Statement
from perdure.stores.mysql.rows import chunks
from perdure.stores.mysql.statements import Statements

# A process of an older version may have deleted a run without its tags. Searches compare the times
# of creation, so such a row is not taken for a tag of a later run.
_INSERT = """
    INSERT INTO {tags} (run, tag, created_at)
    SELECT STRAIGHT_JOIN new.run, new.tag, run.created_at
    FROM (SELECT %s COLLATE {collation} AS run, %s AS tag %s) AS new
    JOIN {runs} AS run ON run.id = new.run
    ON DUPLICATE KEY UPDATE created_at = run.created_at
"""
_INSERT_ROW = b" UNION ALL SELECT %s, %s"
DELETE_TAGS = """
    DELETE tagged FROM {tags} AS tagged FORCE INDEX (PRIMARY) WHERE tagged.run IN (%s)
"""
# A run from before tags existed is found as if it was created when it got its first tag.
SET_CREATED = """
    UPDATE {runs} FORCE INDEX (PRIMARY) SET created_at = COALESCE(created_at, updated_at)
    WHERE id IN (%s)
"""


def tag_digest(tag: str) -> bytes:
    """Return the digest of a tag, which is what is stored."""
    return blake2b(tag.encode(), digest_size=16).digest()


def add_tags(statements: Statements, tags: Mapping[str, Sequence[str]]) -> Iterator[Statement]:
    """Yield the statements that add tags to runs without any, by their stored ids."""
    rows = [(key, tag_digest(tag)) for key in tags for tag in tags[key]]
    for first, *others in chunks(rows):
        yield statements.bind(_INSERT, *first, Rows(_INSERT_ROW, others, b""))


def replace_tags(statements: Statements, tags: Mapping[str, Sequence[str]]) -> Iterator[Statement]:
    """Yield the statements that replace the tags of locked runs, by their stored ids."""
    if tags:
        yield statements.bind(DELETE_TAGS, [*tags])
        yield statements.bind(SET_CREATED, [*tags])
        yield from add_tags(statements, tags)
