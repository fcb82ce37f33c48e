"""Statements on SQLite use indexes, and examine no more runs than they need."""

import pkgutil
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from datetime import UTC, datetime, timedelta
from importlib import import_module
from typing import Any

import pytest

from perdure.store import (
    Entry,
    Lease,
    LeaseRequest,
    NewMessage,
    NewRun,
    Query,
    Rest,
    SupportedVersions,
)
from perdure.stores._backend import PruneRequest
from perdure.stores._handoff import Claimant
from perdure.stores._searching import MAX_EXAMINED
from perdure.stores.sqlite.handoff import HandoffVerbs
from perdure.stores.sqlite.inbox import InboxVerbs
from perdure.stores.sqlite.notify import NEWEST_DUE
from perdure.stores.sqlite.runs import RunVerbs, Verb
from perdure.stores.sqlite.search import SearchVerbs
from perdure.stores.sqlite.statements import Statement
from tests.stores.sqlite.recorder import NAMES, START, STATEMENTS, Call, Recorder, recorder

SMALL, FEW, MANY = 200, 5_000, 50_000
HOUR = timedelta(hours=1)
NOW = datetime.fromtimestamp(START, UTC)


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recorder]:
    """5,000 runs."""
    recorded = recorder(tmp_path_factory.mktemp("few") / "runs.db", FEW)
    with closing(recorded.connection):
        yield recorded


@pytest.fixture(scope="module", params=[0, MANY, SMALL], ids=["", "analyzed", "analyzed small"])
def many(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Recorder]:
    """50,000 runs, without statistics, with them, and with those of a small file."""
    recorded = recorder(tmp_path_factory.mktemp("many") / "runs.db", MANY, request.param)
    with closing(recorded.connection):
        yield recorded


def search(query: Query) -> Call:
    return lambda searches, _: searches.search(query, 20, None)


def claim(supports: Sequence[SupportedVersions] | None, *queues: str) -> Call:
    limits = dict.fromkeys(queues, 20)
    return lambda _, schedule: schedule.claim("ana", HOUR, 20, supports, limits)


def due(supports: Sequence[SupportedVersions] | None, *queues: str) -> Call:
    limits = dict.fromkeys(queues, 20)
    return lambda _, schedule: schedule.due(NOW, 20, supports, limits)


def hand_off(limit: int) -> Call:
    messages = [NewMessage(id, "paid", b"1") for id in ids(limit)]
    return lambda *_: HANDOFFS.send_and_claim(messages, Claimant("ana", HOUR, limit, TEN))


def ids(number: int) -> list[str]:
    return [f"run {n:08}" for n in range(number)]


def append(number: int, rest: Rest | None = None) -> Call:
    entries = [Entry(id, 1, 1, b"1", rest=rest, consumes=("1",)) for id in ids(number)]
    return lambda *_: RUNS.append(entries)


def send(number: int) -> Call:
    messages = [NewMessage(id, "paid", b"1", "second") for id in ids(number)]
    return lambda *_: HANDOFFS.send(messages)


def acquire(number: int) -> Call:
    requests = [LeaseRequest(id, "ana", HOUR, create=b"1") for id in ids(number)]
    return lambda _, schedule: schedule.acquire(requests)


def watch(*_: object) -> Verb[None]:
    values = {"now": START * 1_000_000, "prefix": ""}
    yield [Statement(STATEMENTS.sql(NEWEST_DUE), values)]


def prune(workflow: str | None, *tags: str, dry_run: bool = True) -> Call:
    request = PruneRequest(timedelta(0), ("completed", "failed"), workflow, tags, 20, dry_run)
    return lambda searches, _: searches.prune(request)


RUNS, HANDOFFS = RunVerbs(*NAMES), HandoffVerbs(*NAMES)
PREFIXED = SearchVerbs(STATEMENTS, "run 0", NAMES[2])
TEN = [SupportedVersions(f"workflow {number}", 1, 2) for number in range(10)]
ALL_QUEUES = ["", *(f"queue {number}" for number in range(10))]
ID, LIST, STATUS, DUE = "sqlite_autoindex_runs_1", "runs_list", "runs_status", "runs_due"

