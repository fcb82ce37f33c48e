"""Commands that show the whole store, or follow a run: overview, top and watch."""

import asyncio
import re
import sys
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, asynccontextmanager
from datetime import datetime

import click

from perdure.cli.connections import insights
from perdure.cli.context import Settings, command, option
from perdure.cli.failures import FAILED, USAGE, Failure
from perdure.cli.formatting import printable
from perdure.cli.output import Output, styled_status
from perdure.cli.terminal import keys, within
from perdure.clock import parse_duration
from perdure.engine.tasks import detached
from perdure.insights import Insights
from perdure.insights.model import Attention, Overview, RunFacts, StepRow, Tally, WorkerRow
from perdure.insights.words import count_words, duration, tally_words
from perdure.snapshot.labels import label_of

LIVE = ("running", "suspended", "waiting", "queued", "paused")
OVER = ("completed", "failed", "cancelled")
REFRESH = 2.0

_DURATION = re.compile(r"\b[\d,.]+ (?:ms|s|min|h|days?)\b")


@command
async def overview(settings: Settings) -> None:
    """Print an overview of the store."""
    async with insights(settings) as ask:
        answer, url = await ask.overview(), (await ask.store()).url
    ids = (run.id for run in answer.failures)
    Output(settings).answer(answer, lambda: overview_lines(answer, url), ids)


def overview_lines(answer: Overview, url: str) -> Iterator[str]:
    """Yield the lines of the overview."""
    live = sum(worker.state != "lost" for worker in answer.workers)
    yield f"Store       {printable(url)}, {count_words(live, 'worker')} live"
    now = _count_texts(answer.counts, LIVE)
    if answer.due:
        oldest = answer.oldest_due or answer.now
        now.insert(1, f"{answer.due:,} due (oldest {duration(answer.now - oldest)})")
    yield f"Now         {'   '.join(now) or 'nothing'}"
    yield f"Last 24 h   {'   '.join(_count_texts(answer.last_day, OVER)) or 'nothing ended'}"
    if answer.attention:
        yield "Needs attention"
        yield from map(_attention_line, answer.attention)


def _count_texts(counts: dict[str, Tally], statuses: tuple[str, ...]) -> list[str]:
    return [
        f"{tally_words(counts[status])} {status}"
        for status in statuses
        if status in counts and counts[status].count
    ]


def _attention_line(attention: Attention) -> str:
    hint = f"perdure ls {attention.query}" if attention.query else ""
    if attention.run_id:
        hint = f"perdure why {attention.run_id}"
    return f"  {printable(attention.text):<56} {printable(hint)}".rstrip()


@command
async def top(settings: Settings) -> None:
    """Show the overview continuously; press q to quit."""
    if not sys.stdout.isatty():
        raise Failure("top needs a terminal; `perdure` alone prints the overview", USAGE)
    from rich.live import Live
    from rich.text import Text

    keys_pressed: asyncio.Queue[str] = asyncio.Queue()
    async with insights(settings) as ask, _refreshing(ask, keys_pressed):
        with keys(keys_pressed), Live(screen=True, auto_refresh=False) as live:
            while True:
                lines = await _top_lines(settings, ask)
                live.update(Text("\n".join(lines), no_wrap=True, overflow="ellipsis"), refresh=True)
                try:
                    if await within(REFRESH, keys_pressed.get()) == "q":
                        return
                except TimeoutError:
                    continue


@asynccontextmanager
async def _refreshing(
    ask: Insights, keys_pressed: asyncio.Queue[str]
) -> AsyncGenerator[None, None]:
    """Put "" into the queue of keys whenever the overview has changed."""

    async def refresh() -> None:
        async for topics in ask.changes(lambda: ("counts", "fleet")):
            if topics:
                keys_pressed.put_nowait("")

    task = detached(refresh())
    try:
        yield
    finally:
        task.cancel()


