"""What PostgreSQL, MySQL and SQLite say differently, and the texts that come of it."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Literal, TypeAlias, assert_never, cast, get_args

from perdure.errors import InvalidArgument
from perdure.stores.sql.statements import FRAGMENTS

DialectName: TypeAlias = Literal["postgres", "mysql", "sqlite"]
ParamStyle: TypeAlias = Literal["dollar", "format", "qmark", "named"]

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,49}")
_PARTS = ("journal", "inbox", "floor", "migrations")
_INDEXES = ("wake", "list", "status", "inbox", "dedup")


@dataclass(frozen=True, slots=True)
class Dialect:
    """The words of one database. `paramstyle` is how its usual drivers mark values."""

    name: DialectName
    paramstyle: ParamStyle
    quote: str
    words: dict[str, str]


_POSTGRES = Dialect(
    "postgres",
    "dollar",
    '"',
    {
        "now": "CAST(extract(epoch FROM statement_timestamp()) * 1000000 AS bigint)",
        "greatest": "greatest",
        "find": "strpos",
        "number": "CAST(? AS bigint)",
        "text": "CAST(? AS text)",
        "key": "CAST(? AS text)",
        "insert": "INSERT INTO",
        "or_ignore": "ON CONFLICT DO NOTHING",
        "lock_run": "FOR UPDATE OF run",
        "mark": "',' || {0} || ','",
        "as_run": "AS run",
        "on_same_id": "ON CONFLICT (id) DO UPDATE SET",
        "given": "excluded.",
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
        "find": "instr",
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
        "find": "INSTR",
        "number": "CAST(? AS SIGNED)",
        "text": "CAST(? AS CHAR)",
        "key": "CAST(? AS BINARY)",
        "insert": "INSERT IGNORE INTO",
        "or_ignore": "",
        "lock_run": "FOR UPDATE",
        "mark": "CONCAT(',', {0}, ',')",
        "as_run": "",
        "on_same_id": "ON DUPLICATE KEY UPDATE",
        "given": "VALUES(",
        "end": ")",
        "old": "",
    },
)
_DIALECTS = {dialect.name: dialect for dialect in (_POSTGRES, _MYSQL, _SQLITE)}


def find_dialect(name: object) -> Dialect:
    """Give the dialect of this name, or raise."""
    for dialect in _DIALECTS.values():
        if dialect.name == name:
            return dialect
    raise InvalidArgument("dialect", name, '"postgres", "mysql" or "sqlite"')


def paramstyle_of(client: object, dialect: Dialect) -> ParamStyle:
    """Give how a client wants values marked: as it says, or as is usual for the database."""
    style = getattr(client, "paramstyle", dialect.paramstyle)
    if style not in get_args(ParamStyle):
        raise InvalidArgument("client.paramstyle", style, '"dollar", "format", "qmark" or "named"')
    return cast("ParamStyle", style)


class Statements:
    """The statements for one table in one dialect, with values marked as a client wants them."""

    def __init__(self, dialect: Dialect, table: object, paramstyle: ParamStyle) -> None:
        self.table = _checked(table)
        self._paramstyle: ParamStyle = paramstyle
        self._quote = dialect.quote
        self._words = {**dialect.words, **self._names()}
        self._add_fragments()
        self._filled: dict[tuple[str, tuple[tuple[str, str], ...]], str] = {}

    def fill(self, statement: str, **more: str) -> str:
        """Give a statement as the client wants it; `more` are words that this call brings."""
        place = (statement, tuple(more.items()))
        filled = self._filled.get(place)
        if filled is None:
            words = {**self._words, **{name: self._words_in(text) for name, text in more.items()}}
            filled = marked(statement.format(**words), self._paramstyle)
            self._filled[place] = filled
        return filled

    def migrations(self, folder: str) -> Sequence[tuple[int, Sequence[str]]]:
        """Give the numbered scripts of a folder as statements."""
        return [
            (number, [script.format(**self._words) for script in scripts])
            for number, scripts in read_scripts(folder)
        ]

    def _words_in(self, text: str) -> str:
        return text.format(**self._words) if "{" in text else text

    def _names(self) -> dict[str, str]:
        quote = self._quote
        dot = f"{quote}.{quote}"
        whole = self.table.replace(".", dot)
        name = self.table.rpartition(".")[2]
        names = {"runs": f"{quote}{whole}{quote}"}
        names |= {part: f"{quote}{whole}_{part}{quote}" for part in _PARTS}
        return names | {f"{index}_idx": f"{quote}{name}_{index}_idx{quote}" for index in _INDEXES}

    def _add_fragments(self) -> None:
        words = self._words
        words["mark_of_name"] = words["mark"].format("message.digest")
        words["mark_of_message"] = words["mark"].format("message.seq")
        for name in ("new_epoch", "after_fold", "leased"):
            words[name] = FRAGMENTS[name].format(**words)
        words["untaken"] = self._untaken("message", "run.takes")
        words["untaken_of_row"] = self._untaken("message", f"{words['runs']}.takes")
        words["named"] = self._named()

    def _untaken(self, message: str, consumes: str) -> str:
        words = self._words
        in_journal = FRAGMENTS["named_in_journal"].format(message=message, **words)
        in_rest = f"COALESCE({words['find']}({consumes}, {words['mark_of_message']}), 0) > 0"
        return f"{message}.taken = 0 AND NOT {in_journal} AND NOT {in_rest}"

    def _named(self) -> str:
        inbox = self._words["inbox"]
        words = {**self._words, "mark_of_message": self._words["mark"].format(f"{inbox}.seq")}
        in_journal = FRAGMENTS["named_in_journal"].format(message=inbox, **words)
        return f"({in_journal} OR {FRAGMENTS['named_in_rest'].format(message=inbox, **words)})"


def marked(statement: str, paramstyle: ParamStyle) -> str:
    """Give a statement whose `?` are written in another style."""
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


def _checked(table: object) -> str:
    expected = (
        "a name of ASCII letters, digits and _, no digit first, of at most 50 characters, "
        "or two with a dot between them"
    )
    parts = table.split(".") if isinstance(table, str) else []
    if not isinstance(table, str) or len(parts) > 2 or not all(map(_NAME.fullmatch, parts)):
        raise InvalidArgument("table", table, expected)
    return table


@cache
def read_scripts(folder: str) -> Sequence[tuple[int, Sequence[str]]]:
    """Give the numbered scripts of a folder beside the stores, split into statements."""
    scripts = files("perdure.stores.sql").joinpath("migrations", folder).iterdir()
    found = sorted((script.name, script) for script in scripts if script.name.endswith(".sql"))
    return [(int(name[:4]), _split(script.read_text())) for name, script in found]


def _split(script: str) -> Sequence[str]:
    return [statement for statement in map(str.strip, script.split(";\n")) if statement]
