"""Misuse of insights."""

from perdure.insights import Insights, Redact
from perdure.store import Store


async def asks(insights: Insights, store: Store) -> None:
    Insights("sqlite:///runs.db")  # refused
    Insights(store, redact="password")  # refused
    Redact(names="password")  # refused
    await insights.runs(status="failed")  # refused
    await insights.step("order-1")  # refused
    (await insights.why("order-1")).upper()  # refused
