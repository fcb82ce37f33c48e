"""The types of insights: questions and answers."""

from collections.abc import AsyncGenerator
from typing import assert_type

from perdure.insights import (
    Insights,
    ParsedQuery,
    Redact,
    RunFacts,
    RunRow,
    StepDetail,
    Why,
    parse_query,
)
from perdure.store import Store


async def questions(store: Store) -> None:
    insights = Insights(store, redact=Redact(names=("iban",), function=lambda path, value: True))
    page = await insights.runs("status:failed", limit=10)
    assert_type(page.runs, tuple[RunRow, ...])
    assert_type(await insights.run("r"), RunFacts)
    assert_type(await insights.why("r"), Why)
    assert_type(await insights.step("r", "ship"), StepDetail)
    assert_type(insights.watch("r"), AsyncGenerator[RunFacts, None])
    query = insights.parse("status:failed")
    assert_type(query, ParsedQuery)
    assert_type(parse_query(str(query), page.runs[0].updated_at), ParsedQuery)
    await insights.runs(query, after=page.cursor)
