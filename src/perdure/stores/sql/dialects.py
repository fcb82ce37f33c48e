"""How PostgreSQL, MySQL and SQLite differ, and the statements for each of them."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from string import Template
from typing import Any, Literal, NamedTuple, TypeAlias, assert_never, cast, get_args

from perdure.errors import InvalidArgument
from perdure.stores._migrations import Migration, check_table, read_migrations
from perdure.stores.sql.statements import FRAGMENTS

DialectName: TypeAlias = Literal["postgres", "mysql", "sqlite"]
ParamStyle: TypeAlias = Literal["dollar", "format", "qmark", "named"]

# PostgreSQL truncates names to 63 bytes, and this is the longest suffix that is added.
_MAX_TABLE_LENGTH = 63 - len("_documents_migrations")
_TABLES = ("journal", "inbox", "tags", "floor", "migrations")
_INDEXES = (
    *("wake", "due", "list", "status", "workflow"),
    *("inbox", "unconsumed", "dedup", "tags", "expiry"),
)
_REPEATED_PART = re.compile(r"\[(.*?)\](.*?)\.\.\.", re.DOTALL)
_UNLESS = re.compile("^-- unless: (.*)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Dialect:
    """The SQL of one database; `paramstyle` is the style that its drivers usually have.

    With `hashes_workflows`, indexes contain MD5 digests of workflows. With `walks_recursively`, a
    recursive query can look up each next value in an index; otherwise each lookup is a separate
    statement.
    """

    name: DialectName
    paramstyle: ParamStyle
    quote: str
    terms: Mapping[str, str]
    hashes_workflows: bool = True
    walks_recursively: bool = True


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
        "key": 'CAST(? AS text) COLLATE "C"',
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
        "lane": "run.queue",
        "kind": "md5(run.workflow)",
        "use_list": "",
        "use_workflow": "",
        "queue_name": "split_part(run.queue, '/', 1)",
        "place": "{time} {side}= $number AND ({time}, {id}) {side} ($number, $key)",
    },
)
_SQLITE = Dialect(
    "sqlite",
    "qmark",
    '"',
    {
        **_POSTGRES.terms,
        "now": "(CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER) * 1000)",
        "greatest": "max",
        "position": "instr",
        "number": "CAST(? AS INTEGER)",
        "text": "CAST(? AS TEXT)",
        "key": "CAST(? AS TEXT)",
        "lock_run": "",
        "kind": "run.workflow",
        "queue_name": "substr(run.queue, 1, instr(run.queue || '/', '/') - 1)",
        "has_column": "SELECT 1 FROM pragma_table_info('$name') WHERE name =",
        "inbox_has_column": "SELECT 1 FROM pragma_table_info('${name}_inbox') WHERE name =",
    },
    hashes_workflows=False,
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
        "lane": "run.lane",
        "kind": "run.kind",
        # The optimizer would otherwise prefer a full scan and a sort to reading many rows by index.
        "use_list": "FORCE INDEX ($list_idx)",
        "use_workflow": "FORCE INDEX ($workflow_idx)",
        "queue_name": "SUBSTRING_INDEX(run.queue, '/', 1)",
        # MySQL does not use an index to compare rows.
        "place": "({time} {side} $number OR {time} = $number AND {id} {side} $key)",
        "has_column": """
            SELECT 1 FROM information_schema.columns
            WHERE table_schema = $schema_name AND table_name = '$name' AND column_name =
        """,
        "inbox_has_column": """
            SELECT 1 FROM information_schema.columns
            WHERE table_schema = $schema_name AND table_name = '${name}_inbox' AND column_name =
        """,
        "has_index": """
            SELECT 1 FROM information_schema.statistics
            WHERE table_schema = $schema_name AND index_name =
        """,
    },
    walks_recursively=False,
)
# Conditions for the places before or after a given one, in the order of a search. Each takes the
# time twice, and the id.
_PLACES = {
    f"{name}_{word}": (f"{time}", f"{id}", side)
    for name, time, id in (
        ("updated", "run.updated_at", "run.id"),
        ("tagged", "tag.created_at", "tag.run"),
    )
    for word, side in (("above", ">"), ("below", "<"))
}


def find_dialect(name: object) -> Dialect:
    """Return the dialect with this name, or raise `InvalidArgument`."""
    for dialect in (_POSTGRES, _MYSQL, _SQLITE):
        if dialect.name == name:
            return dialect
    raise InvalidArgument("dialect", name, '"postgres", "mysql" or "sqlite"')


def paramstyle_of(client: object, dialect: Dialect) -> ParamStyle:
    """Return the parameter style that a client declares, or the database's usual one."""
    style = getattr(client, "paramstyle", dialect.paramstyle)
    if style not in get_args(ParamStyle):
        raise InvalidArgument("client.paramstyle", style, '"dollar", "format", "qmark" or "named"')
    return cast("ParamStyle", style)


