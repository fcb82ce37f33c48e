"""What needs an operator's attention, each as a sentence with the query that shows it.

Numbers come from bounded reads; where there may be more, the sentence says "200+ runs".
"""

from collections import Counter
from collections.abc import Iterable, Sequence

from perdure.insights.model import Attention, RunRow, Tally, WorkerRow
from perdure.insights.state import knows
from perdure.insights.terms import Term
from perdure.insights.words import count_words
from perdure.presence import Switches, WorkerPresence
from perdure.store import RunSummary

_MOST_EVENTS = 5
_MOST_WORKERS = 3


def without_worker(
    due: Sequence[RunRow],
    has_more: bool,
    workers: Sequence[WorkerPresence],
    paused: frozenset[str],
) -> Iterable[Attention]:
    """Yield due runs that no live worker can take."""
    if due and not workers:
        text = f"{_runs(len(due), has_more)} due; no worker is running"
        yield Attention(text, "", due[0].id)
        return
    groups: dict[tuple[str, int], list[RunRow]] = {}
    for row in due:
        name = row.workflow or ""
        if name not in paused and not any(knows(each, name, row.version) for each in workers):
            groups.setdefault((name, row.version), []).append(row)
    for (workflow, version), members in groups.items():
        what = _runs(len(members), has_more, f" of {workflow} v{version}")
        query = _query(Term("workflow", (workflow,)), Term("version", (str(version),)))
        yield Attention(f"{what} due; no live worker knows it", query, members[0].id)


def long_waits(runs: Iterable[RunSummary], has_more: bool) -> Iterable[Attention]:
    """Yield the events that runs have waited for too long."""
    awaited_events = (event for run in runs for event in run.awaits)
    events = Counter(event for event in awaited_events if not event.startswith("~"))
    for event, count in events.most_common(_MOST_EVENTS):
        what = _runs(count, has_more, verbs=("has", "have"))
        terms = Term("status", ("waiting",)), Term("waiting", (event,)), Term("older", ("1d",))
        yield Attention(f'{what} waited for "{event}" for over a day', _query(*terms))


def paused(runs: Tally | None, switches: Switches) -> Iterable[Attention]:
    """Yield paused runs and workflows."""
    if runs is not None:
        yield Attention(f"{_runs(runs.count, runs.capped)} paused", "status:paused")
    for name in sorted(switches.paused):
        yield Attention(f'Workflow "{name}" is paused', _query(Term("workflow", (name,))))


def lost_workers(workers: Iterable[WorkerRow]) -> Iterable[Attention]:
    """Yield the workers that disappeared."""
    ids = [worker.id for worker in workers if worker.state == "lost"]
    if len(ids) > _MOST_WORKERS:
        yield Attention(f"{len(ids):,} workers disappeared without stopping", "")
        return
    for id in ids:
        yield Attention(f"Worker {id} disappeared without stopping", _query(Term("owner", (id,))))


def _runs(
    count: int, has_more: bool, which: str = "", verbs: tuple[str, str] = ("is", "are")
) -> str:
    one, many = verbs
    if has_more:
        return f"{count:,}+ runs{which} {many}"
    return f"{count_words(count, 'run')}{which} {one if count == 1 else many}"


def _query(*terms: Term) -> str:
    return " ".join(map(str, terms))
