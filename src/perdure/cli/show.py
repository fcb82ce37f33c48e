"""`perdure show`: a run, its steps on a timeline, and its error."""

import json
import shlex
import shutil
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import click

from perdure.cli.connections import insights
from perdure.cli.context import Settings, command, message, option
from perdure.cli.formatting import printable, shorten
from perdure.cli.output import Output, styled_status
from perdure.insights.model import (
    ErrorFacts,
    RunFacts,
    StepDetail,
    StepGroup,
    StepRow,
    StepsPage,
    WaitFacts,
)
from perdure.insights.terms import Term
from perdure.insights.timeline import Bar, Gap, draw
from perdure.insights.words import count_words, duration, tally_words
from perdure.snapshot.labels import label_of

MOST_STEPS = 200
NARROWEST_BAR = 12
_CHILDREN = 5
_STATUSES = {"ok": "completed", "failed": "failed", "wait": "suspended", "open": "running"}


@command
@click.argument("run_id", metavar="ID")
@option("--step", metavar="KEY", help="Show one step in full.")
@option("--reveal", is_flag=True, help="Show redacted values.")
async def show(settings: Settings, run_id: str, step: str | None, reveal: bool) -> None:
    """Show a run: its facts, its steps on a timeline, its error.

    With -v the traceback includes the frames inside perdure.
    """
    output = Output(settings)
    async with insights(settings, reveal=reveal) as ask:
        if step is not None:
            detail = await ask.step(run_id, step)
            output.answer(detail, lambda: _step_lines(settings, detail), [run_id])
            return
        facts = await ask.run(run_id)
        steps = await ask.steps(run_id, limit=MOST_STEPS)
    answer = {"facts": facts, "steps": steps.steps}
    output.answer(answer, lambda: _lines(settings, output, facts, steps), [run_id])
    if steps.total > len(steps.steps) and output.format == "json":
        message(settings, f"Only the first {MOST_STEPS} of {steps.total:,} steps were printed.")


def _lines(settings: Settings, output: Output, facts: RunFacts, steps: StepsPage) -> Iterator[str]:
    yield _heading(output, facts)
    yield printable(facts.why.sentence)
    if steps.total > len(steps.steps):
        yield from map(_group_line, facts.groups)
    else:
        yield from _timeline(output, facts, steps.steps)
    for wait in facts.waits:
        yield f"  {_wait(output, wait)}"
    if facts.error is not None:
        yield from _error_lines(facts.error, with_engine=settings.verbose > 0)
    width = _columns()
    for title, value in (("Input", facts.payload), ("Output", facts.output)):
        if value is not None:
            text = json.dumps(value, ensure_ascii=False)
            yield f"{title:<8}{shorten(printable(text), width - 8)}"
    yield from _family(facts)
    if facts.inbox:
        names = ", ".join(printable(each.event) for each in facts.inbox)
        yield f"Inbox   {count_words(len(facts.inbox), 'message')}: {names}"
    for act in facts.acts:
        why = f': "{act.why}"' if act.why else ""
        yield printable(f"{act.verb} by {act.by}, {output.time(act.at)}{why}")


def _family(facts: RunFacts) -> Iterator[str]:
    """Yield lines about the parent and the children of a run."""
    if facts.schedule:
        yield printable(f"Schedule  {facts.schedule}")
    if facts.parent is not None:
        status = facts.parent.status or "deleted"
        yield printable(f"Parent    {facts.parent.run_id} ({status}), step {facts.parent.call}")
    counts = facts.children.counts
    if counts:
        numbers = ", ".join(f"{tally_words(number)} {status}" for status, number in counts.items())
        yield f"Children  {numbers}"
    for child in facts.children.runs[:_CHILDREN]:
        yield printable(f"  {child.id}  {child.workflow}  {child.status}")
    if sum(number.count for number in counts.values()) > _CHILDREN:
        query = Term("parent", (facts.run.id,))
        yield printable(f"  All: perdure ls {shlex.quote(str(query))}")


def _columns() -> int:
    return shutil.get_terminal_size((100, 24)).columns


def _heading(output: Output, facts: RunFacts) -> str:
    run = facts.run
    parts = [click.style(printable(run.id), bold=True)]
    parts.append(printable(f"{run.workflow or 'unnamed'} v{run.version}"))
    status = f"{styled_status(output, run.status)} {output.time(run.ended_at or run.updated_at)}"
    if run.created_at and run.ended_at:
        status += f", took {duration(run.ended_at - run.created_at)}"
    parts.append(status)
    parts += [printable(f"{name}={value}") for name, value in run.tags.items()]
    if facts.progress is not None:
        parts.append(f"{facts.progress:.0%} {printable(facts.note)}".strip())
    if facts.forked_from is not None:
        parts.append(printable(f"forked from {facts.forked_from.run_id}"))
    return "   ".join(parts)


def _group_line(group: StepGroup) -> str:
    text = f"  {group.name} × {group.count:,}"
    if group.p50 is not None:
        text += f", p50 {duration(group.p50)}"
    return printable(text + (f", {group.failed:,} failed" if group.failed else ""))


