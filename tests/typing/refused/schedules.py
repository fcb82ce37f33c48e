"""Misuse of schedules."""

from perdure import Client, Schedule, Step, workflow


@workflow("report")
async def report(step: Step, customer: str) -> int:
    return 1


async def schedules(client: Client) -> None:
    await client.schedule("daily", report, "ana")  # refused
    await client.schedule("daily", report, 5, every="1d")  # refused
    await client.schedule("daily", report, every="1d")  # refused
    await client.schedule("daily", report, "ana", every="1d", overlap="queue")  # refused
    schedule = await client.schedule("daily", report, "ana", every="1d")
    await schedule.update(evry="2d")  # refused
    Schedule(every=None)  # refused
