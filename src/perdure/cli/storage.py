"""Commands about the store itself: info, check, migrate, sql and prune."""

import logging
from collections.abc import Generator, Sequence
from contextlib import contextmanager

import click

from perdure.cli.changes import WHY, WHY_UNLESS_DRY_RUN, check_why
from perdure.cli.connections import insights, operations
from perdure.cli.context import Settings, command, group, message, option
from perdure.cli.discovery import opened_store, url_in
from perdure.cli.failures import REFUSED, USAGE, Failure
from perdure.cli.formatting import printable
from perdure.cli.output import Column, Output, Show, print_findings, progress
from perdure.insights.model import RetentionRow
from perdure.insights.words import count_words, duration_words
from perdure.operations import CopyProgress, Operations
from perdure.snapshot import RunStatus
from perdure.store import can_search
from perdure.stores import open_store
from perdure.stores.mysql import schema as mysql
from perdure.stores.postgres import schema as postgres
from perdure.stores.sqlite import schema as sqlite

OVER: tuple[RunStatus, ...] = ("completed", "failed", "cancelled")
OF_STORE = {"store", "durability", "lease", "clock_drift"}
_NEW_ENOUGH = {"mysql": "8.0.19", "mariadb": "10.6-mariadb"}


@command
async def info(settings: Settings) -> None:
    """Print what the store is and what it can do."""
    async with insights(settings) as ask:
        answer = await ask.store()
    lines = (f"{answer.url} ({answer.kind})", *answer.sentences)
    Output(settings).answer(answer, lambda: map(printable, lines), ())


@command
async def check(settings: Settings) -> None:
    """Check the store; print nothing and exit with 0 if there are no problems."""
    async with insights(settings) as ask:
        findings = await ask.check()
    print_findings(settings, [each for each in findings if each.code in OF_STORE])


@command
async def migrate(settings: Settings) -> None:
    """Create or update the tables of the store, as its first use would."""
    async with opened_store(settings) as (store, _):
        with progress("Migrating") as show, _migrations_shown(show):
            await store.list(limit=1)
            if can_search(store):
                await store.documents.get("~migrated")
    message(settings, "The schema is up to date.")


@contextmanager
def _migrations_shown(show: Show) -> Generator[None, None, None]:
    """Show the progress that stores log while they migrate."""
    handler, logger = _MigrationProgress(show), logging.getLogger("perdure.stores")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
        show(handler.total, handler.total)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


