"""Print answers: tables on a terminal, tab-separated lines in a pipe, or JSON."""

import json
import sys
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from functools import partial
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

import click

from perdure.cli.context import Settings, message
from perdure.cli.formatting import printable, printable_json
from perdure.clock import SystemClock
from perdure.insights import to_json
from perdure.insights.model import Finding
from perdure.insights.words import duration_words, in_zone

T = TypeVar("T")

_MARKS = {
    "queued": ("◌", "bright_black"),
    "running": ("●", "blue"),
    "suspended": ("◷", "magenta"),
    "waiting": ("◇", "yellow"),
    "paused": ("‖", "yellow"),
    "completed": ("✓", "green"),
    "failed": ("✗", "red"),
    "cancelled": ("⊘", "bright_black"),
}

SHORT, GAP = 24, 2
"""Columns with cells up to this width are shortened last; the space between two columns."""


class Column(NamedTuple, Generic[T]):
    """A column of a table.

    A minor one is left out where there is no room for it; a whole one is never cut.
    """

    title: str
    cell: Callable[[T], str]
    is_status: bool = False
    is_minor: bool = False
    is_whole: bool = False


class Output:
    """Prints the answer of one command on stdout."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.format = settings.output
        self.now = SystemClock().now()
        self.is_terminal = sys.stdout.isatty() or settings.color == "always"
        self._can_draw = "utf" in (sys.stdout.encoding or "").lower()

    def time(self, at: datetime | None) -> str:
        """Format a time according to `--time`; the default is relative on a terminal."""
        if at is None:
            return ""
        style = self._settings.time or ("relative" if self.is_terminal else "iso")
        if style == "iso":
            return f"{at:%Y-%m-%dT%H:%M:%S}Z"
        if style == "local":
            return f"{in_zone(at, None):%Y-%m-%d %H:%M:%S}"
        distance = duration_words(timedelta(seconds=round(abs(at - self.now).total_seconds())))
        return f"in {distance}" if at > self.now else f"{distance} ago"

    @staticmethod
    def clock(at: datetime | None = None) -> str:
        """Return a time, by default now, on this machine; with the date unless it is today."""
        now = SystemClock().now().astimezone()
        local = now if at is None else in_zone(at, None)
        return f"{local:%H:%M:%S}" if local.date() == now.date() else f"{local:%Y-%m-%d %H:%M:%S}"

    def mark(self, status: str) -> str:
        """Return the mark of a status, or the status itself where the mark cannot be printed."""
        return _MARKS[status][0] if self._can_draw else status

    def status(self, status: str) -> str:
        """Return a status with its mark, or without it where it cannot be printed."""
        has_mark = status in _MARKS and self._can_draw and self.is_terminal
        return f"{self.mark(status)} {status}" if has_mark else status

    def answer(self, answer: Any, lines: Callable[[], Iterable[str]], ids: Iterable[str]) -> None:
        """Print one answer: as lines for people, as JSON, or only its ids."""
        if self.format == "table":
            for line in lines():
                click.echo(line)
        elif self.format == "ids":
            _print_ids(ids)
        else:
            self.json(answer, indent=2 if self.format == "json" else None)

    def rows(
        self,
        answer: Any,
        rows: Sequence[T],
        columns: Sequence[Column[T]],
        ids: Iterable[str] = (),
        if_empty: str = "There are none.",
    ) -> None:
        """Print a list: `-o json` prints `answer`, other formats print `rows`."""
        if self.format == "json":
            self.json(answer)
        elif self.format == "jsonl":
            for row in rows:
                self.json(row, indent=None)
        elif self.format == "ids":
            _print_ids(ids)
        elif self.is_terminal and rows:
            self._table(rows, columns)
        elif self.is_terminal and if_empty:
            message(self._settings, if_empty)
        else:
            for row in rows:
                click.echo("\t".join(printable(column.cell(row)) for column in columns))

    def json(self, value: Any, indent: int | None = 2) -> None:
        """Print a value as JSON."""
        text = json.dumps(to_json(value), ensure_ascii=False, indent=indent)
        click.echo(printable_json(text))

    def _table(self, rows: Sequence[T], columns: Sequence[Column[T]]) -> None:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        no_color = click.get_current_context().color is False
        console = Console(highlight=False, force_terminal=True, no_color=no_color)
        cells = [[printable(column.cell(row)) for row in rows] for column in columns]
        table = Table(box=None, pad_edge=False, header_style="dim")
        one_line = partial(Text, no_wrap=True, overflow="ellipsis")
        shown, needed = fitting(columns, cells, console.width)
        if any(column.is_whole for column in columns):
            console.width = max(console.width, needed)
        for number in shown:
            # The first column names the row, for other commands: long columns are cut before it.
            is_short = max(map(len, cells[number])) <= SHORT
            is_kept = number == 0 or is_short or columns[number].is_whole
            table.add_column(columns[number].title, no_wrap=is_kept, overflow="ellipsis")
        for row in range(len(rows)):
            texts = ((cells[number][row], columns[number]) for number in shown)
            table.add_row(*(one_line(text, style_of(text, column)) for text, column in texts))
        console.print(table)


def fitting(
    columns: Sequence[Column[T]], cells: Sequence[Sequence[str]], width: int
) -> tuple[list[int], int]:
    """Return the numbers of the columns to show, and how wide they are at least.

    Minor columns are left out, the last first.
    """
    lengths = [
        max(len(column.title), *map(len, texts))
        for column, texts in zip(columns, cells, strict=True)
    ]
    widths = [
        length if number == 0 or columns[number].is_whole else min(length, SHORT)
        for number, length in enumerate(lengths)
    ]
    shown, needed = list(range(len(columns))), sum(widths) + GAP * (len(columns) - 1)
    for number in reversed(range(len(columns))):
        if columns[number].is_minor and needed > width:
            shown.remove(number)
            needed -= widths[number] + GAP
    return shown, needed


def style_of(text: str, column: Column[Any]) -> str:
    """Return the colour of a cell."""
    word = text.rpartition(" ")[2]
    return _MARKS.get(word, ("", ""))[1] if column.is_status else ""


def styled_status(output: Output, status: str) -> str:
    """Return a status with its mark and colour, for a line of text."""
    return click.style(output.status(status), fg=_MARKS.get(status, ("", None))[1] or None)


def _print_ids(ids: Iterable[str]) -> None:
    for run_id in ids:
        click.echo(printable(run_id))


def print_findings(settings: Settings, findings: Sequence[Finding]) -> None:
    """Print findings on stderr, or as JSON; end with code 1 if there are any."""
    output = Output(settings)
    if output.format in ("json", "jsonl"):
        output.rows(findings, findings, ())
    else:
        for each in findings:
            click.echo(printable(f"{each.severity}: {each.text} {each.fix}"), err=True)
    if findings:
        raise click.exceptions.Exit(1)


Show: TypeAlias = Callable[[int, int | None], None]
"""Takes how much is done, and the total if it is known."""


@contextmanager
def progress(label: str) -> Generator[Show, None, None]:
    """Show a progress bar on a terminal while something takes long; call with done and total."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress

    columns = (*Progress.get_default_columns(), MofNCompleteColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
