"""Searches and claims on SQLite use indexes, and examine no more runs than they need."""

import re
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from datetime import UTC, datetime, timedelta
from itertools import count
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from perdure.store import NewMessage, Query, SupportedVersions
from perdure.stores._backend import PruneRequest
from perdure.stores._handoff import Claimant
from perdure.stores._searching import MAX_EXAMINED
from perdure.stores.sqlite.connection import drive, execute
from perdure.stores.sqlite.handoff import HandoffVerbs
from perdure.stores.sqlite.inbox import InboxVerbs
from perdure.stores.sqlite.runs import Verb
from perdure.stores.sqlite.schedule import ScheduleVerbs
from perdure.stores.sqlite.schema import Schema
from perdure.stores.sqlite.search import SearchVerbs
from perdure.stores.sqlite.statements import Statement, Statements

FEW, MANY = 5_000, 50_000
START, HOUR = 1_900_000_000, timedelta(hours=1)
NOW = datetime.fromtimestamp(START, UTC)

# Each workflow has all statuses, queues and versions. Half of the queued runs are due;
# all of them await a message.
FILL = """
    WITH RECURSIVE number (i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM number WHERE i + 1 < :count)
    INSERT INTO runs (
        id, snapshot, updated_at, workflow, status, awaits, wake_at, epoch, queue, version, tags,
        created_at
    )
    SELECT printf('run %08d', i * 7919 % :count), printf('{"padding": "%0500d"}', i),
        strftime('%Y-%m-%dT%H:%M:%S.000000Z', :start - i, 'unixepoch'),
        printf('workflow %d', i % 10),
        CASE i / 10 % 4 WHEN 0 THEN 'completed' WHEN 1 THEN 'failed' ELSE 'queued' END,
        CASE WHEN i / 10 % 4 > 1 THEN '["paid"]' END,
        CASE WHEN i / 10 % 4 > 1 THEN :start * 1000000 + (i - :count / 2) * 1000 END, i,
        CASE i / 40 % 2 WHEN 0 THEN '' ELSE printf('queue %d', i / 80 % 10) END,
        i / 7 % 3, CASE i / 3 % 5 WHEN 0 THEN printf('["kind=%d"]', i % 10) ELSE '[]' END,
        (:start - i) * 1000000
    FROM number
"""

Call: TypeAlias = Callable[[SearchVerbs, ScheduleVerbs], Verb[Any]]


class Recorder:
    """Runs verbs and keeps their statements, and how many instructions these took."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self.connection = connection
        self.statements: list[Statement] = []
        self.steps = 0
        names = (Statements("runs"), "", lambda: START * 1_000_000)
        self._verbs = SearchVerbs(*names), ScheduleVerbs(*names)

    def run(self, call: Call) -> Any:
        """Return the result of a verb; what it writes is rolled back."""
        self.statements, instructions = [], count()
        self.connection.set_progress_handler(lambda: next(instructions) < 0, 10)
        self.connection.execute("BEGIN")
        try:
            return drive(self.connection, self._recorded(call(*self._verbs)))
        finally:
            self.connection.set_progress_handler(None, 0)
            self.connection.execute("ROLLBACK")
            self.steps = next(instructions) * 10

    def plans(self) -> list[str]:
        """Return the lines of the statements' query plans."""
        explained = [
            execute(self.connection, Statement(f"EXPLAIN QUERY PLAN {one.sql}", one.values))
            for one in self.statements
        ]
        return [row[3] for outcome in explained for row in outcome.rows]

    def _recorded(self, verb: Verb[Any]) -> Verb[Any]:
        try:
            statements = next(verb)
            while True:
                self.statements += statements
                statements = verb.send((yield statements))
        except StopIteration as done:
            return done.value


def recorder(path: Path, runs: int) -> Recorder:
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("PRAGMA synchronous = OFF")
    connection.execute("BEGIN")
    drive(connection, Schema("migrations", "runs").migrate())
    connection.execute(FILL, {"count": runs, "start": START})
    connection.execute("COMMIT")
    return Recorder(connection)


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recorder]:
    """5,000 runs."""
    recorded = recorder(tmp_path_factory.mktemp("few") / "runs.db", FEW)
    with closing(recorded.connection):
        yield recorded


@pytest.fixture(scope="module", params=[False, True], ids=["", "analyzed"])
def many(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Recorder]:
    """50,000 runs, with and without statistics about them."""
    recorded = recorder(tmp_path_factory.mktemp("many") / "runs.db", MANY)
    if request.param:
        recorded.connection.execute("ANALYZE")
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
    verbs = HandoffVerbs(Statements("runs"), "", lambda: START * 1_000_000)
    messages = [NewMessage(f"run {number:08}", "paid", b"1") for number in range(100)]
    return lambda *_: verbs.send_and_claim(messages, Claimant("ana", HOUR, limit, TEN))


def prune(workflow: str | None, *tags: str) -> Call:
    request = PruneRequest(timedelta(0), ("completed", "failed"), workflow, tags, 20, True)
    return lambda searches, _: searches.prune(request)


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
    inbox = InboxVerbs(Statements("runs"), "", lambda: START * 1_000_000)
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
