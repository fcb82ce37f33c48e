"""The pages of queues and schedules, and of runs that started each other."""

from datetime import timedelta

import pytest

from perdure import Cron, Runtime, Step, workflow
from perdure.clock import SystemClock
from perdure.insights import Insights
from perdure.operations import Operations
from perdure.presence import DeclaredLimit, Minute, Throughput
from perdure.presence.documents import write_throughput
from perdure.snapshot import RunStatus
from perdure.stores import MemoryStore
from perdure.urls import encode_id
from tests.unit.dashboard.visitor import Visitor, dashboard, text_of
from tests.unit.insights.runs import live_worker

LIMITS = (
    DeclaredLimit("queue:emails", 50),
    DeclaredLimit("rate:emails/*", 10, 60.0),
    DeclaredLimit("limit:tokens", 2000, 60.0),
)


@workflow("report")
async def report(step: Step, day: str) -> None:
    await step.sleep("later", "1h")


@workflow("reports")
async def reports(step: Step, days: list[str]) -> None:
    await step.map_runs("write", report, days)


@pytest.fixture
async def store() -> MemoryStore:
    """Return a store with a schedule, a run with children, and a worker with a queue."""
    store = MemoryStore()
    runtime = Runtime(store, workflows=[report, reports], suspend_after=0)
    nine = Cron("0 9 * * *", tz="Europe/Berlin")
    await runtime.schedule("daily", report, "today", every=nine)
    await runtime.trigger(reports, ["mo", "tu"], run_id="week")
    now = SystemClock().now()
    await live_worker(store, now, queues=("emails",), limits=LIMITS)
    return store


async def status_of(store: MemoryStore, schedule: str = "daily") -> RunStatus | None:
    row = await Insights(store).schedule(schedule)
    return None if row is None else row.status


async def test_a_run_shows_its_children(store: MemoryStore) -> None:
    page = await Visitor(dashboard(store)).get("/runs/week")
    assert "Parent and children 2 Queued 2 All children" in text_of(page)
    assert 'href="/runs?q=parent%3Aweek+status%3Aqueued"' in page.text
    assert "week/1/write/1" in text_of(page)
    assert "for its runs week/1/write/… to end" in text_of(page)


async def test_a_child_shows_its_parent(store: MemoryStore) -> None:
    page = await Visitor(dashboard(store)).get(f"/runs/{encode_id('week/1/write/0')}")
    assert "parent week Waiting started it in step write" in text_of(page)


async def test_queues_with_limits(store: MemoryStore) -> None:
    text = text_of(await Visitor(dashboard(store)).get("/queues"))
    assert "concurrency 0 of 50, each key: rate 10 per 60 s" in text
    assert "Step limits" in text
    assert "tokens 0 of 2,000 per 60 s" in text


async def test_one_queue(store: MemoryStore) -> None:
    visitor = Visitor(dashboard(store))
    assert "each key: rate 10 per 60 s" in text_of(await visitor.get("/queues/emails"))
    assert (await visitor.get("/queues/nope")).status_code == 404


async def test_a_queue_is_paused_and_resumed(store: MemoryStore) -> None:
    visitor = Visitor(dashboard(store))
    response = await visitor.post("/queues/emails/do/pause_queue", {"why": "spam"})
    assert response.headers["location"] == "/queues/emails"
    assert "Paused: spam." in text_of(await visitor.get("/queues/emails"))
    await visitor.post("/queues/emails/do/unpause_queue")
    assert "Paused" not in text_of(await visitor.get("/queues"))


async def test_a_limit_is_changed_and_restored(store: MemoryStore) -> None:
    visitor = Visitor(dashboard(store))
    form = await visitor.get("/queues/tokens/do/set_limit?of=steps")
    assert "<option selected>steps</option>" in form.text
    await visitor.post("/queues/tokens/do/set_limit", {"of": "steps", "n": "500"})
    assert "tokens 0 of 500 per 60 s" in text_of(await visitor.get("/queues"))
    await visitor.post("/queues/tokens/do/set_limit", {"of": "steps", "n": ""})
    assert "tokens 0 of 2,000 per 60 s" in text_of(await visitor.get("/queues"))