CALLS: dict[str, tuple[Call, str]] = {
    "nothing": (search(Query()), LIST),
    "status": (search(Query(statuses=("failed",))), STATUS),
    "statuses": (search(Query(statuses=("failed", "queued", "paused"))), STATUS),
    "workflow": (search(Query(workflows=("workflow 3",))), STATUS),
    "both": (search(Query(workflows=("workflow 3",), statuses=("failed",))), STATUS),
    "missing status": (search(Query(statuses=("cancelled",))), STATUS),
    "tag": (search(Query(tags=("kind=3",))), "PRIMARY KEY"),
    "tag, oldest first": (search(Query(tags=("kind=3",), oldest_first=True)), "PRIMARY KEY"),
    "rare prefix": (search(Query(prefix="run 0000001")), ID),
    "missing prefix": (search(Query(prefix="walk")), ID),
    "common prefix": (search(Query(prefix="run 0")), LIST),
    "time range": (
        search(Query(since=NOW - 0.9 * HOUR, until=NOW - 0.5 * HOUR, oldest_first=True)),
        LIST,
    ),
    "status in a time range": (
        search(Query(statuses=("failed",), since=NOW - 0.9 * HOUR, until=NOW - 0.5 * HOUR)),
        STATUS,
    ),
    "counts": (lambda searches, _: searches.counts(Query(), 20), STATUS),
    "counts of a status": (
        lambda searches, _: searches.counts(Query(statuses=("failed",)), 20),
        STATUS,
    ),
    "summaries": (
        lambda searches, _: searches.summaries([f"run {number:08}" for number in range(20)]),
        ID,
    ),
    "prune": (prune(None), STATUS),
    "prune a workflow": (prune("workflow 3"), STATUS),
    "prune a tag": (prune(None, "kind=3"), "PRIMARY KEY"),
    "claim": (claim(TEN, ""), DUE),
    "claim from queues": (claim(TEN, *ALL_QUEUES), DUE),
    "claim of any workflow": (claim(None, "", "queue 3"), DUE),
    "claim of nothing supported": (claim([SupportedVersions("other", 1, 9)], *ALL_QUEUES), DUE),
    "due": (due(TEN, ""), DUE),
    "due in queues": (due(TEN, *ALL_QUEUES), DUE),
    "due of any workflow": (due(None, ""), DUE),
    "handoff": (hand_off(20), ID),
    "queues": (lambda _, schedule: schedule.queues(NOW, 5, "\x01", None), DUE),
}

LEASES = [Lease(id, "ana", 1, NOW) for id in ids(500)]
NEW_RUNS = [NewRun(f"new {number}", "workflow", b"1") for number in range(500)]
# 129 and 200 rows use the statement for 256, and 500 rows use it twice.
SIZES = [1, 2, 4, 8, 16, 32, 64, 128, 129, 200, 256, 500]
BATCHES: dict[str, Callable[[int], Call]] = {
    "append": append,
    "rest": lambda number: append(number, Rest("suspended", awaits=("paid",))),
    "delete": lambda number: append(number, Rest("completed", delete=True)),
    "acquire": acquire,
    "renew": lambda number: lambda _, schedule: schedule.renew(LEASES[:number], HOUR),
    "release": lambda number: lambda _, schedule: schedule.release(LEASES[:number], None),
    "owners": lambda number: lambda _, schedule: schedule.owners(ids(number)),
    "enqueue": lambda number: lambda _, schedule: schedule.enqueue(NEW_RUNS[:number]),
    "send": send,
    "handoff": hand_off,
    "summaries": lambda number: lambda searches, _: searches.summaries(ids(number)),
}
STATS: Call = lambda searches, _: searches.stats()  # noqa: E731
FIRST = "run 00000000"
OTHERS: dict[str, Call] = {
    "watch": watch,
    "load": lambda *_: RUNS.load(FIRST),
    "save": lambda *_: RUNS.save(FIRST, b"1", "workflow", Rest("suspended", awaits=("paid",))),
    "delete": lambda *_: RUNS.delete(FIRST),
    "fence": lambda *_: RUNS.fence(FIRST, 1),
    "inbox": lambda *_: HANDOFFS.inbox(FIRST, None, None),
    "tag and prefix": search(Query(tags=("kind=3",), prefix="run 0000001")),
    "counts of a prefix": lambda *_: PREFIXED.counts(Query(), 20),
    "deleting prune": prune(None, dry_run=False),
    "deleting prune of a tag": prune(None, "kind=3", dry_run=False),
}


def templates() -> dict[str, str]:
    """Return the statements in the modules of the store, by name."""
    package = import_module("perdure.stores.sqlite")
    names = [one.name for one in pkgutil.iter_modules(package.__path__)]
    return {
        name: value
        for module in (import_module(f"{package.__name__}.{name}") for name in names)
        for name, value in vars(module).items()
        if name.isupper() and not name.startswith("_") and isinstance(value, str) and "$" in value
    }


@pytest.mark.parametrize("batch", BATCHES)
def test_a_batch_scans_no_table(many: Recorder, batch: str) -> None:
    """Whatever its size, each row is looked up in an index."""
    for size in SIZES:
        many.run(BATCHES[batch](size))
        assert many.scans() == [set()] * len(many.statements), size


