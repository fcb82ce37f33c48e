"""How PostgreSQL, MySQL and SQLite differ, and the statements for each of them."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from string import Template
from typing import Literal, TypeAlias, assert_never, cast, get_args

from perdure.errors import InvalidArgument
from perdure.stores._migrations import Migration, check_table, read_migrations
from perdure.stores.sql.statements import FRAGMENTS

DialectName: TypeAlias = Literal["postgres", "mysql", "sqlite"]
ParamStyle: TypeAlias = Literal["dollar", "format", "qmark", "named"]

# PostgreSQL truncates names to 63 bytes, and this is the longest suffix that is added.
_MAX_TABLE_LENGTH = 63 - len("_documents_migrations")
_TABLES = ("journal", "inbox", "floor", "migrations")
_INDEXES = ("wake", "list", "status", "inbox", "dedup", "expiry")
_REPEATED = re.compile(r"\[(.*?)\](.*?)\.\.\.", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Dialect:
    """The words of one database; `paramstyle` is that of its usual drivers."""

    name: DialectName
    paramstyle: ParamStyle
    quote: str
    words: Mapping[str, str]


_POSTGRES = Dialect(
    "postgres",
    "dollar",
    '"',
    {
        "now": "CAST(extract(epoch FROM statement_timestamp()) * 1000000 AS bigint)",
        "greatest": "greatest",
        "position": "strpos",
        "number": "CAST(? AS bigint)",
        "text": "CAST(? AS text)",
        "key": "CAST(? AS text)",
        "insert": "INSERT INTO",
        "or_ignore": "ON CONFLICT DO NOTHING",
        "lock_run": "FOR UPDATE OF run",
        "comma": "',' ||",
        "end_comma": "|| ','",
        "as_run": "AS run",
        "on_same_id": "ON CONFLICT (id) DO UPDATE SET",
        "new": "excluded.",
        "end": "",
        "old": "run.",
    },
)
_SQLITE = Dialect(
    "sqlite",
    "qmark",
    '"',
    {
        **_POSTGRES.words,
        "now": "(CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER) * 1000)",
        "greatest": "max",
        "position": "instr",
        "number": "CAST(? AS INTEGER)",
        "text": "CAST(? AS TEXT)",
        "key": "CAST(? AS TEXT)",
        "lock_run": "",
    },
)
_MYSQL = Dialect(
    "mysql",
    "format",
    "`",
    {
        "now": "CAST(UNIX_TIMESTAMP(NOW(6)) * 1000000 AS SIGNED)",
        "greatest": "GREATEST",
        "position": "INSTR",
        "number": "CAST(? AS SIGNED)",
        "text": "CAST(? AS CHAR)",
        "key": "CAST(? AS BINARY)",
        "insert": "INSERT IGNORE INTO",
        "or_ignore": "",
        "lock_run": "FOR UPDATE",
        "comma": "CONCAT(',',",
        "end_comma": ", ',')",
        "as_run": "",
        "on_same_id": "ON DUPLICATE KEY UPDATE",
        "new": "VALUES(",
        "end": ")",
        "old": "",
    },
)


def find_dialect(name: object) -> Dialect:
    """Return the dialect of this name, or raise."""
    for dialect in (_POSTGRES, _MYSQL, _SQLITE):
        if dialect.name == name:
            return dialect
    raise InvalidArgument("dialect", name, '"postgres", "mysql" or "sqlite"')


def paramstyle_of(client: object, dialect: Dialect) -> ParamStyle:
    """Return the parameter style that a client declares, or the usual one of the database."""
    style = getattr(client, "paramstyle", dialect.paramstyle)
    if style not in get_args(ParamStyle):
        raise InvalidArgument("client.paramstyle", style, '"dollar", "format", "qmark" or "named"')
    return cast("ParamStyle", style)


class Statements:
    """The statements for one table in one dialect and parameter style.

    `suffix` is added to the table's name; `folder` has its migrations.
    """

    def __init__(
        self,
        dialect: Dialect,
        table: object,
        paramstyle: ParamStyle,
        *,
        suffix: str = "",
        folder: str = "migrations",
    ) -> None:
        self.table = check_table(table, _MAX_TABLE_LENGTH) + suffix
        self._folder = folder
        self._dialect = dialect
        self._paramstyle: ParamStyle = paramstyle
        self._words = {**dialect.words, **_table_names(self.table, dialect.quote)}
        for name, fragment in FRAGMENTS.items():
            self._words[name] = Template(fragment).substitute(self._words)
        self._filled: dict[tuple[str, int], str] = {}

    def sql(self, template: str) -> str:
        """Return a statement as the client needs it."""
        return self.many(template, 1)

    def many(self, template: str, count: int) -> str:
        """Return a statement that repeats its `[item] separator ...` that often."""
        filled = self._filled.get((template, count))
        if filled is None:
            text = Template(template).substitute(self._words)
            text = _REPEATED.sub(lambda part: part[2].join([part[1]] * count), text)
            filled = self._filled[template, count] = number_parameters(text, self._paramstyle)
        return filled

    @property
    def migrations(self) -> Sequence[Migration]:
        """The migrations of the dialect, in order."""
        return read_migrations("perdure.stores.sql", f"{self._folder}/{self._dialect.name}")

    def split_script(self, script: str) -> Sequence[str]:
        """Return the statements of a migration script."""
        filled = Template(script).substitute(self._words)
        return [statement for statement in map(str.strip, filled.split(";\n")) if statement]


def _table_names(table: str, quote: str) -> dict[str, str]:
    qualified, name = table.replace(".", f"{quote}.{quote}"), table.rpartition(".")[2]
    names = dict.fromkeys(("table", "runs"), f"{quote}{qualified}{quote}")
    names |= {part: f"{quote}{qualified}_{part}{quote}" for part in _TABLES}
    return names | {f"{index}_idx": f"{quote}{name}_{index}_idx{quote}" for index in _INDEXES}


def number_parameters(statement: str, paramstyle: ParamStyle) -> str:
    """Return a statement whose `?` are written in another parameter style."""
    first, *pieces = statement.split("?")
    match paramstyle:
        case "qmark":
            return statement
        case "format":
            return "%s".join(piece.replace("%", "%%") for piece in (first, *pieces))
        case "dollar":
            sign = "$"
        case "named":
            sign = ":p"
        case _:
            assert_never(paramstyle)
    return first + "".join(f"{sign}{number}{piece}" for number, piece in enumerate(pieces, 1))
