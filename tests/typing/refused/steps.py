"""Misuse of steps and workflows."""

from perdure import Step, Workflow


async def fetch(id: str) -> str:
    return id


async def calls(step: Step) -> None:
    await step("the wrong type", fetch, 1)  # refused
    await step("too few", fetch)  # refused
    await step("too many", fetch, "1", "2")  # refused
    await step("a value", "text")  # refused
    await step("no such option", fetch, "1", retries=3)  # refused
    await step("a number as limit", fetch, "1", limit=5)  # refused
    await step.sleep("no duration", None)  # refused
    await step.map("the wrong items", [1, 2], fetch)  # refused
    length: int = await step("another type", fetch, "1")  # refused
    print(length)


async def debit(connection: object, account: str) -> str:
    return account


async def transactions(step: Step) -> None:
    await step.transaction("the wrong type", debit, 1)  # refused
    await step.transaction("too few", debit)  # refused
    await step.transaction("too many", debit, "ana", 5)  # refused
    length: int = await step.transaction("another type", debit, "ana")  # refused
    print(length)


async def values(step: Step) -> None:
    await step.sleep_until("a duration", "1h")  # refused
    step.tag(plan=7)  # refused
    step.report(progress="50%")  # refused
    step.report(0.5)  # refused
    step.uuid(7)  # refused


async def three(step: Step, deps: object, more: int) -> None: ...


async def workflows() -> None:
    await Workflow("w").run(three)  # refused
    await Workflow("w").run(calls, "options")  # refused
    await Workflow("w").run(calls, resumeState=None)  # refused
    Workflow("w", on_unknown_steps="raise")  # refused
    Workflow(5)  # refused
