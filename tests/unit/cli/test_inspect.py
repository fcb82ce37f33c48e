"""Commands that read."""

import asyncio
import json
import re
import shlex

import pytest

from perdure import Runtime, Step, workflow
from perdure.stores import sqlite
from tests.unit.cli import shop
from tests.unit.cli.conftest import Perdure
from tests.unit.dashboard.test_absurd_times import absurd_snapshot

LIST = """\
asking\torder v1\twaiting\t2024-01-01T00:00:04Z\t1\tfor approved
asleep\torder v1\tsuspended\t2024-01-01T00:00:02Z\t1\twakes 2124-01-02T00:00:02Z
broken\torder v1\tfailed\t2024-01-01T00:00:01Z\t2\tCarrierDown: 503 from carrier
done\torder v1\tcompleted\t2024-01-01T00:00:00Z\t2\t
"""


def test_list_prints_tab_separated_lines_in_a_pipe(perdure: Perdure) -> None:
    assert perdure("list").stdout == LIST


def test_ls_is_list(perdure: Perdure) -> None:
    assert perdure("ls", "broken").stdout == LIST.splitlines(keepends=True)[2]


def test_a_query_may_be_several_words(perdure: Perdure) -> None:
    query = ("status:failed", "tag:customer=acme")
    assert perdure("ls", *query, "-o", "ids").stdout == "broken\n"


def test_a_list_continues_after_its_cursor(perdure: Perdure) -> None:
    first = perdure("ls", "-n", "2", "-o", "ids")
    options = shlex.split(first.stderr.removeprefix("There are more: "))
    assert perdure("ls", "-o", "ids", *options).stdout == "broken\ndone\n"


def test_an_empty_list_is_a_message(perdure: Perdure) -> None:
    result = perdure("ls", "status:cancelled")
    assert (result.stdout, result.stderr) == ("", "No runs match.\n")


def test_an_invalid_query_is_explained(perdure: Perdure) -> None:
    assert "did you mean 'status'?" in perdure("ls", "statos:x", code=2).stderr


def test_json_is_the_answer_of_insights(perdure: Perdure) -> None:
    page = json.loads(perdure("-o", "json", "ls", "-n", "1").stdout)
    assert [run["id"] for run in page["runs"]] == ["asking"]
    assert page["cursor"]


def test_jsonl_is_one_line_per_run(perdure: Perdure) -> None:
    lines = perdure("ls", "-o", "jsonl").stdout.splitlines()
    assert [json.loads(line)["status"] for line in lines][-1] == "completed"


def test_why_is_one_sentence(perdure: Perdure) -> None:
    sentence = (
        'Step "ship" failed with CarrierDown: 503 from carrier. '
        "Nothing will happen until the run is retried.\n"
    )
    assert perdure("why", "broken").stdout == sentence


def test_show_has_a_timeline_and_the_error_with_its_cause(perdure: Perdure) -> None:
    lines = perdure("show", "broken").stdout.splitlines()
    assert lines[0].startswith("broken   order v1   failed 2024-01-01T00:00:01Z, took 312 ms")
    assert lines[2].startswith('  ✓ charge  250 ms  "receipt 17"                  |████')
    assert lines[3].startswith("  ✗ ship     62 ms  CarrierDown: 503 from carri…  |")
    assert lines[4] == "      CarrierDown: 503 from carrier"
    assert "      caused by ConnectionError: connection reset" in lines


def test_show_says_how_long_a_wait_was_that_is_drawn_short(perdure: Perdure) -> None:
    async def sleep_a_day() -> None:
        @workflow("nap")
        async def nap(step: Step) -> None:
            await step("lie down", shop.clock.advance, "1s")
            await step.sleep("settle", "1d")
            await step("get up", shop.clock.advance, "1s")

        async with sqlite("shop.db", clock=shop.clock) as store:
            runtime = Runtime(store, workflows=[nap], clock=shop.clock)
            await runtime.trigger(nap, run_id="nap-1")
            await shop.clock.advance("1d")
            await runtime.sweep()

    asyncio.run(sleep_a_day())
    axis, first, sleep, last = perdure("show", "nap-1").stdout.splitlines()[2:6]
    assert axis.strip() == "1 day"
    assert first.index("█") < sleep.index("---") < last.index("█")
    assert sleep.index("-") <= axis.index("1 day") <= sleep.rindex("-")


def test_show_hides_frames_of_perdure_unless_asked(perdure: Perdure) -> None:
    assert "engine" not in perdure("show", "broken").stdout
    assert "engine" in perdure("show", "broken", "-v").stdout


