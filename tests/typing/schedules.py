"""The types of schedules."""

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, assert_type

from perdure import (
    Client,
    Cron,
    Run,
    Schedule,
    ScheduleHandle,
    ScheduleInfo,
    Step,
    sync,
    workflow,
)


@dataclass
class Customer:
    name: str


@workflow("report")
async def report(step: Step, customer: Customer) -> int:
    assert_type(step.scheduled_for, datetime | None)
    return 1


@workflow("cleanup", version=2, schedule=Schedule(every=Cron("0 3 * * *"), jitter="5m"))
async def cleanup(step: Step) -> None: ...


async def schedules(client: Client, at: datetime) -> None:
    schedule = await client.schedule(
        "daily", report, Customer("ana"), every="1d", overlap="buffer_one", tags={"a": "b"}
    )
    assert_type(schedule, ScheduleHandle)
    await client.schedule("nightly", cleanup, every=timedelta(hours=1), start_at=at, end_at=None)
    await client.schedule("other", "report", {"name": "ana"}, every=Cron("0 9 * * *"))
    assert_type(await schedule.get(), ScheduleInfo | None)
    assert_type(await schedule.trigger(), Run[Any])
    assert_type(await schedule.backfill(at, at), list[Run[Any]])
    await schedule.update(every="2d", payload=Customer("bo"), on_failure="pause")
    await schedule.pause(by="ana", why="holidays")
    await schedule.unpause()
    await schedule.delete()
    assert_type(await client.schedules(), list[ScheduleInfo])
    assert_type(await client.get_schedule("daily"), ScheduleHandle)


def plain_calls(client: sync.Client, at: datetime) -> None:
    schedule = client.schedule("daily", report, Customer("ana"), every="1d")
    assert_type(schedule, sync.ScheduleHandle)
    assert_type(schedule.get(), ScheduleInfo | None)
    assert_type(schedule.backfill(at, at), list[Run[Any]])
    assert_type(client.schedules(), list[ScheduleInfo])
