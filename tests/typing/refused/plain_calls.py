"""Misuse of functions that are steps."""

from perdure import Step, durable


@durable.step
async def charge(cents: int, *, currency: str = "EUR") -> str:
    return f"{cents} {currency}"


@durable.step  # refused
def plain(cents: int) -> str:
    return str(cents)


@durable.step(key="charge")  # refused
async def keyed() -> None: ...


async def calls(step: Step) -> None:
    await charge("5")  # refused
    await charge(5, "EUR")  # refused
    await charge(5, currency=1)  # refused
    cents: int = await charge(5)  # refused
    first, second = await step.all(charge(5))  # refused
    number: int = (await step.race("r", charge(5), step.sleep("late", 1)))[1]  # refused
    await step.map("m", ["5"], charge)  # refused
    await step.map("m", [5], charge, on_error="ignore")  # refused
    await step("pay", charge, 5, currency="EUR")  # refused
    print(cents, first, second, number)
