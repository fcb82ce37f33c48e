"""Commands about schedules, and about runs that started each other."""

import asyncio
import json

import pytest

from perdure import Cron, Runtime, Step, workflow
from perdure.stores import open_store
from tests.unit.cli.conftest import Perdure


@workflow("report")
async def report(step: Step, day: str) -> None:
    """Write a report."""


@workflow("reports")
async def reports(step: Step, days: list[str]) -> None:
    """Write some reports, each as a run of its own."""
    await step.map_runs("write", report, days)


async def prepare(url: str) -> None:
    """Create a schedule, and a run that waits for its children."""
    async with open_store(url) as store:
        runtime = Runtime(store, workflows=[report, reports], suspend_after=0)
        nine = Cron("0 9 * * *", tz="Europe/Berlin")
        await runtime.schedule("daily", report, "today", every=nine)
        await runtime.trigger(reports, list("abcdefg"), run_id="week")


@pytest.fixture(autouse=True)
def _prepared(url: str) -> None:
    asyncio.run(prepare(url))


def test_schedules_are_listed(perdure: Perdure) -> None:
    assert perdure("schedules", "list").stdout.startswith(
        "daily\treport\t0 9 * * * Europe/Berlin\t"
    )
    assert perdure("schedules", "list", "-o", "ids").stdout == "daily\n"


def test_a_schedule_is_shown(perdure: Perdure) -> None:
    row = json.loads(perdure("schedules", "show", "daily", "-o", "json").stdout)
    assert (row["name"], row["overlap"], row["catch_up"]) == ("daily", "skip", 3600)
    assert "there is no schedule 'nope'" in perdure("schedules", "show", "nope", code=4).stderr


def test_the_status_of_a_schedule_is_not_that_of_its_run(perdure: Perdure) -> None:
    for status in ("active", "paused"):
        lines = perdure("schedules", "show", "daily").stdout.splitlines()
        assert [line.split() for line in lines if "status" in line] == [["status", status]]
        perdure("schedules", "pause", "daily", code=5 if status == "paused" else 0)


def test_a_schedule_is_paused_and_resumed(perdure: Perdure) -> None:
    result = perdure("schedules", "pause", "daily", "--why", "holidays")
    assert "Schedule daily is paused." in result.stdout
    assert "paused by" in perdure("schedules", "list").stdout
    perdure("schedules", "pause", "daily", code=5)
    perdure("schedules", "resume", "daily")
    assert "paused" not in perdure("schedules", "list").stdout
    perdure("schedules", "pause", "nope", code=4)


def test_a_schedule_is_triggered(perdure: Perdure) -> None:
    assert "Started daily@" in perdure("schedules", "trigger", "daily", "--by", "ana").stdout
    run_id = perdure("ls", "schedule:daily", "-o", "ids").stdout.strip()
    output = perdure("show", run_id).stdout
    assert "Schedule  daily" in output
    assert "trigger_schedule by ana" in output
    error = perdure("schedules", "trigger", "nope", code=4).stderr
    assert "there is no schedule 'nope' in this store; perdure schedules shows" in error


def test_a_period_is_backfilled(perdure: Perdure) -> None:
    text = perdure("schedules", "backfill", "daily", "2024-01-01", "2024-01-03T12:00").stdout
    assert "Schedule daily has 3 runs in this period." in text
    ids = perdure("ls", "schedule:daily", "-o", "ids").stdout.split()
    assert "daily@2024-01-02T08:00:00Z" in ids
    assert "backfill_schedule" in perdure("acts").stdout


@pytest.mark.parametrize("period", [("yesterday",), ("2d", "3d"), ("2099-01-01", "2099-01-02")])
def test_a_period_that_cannot_be_backfilled(perdure: Perdure, period: tuple[str, ...]) -> None:
    perdure("schedules", "backfill", "daily", *period, code=2)


def test_a_schedule_is_deleted(perdure: Perdure) -> None:
    perdure("schedules", "delete", "daily", code=2)
    perdure("schedules", "delete", "daily", "--why", "replaced")
    assert perdure("schedules", "list").stdout == ""
    perdure("schedules", "delete", "daily", "--why", "replaced", code=4)


def test_a_run_is_shown_with_its_children(perdure: Perdure) -> None:
    text = perdure("show", "week").stdout
    assert 'Waiting for the 7 runs that "write" started' in text
    assert "Children  7 queued" in text
    assert "perdure ls parent:week" in text
    assert len(perdure("ls", "parent:week", "-o", "ids").stdout.split()) == 7


def test_a_child_is_shown_with_its_parent(perdure: Perdure) -> None:
    assert "Parent    week (waiting), step write" in perdure("show", "week/1/write/3").stdout