@pytest.mark.parametrize("call", [*CALLS, *OTHERS])
def test_a_call_scans_no_table(many: Recorder, call: str) -> None:
    """Nor does one for a single run, a search, a claim or a prune."""
    many.run(OTHERS[call] if call in OTHERS else CALLS[call][0])
    assert many.scans() == [set()] * len(many.statements)


def test_statistics_scan_the_runs_twice(many: Recorder) -> None:
    """They count all runs by status and the due runs by queue, but only read the leased runs."""
    many.run(STATS)
    assert many.scans() == [{"runs"}, {"runs"}, set()]


def test_the_plans_of_all_statements_are_checked(few: Recorder) -> None:
    """A new statement has to be added to the calls above."""
    calls = [*OTHERS.values(), *(call for call, _ in CALLS.values())]
    batches = [batch(2) for batch in BATCHES.values()]
    for call in (*calls, *batches, STATS):
        few.run(call)
    unused = [name for name, one in templates().items() if one not in STATEMENTS.templates]
    assert unused == []


@pytest.mark.parametrize("call", CALLS)
def test_an_index_is_used(many: Recorder, call: str) -> None:
    """No statement scans the table of runs, or reads an index from end to end."""
    verb, index = CALLS[call]
    many.run(verb)
    plans = many.plans()
    assert any(re.search(rf"SEARCH .*USING .*{index}\b", line) for line in plans), plans
    assert not [line for line in plans if re.match(r"SCAN \w+ USING|SCAN runs", line)]


@pytest.mark.parametrize("call", CALLS)
def test_the_work_does_not_grow_with_the_number_of_runs(
    few: Recorder, many: Recorder, call: str
) -> None:
    """The same call takes as many instructions among ten times as many runs."""
    verb, _ = CALLS[call]
    few.run(verb)
    many.run(verb)
    assert many.steps <= few.steps * 1.3 + 1000


@pytest.mark.parametrize("batch", BATCHES)
def test_the_work_of_a_batch_does_not_grow_with_the_number_of_runs(
    few: Recorder, many: Recorder, batch: str
) -> None:
    """Nor does a batch of many runs take more instructions."""
    for size in (1, 200):
        few.run(BATCHES[batch](size))
        many.run(BATCHES[batch](size))
        assert many.steps <= few.steps * 1.3 + 1000


def test_versions_that_cannot_be_driven_are_skipped_inside_the_index(many: Recorder) -> None:
    """A due run costs a few instructions; its row, with the snapshot, is not read."""
    supports = [SupportedVersions("workflow 3", 9, 9)]
    unbound = many.run(claim(supports, ""))
    assert {leased.version for leased in unbound} == {0}
    runs = "SELECT count(*) FROM runs WHERE workflow = 'workflow 3' AND queue = ''"
    [(number,)] = many.connection.execute(runs).fetchall()
    many.connection.execute("UPDATE runs SET version = 3 WHERE workflow = 'workflow 3'")
    try:
        assert many.run(claim(supports, "")) == []
    finally:
        many.connection.execute("UPDATE runs SET version = id % 3 WHERE workflow = 'workflow 3'")
    assert many.steps < 30 * number


def test_a_search_examines_at_most_20000_runs(many: Recorder) -> None:
    """It stops there, and continues from there to the end."""
    query, position, pages = Query(queue="missing"), None, 0
    while True:
        page = many.run(lambda searches, _: searches.search(query, 20, position))
        pages += 1
        assert page.runs == []
        assert many.steps < 200 * MAX_EXAMINED
        if (position := page.stopped_at) is None:
            break
    assert pages == -(-MANY // MAX_EXAMINED)


def test_a_message_costs_the_same_however_many_wait(few: Recorder) -> None:
    """The log of a map receives a message from each of its children, and awaits none of them."""
    asleep = "SELECT id FROM runs WHERE wake_at > ?"
    [run_id] = few.connection.execute(asleep, [START * 1_000_000]).fetchone()
    inbox = InboxVerbs(*NAMES)
    messages = [NewMessage(run_id, f"ended {n}", b"1", f"{n}") for n in range(2000)]

    def send_all(_: object, __: object) -> Verb[Any]:
        yield from inbox.send(messages)
        yield from inbox.send([NewMessage(run_id, "last", b"1")])

    few.run(lambda *_: inbox.send([NewMessage(run_id, "only", b"1")]))
    only = few.steps
    few.run(lambda *_: inbox.send(messages))
    without_last = few.steps
    few.run(send_all)
    assert few.steps - without_last <= only * 1.3 + 500
