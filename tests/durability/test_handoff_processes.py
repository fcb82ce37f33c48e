"""Processes that signal runs and get them with their messages are killed with `kill -9`."""

import asyncio
from pathlib import Path

import pytest

from perdure import Client
from perdure.stores import open_store
from tests.durability.handoff_process import EVENTS, started
from tests.durability.places import PLACES, Place, place_of

KILLS = 8
RUNS = [f"run-{n}" for n in range(3)]


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/runs.db"


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest) -> Place:
    return place_of(request)


async def test_no_event_is_lost_or_received_twice(place: Place, tmp_path: Path) -> None:
    """Whether a process dies before or after it got the lease of the run with the event.

    An event that a sender knows to be stored is not sent again: without it, its run would wait.
    """
    log = tmp_path / "log"
    async with open_store(place.url, **place.options) as store:
        client = Client(store)
        await client.trigger_many("relay", [str(log)] * len(RUNS), run_ids=RUNS)
        processes = [started(*place, RUNS, str(log)) for _ in range(2)]
        try:
            for _ in range(KILLS):
                await asyncio.sleep(0.5)
                victim = processes.pop(0)
                victim.kill()
                victim.join()
                processes.append(started(*place, RUNS, str(log)))
            for run_id in RUNS:
                received = await client.result(run_id, timeout=60)
                assert {number for number, _ in received} == {*range(EVENTS)}
                assert len({event for _, event in received}) == len(received)
        finally:
            for process in processes:
                process.kill()
                process.join()
    lines = log.read_text().splitlines()
    assert any(line.startswith("handoff ") for line in lines)
    assert began_after_they_were_seen(lines) == []


def began_after_they_were_seen(lines: list[str]) -> list[str]:
    """Return the steps that began although their value had been seen."""
    seen: set[str] = set()
    repeated: list[str] = []
    for line in lines:
        what, _, place = line.partition(" ")
        if what == "saw":
            seen.add(place)
        elif what == "began" and place in seen:
            repeated.append(place)
    return repeated