class ScriptStatement(NamedTuple):
    """A statement of a migration, and a query that returns rows if it was already executed."""

    sql: str
    unless: str | None


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
        self.dialect = dialect
        self._folder = folder
        self._paramstyle: ParamStyle = paramstyle
        self._terms = _table_names(self.table, dialect.quote)
        for name, word in (*dialect.terms.items(), *_places(dialect), *FRAGMENTS.items()):
            self._terms[name] = Template(word).substitute(self._terms)
        self._cache: dict[tuple[str, int], str] = {}

    def sql(self, template: str) -> str:
        """Return a statement as the client needs it."""
        return self.many(template, 1)

    def many(self, template: str, count: int) -> str:
        """Return a statement with its `[item] separator ...` repeated `count` times."""
        statement = self._cache.get((template, count))
        if statement is None:
            text = Template(template).substitute(self._terms)
            text = _REPEATED_PART.sub(lambda part: part[2].join([part[1]] * count), text)
            statement = self._cache[template, count] = number_parameters(text, self._paramstyle)
        return statement

    @property
    def migrations(self) -> Sequence[Migration]:
        """The migrations of the dialect, in order."""
        return read_migrations("perdure.stores.sql", f"{self._folder}/{self.dialect.name}")

    def split_script(self, script: str) -> Sequence[ScriptStatement]:
        """Return the statements of a migration script.

        A line `-- unless: query` before a statement gives its condition, if it cannot be repeated.
        """
        statements = [statement for statement in map(str.strip, script.split(";\n")) if statement]
        return [ScriptStatement(*map(self._fill, _with_condition(each))) for each in statements]

    def _fill(self, template: str | None) -> Any:
        return None if template is None else Template(template).substitute(self._terms)


def _with_condition(statement: str) -> tuple[str, str | None]:
    condition = _UNLESS.search(statement)
    return _UNLESS.sub("", statement), condition and condition[1]


def _places(dialect: Dialect) -> Iterator[tuple[str, str]]:
    for name, (time, id, side) in _PLACES.items():
        yield name, dialect.terms["place"].format(time=time, id=id, side=side)


def _table_names(table: str, quote: str) -> dict[str, str]:
    qualified_name, (schema, _, name) = (
        table.replace(".", f"{quote}.{quote}"),
        table.rpartition("."),
    )
    names = dict.fromkeys(("table", "runs"), f"{quote}{qualified_name}{quote}")
    names |= {
        "name": name,
        "schema": f"{quote}{schema}{quote}." if schema else "",
        "schema_name": f"'{schema}'" if schema else "DATABASE()",
    }
    names |= {part: f"{quote}{qualified_name}_{part}{quote}" for part in _TABLES}
    return names | {f"{index}_idx": f"{quote}{name}_{index}_idx{quote}" for index in _INDEXES}


def number_parameters(statement: str, paramstyle: ParamStyle) -> str:
    """Return a statement with each `?` rewritten in another parameter style."""
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