def test_show_prints_waits(perdure: Perdure) -> None:
    assert 'waits for event "approved"' in perdure("show", "asking").stdout
    assert 'sleeps in "settle", until 2124-01-02T00:00:02Z' in perdure("show", "asleep").stdout


def test_show_prints_one_step_in_full(perdure: Perdure) -> None:
    assert '"receipt 17"' in perdure("show", "done", "--step", "charge").stdout


def test_a_narrow_terminal_has_no_room_for_bars(perdure: Perdure) -> None:
    assert "█" not in perdure("show", "done", env={"COLUMNS": "40"}).stdout


def test_errors_are_grouped_with_a_query_that_finds_them(perdure: Perdure) -> None:
    [group] = json.loads(perdure("errors", "--window", "3650d", "-o", "json").stdout)["groups"]
    assert perdure("ls", group["query"], "-o", "ids").stdout == "broken\n"


def test_the_agenda_has_wake_times_and_events(perdure: Perdure) -> None:
    lines = perdure("agenda", "--hours", "744").stdout
    assert '1 run waiting for "approved"' in lines


def test_compare_shows_differences(perdure: Perdure) -> None:
    lines = perdure("compare", "done", "broken").stdout.splitlines()
    assert lines[:2] == ["Input", '  + payload.carrier: "down"']


def test_a_run_equals_itself(perdure: Perdure) -> None:
    same = "The runs have the same input and the same steps.\n"
    assert perdure("compare", "done", "done").stdout == same


def test_the_overview_counts_runs(perdure: Perdure) -> None:
    lines = perdure().stdout.splitlines()
    assert lines[:2] == [
        "Store       sqlite:///shop.db, 0 workers live",
        "Now         1 suspended   1 waiting",
    ]


def test_an_unknown_run_is_not_found(perdure: Perdure) -> None:
    for command in ("show", "why", "watch", "export"):
        assert (
            "there is no run 'nope' in this store; perdure ls"
            in perdure(command, "nope", code=4).stderr
        )


def test_watch_ends_with_the_run(perdure: Perdure) -> None:
    assert "✓ ship" in perdure("watch", "done").stdout
    assert "✗ ship" in perdure("watch", "broken", code=1).stdout


def test_watch_says_when_a_step_ended(perdure: Perdure) -> None:
    """On this machine, where it may still have been the year before."""
    lines = perdure("watch", "done").stdout.splitlines()
    assert re.match(r"(2023-12-31|2024-01-01) [\d:]{8}  ✓ charge", lines[0])


def test_watch_says_when_the_run_ended(perdure: Perdure) -> None:
    lines = perdure("watch", "done").stdout.splitlines()
    assert re.match(r"(2023-12-31|2024-01-01) [\d:]{8}  completed", lines[-1])


def test_watch_names_what_the_engine_records(perdure: Perdure) -> None:
    async def undo_a_charge() -> None:
        @workflow("trip")
        async def trip(step: Step) -> None:
            await step("book", lambda: "room", undo=lambda room: None)
            raise ValueError("no funds")

        async with sqlite("shop.db") as store:
            await Runtime(store).trigger(trip, run_id="trip-1")

    asyncio.run(undo_a_charge())
    assert "✓ undo of book" in perdure("watch", "trip-1", code=1).stdout


def test_watch_has_a_timeout(perdure: Perdure) -> None:
    assert "◇" not in perdure("watch", "asking", "--timeout", "0.1s", code=124).stdout


@pytest.mark.parametrize("steps", [0, 300])
@pytest.mark.parametrize("zone", ["Asia/Tokyo", "America/New_York"])
def test_a_run_with_absurd_times_is_shown(perdure: Perdure, steps: int, zone: str) -> None:
    asyncio.run(save_absurd_run(steps))
    env = {"TZ": zone}
    for style in ("iso", "local", "relative"):
        assert "absurd" in perdure("--time", style, "show", "absurd", env=env).stdout
        assert "absurd" in perdure("--time", style, "list", env=env).stdout
    for key in absurd_snapshot()["steps"]:
        assert key in perdure("show", "absurd", "--step", key).stdout
    assert json.loads(perdure("-o", "json", "show", "absurd").stdout)["facts"]
    assert perdure("why", "absurd").stdout


async def save_absurd_run(steps: int) -> None:
    async with sqlite("shop.db") as store:
        await store.save("absurd", absurd_snapshot(steps))