def _wait(output: Output, wait: WaitFacts) -> str:
    at = wait.expires_at if wait.kind in ("approval", "callback") else wait.wake_at
    until = f", until {output.time(at)}" if at else ""
    match wait.kind:
        case "event":
            return printable(f'waits for event "{wait.event}"{until}')
        case "sleep":
            return printable(f'sleeps in "{wait.id}"{until}')
        case "run":
            return printable(f'waits for run "{wait.run_id}"{until}')
        case "runs":
            return printable(f'waits for the runs "{wait.run_id}/…"{until}')
        case "approval":
            of = f"{wait.to}'s approval" if wait.to else "approval"
            return printable(f'waits in "{wait.id}" for {of}: {wait.question}{until}')
        case "callback":
            return printable(f'waits for the callback "{wait.id}"{until}')
        case "retry":
            return printable(f'attempt {wait.attempt} of "{wait.id}"{until.replace("until", "at")}')


class Row(NamedTuple):
    """One line of the timeline."""

    mark: str
    name: str
    length: str
    detail: str
    bar: Bar


def _row(output: Output, bar: Bar) -> Row:
    name, step = label_of(bar.key), bar.step
    if step is None:
        detail, length = f"attempt {bar.attempts} on {bar.worker}", duration(output.now - bar.since)
        return Row(output.mark("running"), name, length, detail, bar)
    attempts = count_words(step.attempts, "attempt") if step.attempts > 1 else ""
    by = f"by {step.by}" if step.by else ""
    detail = "  ".join(filter(None, (attempts, by, step.error if not step.ok else step.value)))
    length = "" if step.duration is None else duration(step.duration)
    return Row(output.mark(_STATUSES[bar.look]), name, length, detail, bar)


def _timeline(output: Output, facts: RunFacts, steps: tuple[StepRow, ...]) -> Iterator[str]:
    """Yield a line for each record and each step in flight; waits are printed separately."""
    picture = draw(facts, steps, is_last=True, now=output.now)
    rows = [_row(output, bar) for bar in picture.bars if bar.step or bar.look == "open"]
    if not rows:
        return
    name = min(max(len(printable(row.name)) for row in rows), 32)
    length = max(len(row.length) for row in rows)
    detail = min(max(len(printable(row.detail)) for row in rows), 28)
    room = min(_columns() - name - length - detail - 10, 48)
    if room >= NARROWEST_BAR and (axis := _axis(picture.gaps, room)):
        # Above the bars: the mark, the cells and what separates them take eleven columns.
        yield " " * (name + length + detail + 11) + axis
    for row in rows:
        cells = (
            f"{shorten(printable(row.name), name):<{name}}",
            f"{row.length:>{length}}",
            f"{shorten(printable(row.detail), detail):<{detail}}",
        )
        bar = f"  |{_draw_bar(row.bar, room)}" if room >= NARROWEST_BAR else ""
        yield f"  {row.mark} {'  '.join(cells)}{bar}".rstrip()


def _axis(gaps: Sequence[Gap], width: int) -> str:
    """Return how long the periods were that are drawn short, each above its place."""
    text = ""
    for gap in gaps:
        label = duration(gap.length)
        centred = min(round(gap.x / 100 * width) - len(label) // 2, width - len(label))
        start = max(centred, len(text) + bool(text))
        if start + len(label) <= width:
            text = f"{text:<{start}}{label}"
    return text


def _draw_bar(bar: Bar, width: int) -> str:
    """Return a bar in characters: full for work, dashed for a wait."""
    first = min(round(bar.x / 100 * width), width - 1)
    last = round((bar.x + bar.width) / 100 * width)
    return " " * first + ("-" if bar.look == "wait" else "█") * max(last - first, 1)


def _error_lines(error: ErrorFacts, *, with_engine: bool) -> Iterator[str]:
    title, cause = "", error
    while True:
        text = f"{cause.type}: {cause.message}" if cause.message else cause.type
        yield f"      {title}{click.style(printable(text), fg='red')}"
        if cause.value is not None:
            yield f"        {printable(json.dumps(cause.value, ensure_ascii=False))}"
        for frame in cause.frames:
            if with_engine or not frame.is_engine:
                yield printable(f"        {frame.file}:{frame.line} in {frame.function}")
        yield from (f"        {printable(note)}" for note in cause.notes)
        if cause.cause is None:
            return
        title, cause = "caused by ", cause.cause


def _step_lines(settings: Settings, detail: StepDetail) -> Iterator[str]:
    step = detail.step
    length = "" if step.duration is None else f", {duration(step.duration)}"
    yield printable(f"{step.key}   {step.kind}, {count_words(step.attempts, 'attempt')}{length}")
    if detail.error is not None:
        yield from _error_lines(detail.error, with_engine=settings.verbose > 0)
    else:
        text: Any = json.dumps(detail.value, ensure_ascii=False, indent=2)
        yield from map(printable, text.split("\n"))