async def test_schedules_with_their_next_times(store: MemoryStore) -> None:
    visitor = Visitor(dashboard(store))
    assert "daily report 0 9 * * * Europe/Berlin Active in" in text_of(
        await visitor.get("/schedules")
    )
    text = text_of(await visitor.get("/schedules/daily"))
    assert "Overlap skip Catch-up 1 h" in text
    assert (await visitor.get("/schedules/nope")).status_code == 404


async def test_a_schedule_is_paused_and_resumed(store: MemoryStore) -> None:
    visitor = Visitor(dashboard(store))
    response = await visitor.post("/schedules/daily/do/pause_schedule", {"why": "holidays"})
    assert response.headers["location"] == "/schedules/daily"
    assert await status_of(store) == "paused"
    assert "It starts no runs until it is resumed." in text_of(
        await visitor.get("/schedules/daily")
    )
    await visitor.post("/schedules/daily/do/unpause_schedule")
    assert await status_of(store) == "queued"


async def test_a_run_of_a_schedule_is_started_now(store: MemoryStore) -> None:
    visitor = Visitor(dashboard(store))
    response = await visitor.post("/schedules/daily/do/trigger_schedule")
    page = await visitor.get(response.headers["location"])
    assert "started by schedule daily" in text_of(page)
    assert "Trigger schedule daily" in text_of(page)


async def test_a_period_is_backfilled(store: MemoryStore) -> None:
    visitor = Visitor(dashboard(store))
    path = "/schedules/daily/do/backfill_schedule"
    await visitor.post(path, {"start": "2024-01-01T00:00", "end": "2024-01-03T00:00"})
    assert len((await Insights(store).runs("schedule:daily")).runs) == 2
    refused = await visitor.post(path, {"start": "2024-01-01T00:00", "end": "soon"})
    assert refused.status_code == 422
    assert "expected a duration such as" in text_of(refused)


async def test_a_schedule_is_deleted_with_a_reason(store: MemoryStore) -> None:
    visitor = Visitor(dashboard(store))
    path = "/schedules/daily/do/delete_schedule"
    assert (await visitor.post(path)).status_code == 422
    response = await visitor.post(path, {"why": "replaced"})
    assert response.headers["location"] == "/schedules"
    assert await status_of(store) is None


@pytest.mark.parametrize(
    ("path", "command"),
    [
        ("/queues/emails/do/set_limit", "perdure queues limit emails"),
        ("/schedules/daily/do/unpause_schedule", "perdure schedules resume daily"),
        ("/workflows/report/do/pause_workflow", "perdure workflows pause report"),
    ],
)
async def test_a_form_shows_the_command_that_does_the_same(
    store: MemoryStore, path: str, command: str
) -> None:
    assert f"<code>{command}</code>" in (await Visitor(dashboard(store)).get(path)).text


async def test_the_agenda_names_schedules(store: MemoryStore) -> None:
    await Runtime(store, workflows=[report]).schedule(
        "soon", report, "x", every=timedelta(minutes=5)
    )
    text = text_of(await Visitor(dashboard(store)).get("/agenda"))
    assert "schedule soon" in text


async def test_a_person_who_may_only_view_is_offered_no_actions(store: MemoryStore) -> None:
    await Operations(store).pause_queue("emails", by="ana")
    visitor = Visitor(dashboard(store, "view"))
    for path in ("/queues", "/queues/emails", "/schedules", "/schedules/daily"):
        assert "/do/" not in (await visitor.get(path)).text


async def test_without_queues_and_schedules_the_pages_say_how_to_declare_them() -> None:
    visitor = Visitor(dashboard(MemoryStore()))
    assert "Declare one in the code" in text_of(await visitor.get("/queues"))
    assert "Declare one in the code" in text_of(await visitor.get("/schedules"))


async def test_the_depth_of_queues_is_a_chart(store: MemoryStore) -> None:
    now = SystemClock().now()
    hour = now.replace(minute=0, second=0, microsecond=0) - timedelta(hours=1)
    depths = {"": 1, **{f"queue-{n}": 10 * n for n in range(1, 8)}}
    minutes = (Minute(5, slots=1, depths=depths),)
    last = Throughput(
        worker="w", hour=hour, host="", pid=1, started_at=hour, seen_at=hour, minutes=minutes
    )
    await write_throughput(store, last)
    page = await Visitor(dashboard(store)).get("/queues")
    assert "70 due in queue-7" in page.text
    assert "queue-7 queue-6 queue-5 queue-4 queue-3 other queues" in text_of(page)
    assert ": 31 due in other queues" in page.text
