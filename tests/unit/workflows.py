"""Small workflow functions that the tests of `Workflow` share."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from perdure import Step, Workflow
from perdure.snapshot import Snapshot

Body = Callable[..., Awaitable[Any]]


@dataclass
class User:
    name: str
    since: datetime


class Counted:
    """Steps "a", "b" and "c", which succeed, and "d", which fails; `ran` has the ids that ran."""

    def __init__(self) -> None:
        self.ran: list[str] = []

    async def work(self, id: str) -> str:
        self.ran.append(id)
        if id == "d":
            raise ValueError("d failed")
        return id.upper()

    async def body(self, step: Step) -> None:
        for id in "abcd":
            await step(id, self.work, id)


async def snapshot_of(body: Body, **options: Any) -> Snapshot:
    """Run a function once, and return the snapshot."""
    workflow = Workflow("w")
    await workflow.run(body)
    return workflow.snapshot(**options)


async def hello(step: Step) -> str:
    return await step("hello", lambda: "hello")


async def goodbye(step: Step) -> str:
    return await step("goodbye", lambda: "goodbye")