class _MigrationProgress(logging.Handler):
    """Adds up the migrations of all tables of a store."""

    def __init__(self, show: Show) -> None:
        super().__init__()
        self.total = 0
        self._show = show
        self._other_tables = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Show how many migrations are done, if the record says so."""
        done, total = (getattr(record, name, None) for name in ("done", "total"))
        if done is None or total is None:
            return
        if done == 0:
            self._other_tables, self.total = self.total, self.total + total
        self._show(self._other_tables + done, self.total)


@command
@click.argument("database", type=click.Choice(["sqlite", "postgres", "mysql", "mariadb"]))
@option("--table", default="perdure_runs", show_default=True)
async def sql(settings: Settings, database: str, table: str) -> None:
    """Print the statements that create the tables, for those who run migrations themselves."""
    click.echo("\n\n".join(schema.script() for schema in _schemas(database, table)))


def _schemas(database: str, table: str) -> Sequence[sqlite.Schema | postgres.Schema | mysql.Schema]:
    documents = "migrations_keyvalue"
    if database == "sqlite":
        names = {"migrations": table, documents: f"{table}_documents"}
        return [sqlite.Schema(folder, name) for folder, name in names.items()]
    if database == "postgres":
        tables = postgres.Tables(table), postgres.Tables(table, "_documents")
        return postgres.Schema(tables[0]), postgres.Schema(tables[1], documents)
    dialect = mysql.dialect_of(_NEW_ENOUGH[database])
    own, other = mysql.Tables(table), mysql.Tables(table, "_documents")
    return mysql.Schema(own, dialect), mysql.Schema(other, dialect, documents)


@command
@option("--older-than", metavar="DURATION", help="How long ago runs must have ended, such as 30d.")
@option("--policy", is_flag=True, help="Delete what the keep= of each workflow no longer keeps.")
@option("--status", "statuses", multiple=True, type=click.Choice(OVER), help="Only these runs.")
@option("--workflow", metavar="NAME", help="Only runs of this workflow.")
@option("--dry-run", is_flag=True, help="Only count them.")
@WHY_UNLESS_DRY_RUN
async def prune(
    settings: Settings,
    older_than: str | None,
    policy: bool,
    statuses: tuple[RunStatus, ...],
    workflow: str | None,
    dry_run: bool,
    why: str,
) -> None:
    """Delete runs that ended long ago.

    With --policy and --dry-run, print what would be deleted of each workflow and status.
    """
    if policy == (older_than is not None):
        raise Failure("pass either --older-than or --policy", USAGE)
    check_why(why, dry_run=dry_run)
    if policy and dry_run:
        await _print_retention(settings, statuses, workflow)
        return
    async with operations(settings) as act:
        with progress("Pruning") as show:
            count = await act.prune(
                older_than,
                statuses=statuses,
                workflow=workflow,
                dry_run=dry_run,
                by=settings.by,
                why=why,
                on_progress=show,
            )
    done = "would be deleted" if dry_run else "deleted"
    sentence = f"{count_words(count, 'run')} {done}."
    Output(settings).answer({"count": count, "dry_run": dry_run}, lambda: [sentence], ())


async def _print_retention(
    settings: Settings, statuses: tuple[RunStatus, ...], workflow: str | None
) -> None:
    async with insights(settings) as ask:
        rows = (await ask.retention(workflow)).rows
    rows = tuple(row for row in rows if row.status in (statuses or OVER))
    columns = [
        Column[RetentionRow]("WORKFLOW", lambda row: row.workflow),
        Column[RetentionRow]("STATUS", lambda row: row.status),
        Column[RetentionRow]("KEPT FOR", lambda row: duration_words(row.kept_for)),
        Column[RetentionRow]("WOULD BE DELETED", _removable),
    ]
    Output(settings).rows(rows, rows, columns)


def _removable(row: RetentionRow) -> str:
    if row.removable is None:
        return "unknown"
    return f"{row.removable.count:,}{' or more' if row.removable.capped else ''}"


@command
@option("--to", "target", required=True, metavar="URL", help="The other store, or @FILE with it.")
@option("--where", "query", default="", metavar="QUERY", help="Only runs that match.")
@WHY
async def copy(settings: Settings, target: str, query: str, why: str) -> None:
    """Copy runs to another store; run it again to continue.

    Runs that a process works on are skipped. Copies of runs that are not over are paused: stop the
    workers of this store, or cancel the originals, before you resume them.
    """
    url = url_in(target, "--to")
    last = CopyProgress()
    async with opened_store(settings) as (source, source_url), open_store(url) as other:
        if url == source_url:
            raise Failure("--to is the store itself: pass another one", USAGE)
        with progress("Copying") as show:
            steps = Operations(other, via="cli").copy_from(source, query, by=settings.by, why=why)
            async for last in steps:
                show(last.done, last.total)
    counts = f"{last.existing:,} already existed, {last.skipped:,} skipped."
    Output(settings).answer(last, lambda: [f"{last.copied:,} copied, {counts}"], ())
    for reason in last.reasons:
        message(settings, printable(reason))
    if last.skipped:
        raise click.exceptions.Exit(REFUSED)


store = group(
    "Look at the store, migrate it, copy or delete runs.",
    info=info,
    check=check,
    migrate=migrate,
    sql=sql,
    copy=copy,
    prune=prune,
)