async def _top_lines(settings: Settings, ask: Insights) -> list[str]:
    answer, url = await ask.overview(), (await ask.store()).url
    output = Output(settings)
    lines = [*overview_lines(answer, url), ""]
    for worker in answer.workers:
        lines.append(printable(f"{worker.id}   {_worker_text(output, worker)}"))
        for flight in worker.in_flight:
            since = duration(output.now - flight.since)
            lines.append(printable(f"  {flight.run_id}   {label_of(flight.key)}   {since}"))
    lines += ["", "Newest failures"] if answer.failures else []
    lines += [
        printable(f"  {run.id}   {output.time(run.ended_at or run.updated_at)}   {run.error}")
        for run in answer.failures
    ]
    return lines


def _worker_text(output: Output, worker: WorkerRow) -> str:
    if worker.state == "lost":
        return f"lost   last seen {output.time(worker.seen_at)}"
    return f"{worker.state}   {worker.running:,} of {worker.slots:,} slots"


@command
@click.argument("run_id", metavar="ID")
@option("--timeout", metavar="DURATION", help="How long to watch, such as 30s.")
async def watch(settings: Settings, run_id: str, timeout: str | None) -> None:
    """Print what a run does until it ends.

    The exit code is 0 if it completes, 1 if it fails or is cancelled, 124 after the timeout.
    """
    async with insights(settings) as ask:
        await follow_run(settings, ask, run_id, timeout)


async def follow_run(settings: Settings, ask: Insights, run_id: str, timeout: str | None) -> None:
    """Print the changes of a run until it ends; raise unless it completes in time."""
    follower = Follower(settings, ask, run_id)
    if timeout is None:
        status = await follower.run()
    else:
        seconds = parse_duration(timeout, "timeout").total_seconds()
        status = await within(seconds, follower.run())
    if status != "completed":
        raise click.exceptions.Exit(FAILED)


class Follower:
    """Prints each change of a run as lines: its new records, and its status when that changed."""

    def __init__(self, settings: Settings, ask: Insights, run_id: str) -> None:
        self._ask = ask
        self._run_id = run_id
        self._output = Output(settings)
        self._printed: set[tuple[str, datetime | None]] = set()
        self._last_news: tuple[str, str] | None = None

    async def run(self) -> str:
        """Print until the run ends; return its status."""
        status = ""
        async with aclosing(self._ask.watch(self._run_id)) as changes:
            async for facts in changes:
                status = facts.run.status
                if self._output.format == "table":
                    await self._print(facts)
                else:
                    self._output.json(facts, indent=None)
        return status

    async def _print(self, facts: RunFacts) -> None:
        # All of them: their order can change when the run is written as a whole, and an operator
        # can remove some, which are then recorded again.
        page = await self._ask.steps(self._run_id, limit=sys.maxsize)
        records = {(step.key, step.ended_at): step for step in page.steps}
        new_records = [record for record in records if record not in self._printed]
        for record in new_records:
            self._line(_step_text(self._output, records[record]), record[1])
        self._printed = set(records)
        news = _news_in(facts)
        # After a record, a run that waits may do so for the same reason as before.
        if news != self._last_news or (new_records and facts.why.situation != "running"):
            self._last_news = news
            status = styled_status(self._output, facts.run.status)
            self._line(f"{status}  {printable(facts.why.sentence)}", facts.run.ended_at)

    def _line(self, text: str, at: datetime | None = None) -> None:
        click.echo(f"{Output.clock(at)}  {text}")


def _news_in(facts: RunFacts) -> tuple[str, str]:
    """Return the status, and the sentence without what differs whenever it is formed."""
    if facts.why.situation == "running" and not facts.in_flight:
        # It is about the last record, which has a line of its own.
        return facts.run.status, facts.run.worker
    return facts.run.status, _DURATION.sub("", facts.why.sentence)


def _step_text(output: Output, step: StepRow) -> str:
    mark = output.mark("completed" if step.ok else "failed")
    length = f" ({duration(step.duration)})" if step.duration is not None else ""
    name, detail = label_of(step.key), step.error or step.value
    return f"{mark} {printable(name)}{length} {printable(detail)}".rstrip()
