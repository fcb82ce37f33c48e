"""The list of runs, and one run."""

from collections.abc import AsyncGenerator
from typing import Any

import msgspec
from starlette.responses import Response, StreamingResponse

from perdure.dashboard.board import Board
from perdure.dashboard.rendering import Content, quote_term
from perdure.dashboard.values import visible
from perdure.dashboard.visit import Visit
from perdure.errors import InvalidArgument, RunNotFound
from perdure.insights import (
    Comparison,
    Insights,
    InvalidQuery,
    ParsedQuery,
    RunFacts,
    StepDetail,
    StepsPage,
    timeline,
    to_json,
)
from perdure.operations.verbs import VERBS
from perdure.snapshot import RunStatus

STEPS_PER_PAGE = 100
_IDS_PER_READ = 500


async def list_runs(board: Board, visit: Visit) -> Content | Response:
    """Show the runs that a query finds, or return all of their ids."""
    text, after = visit.query.get("q", "").strip(), visit.after
    if visit.query.get("format") == "ids":
        query = board.insights.parse(await board.insights.expand(text))
        return StreamingResponse(_ids(board, query), media_type="text/plain")
    context: dict[str, Any] = {
        "query_text": text,
        "after": after,
        "views": await board.insights.views(),
        "terms": (),
        "error": "",
        "bulk_verbs": [verb for verb in VERBS.values() if verb.bulk and visit.may(verb.right)],
    }
    try:
        query = board.insights.parse(await board.insights.expand(text))
        page = await board.insights.runs(query, after=after)
    except (InvalidArgument, InvalidQuery) as error:
        return Content("runs.html", str(error), {**context, "error": str(error)}, 400)
    terms = [str(term) for term in query.terms]
    context["terms"] = [
        (term, " ".join(terms[:n] + terms[n + 1 :])) for n, term in enumerate(terms)
    ]
    topics = () if after else (f"query:{text}",)
    return Content("runs.html", page, {**context, "page": page}, topics=topics)


async def _ids(board: Board, query: ParsedQuery) -> AsyncGenerator[str, None]:
    """Yield the ids of all runs that a query finds, one per line."""
    after, is_last = None, False
    while not is_last:
        async with board.reading():
            page = await board.insights.runs(query, _IDS_PER_READ, after)
        ids = (visible(run.id).replace("\n", r"\u000a") for run in page.runs)
        yield "".join(f"{id}\n" for id in ids)
        after, is_last = page.cursor, page.cursor is None


async def insights_for(board: Board, visit: Visit) -> Insights:
    """Return the insights that show secrets, if the person may see them and requests it."""
    if visit.query.get("reveal") != "1" or not visit.may("payloads"):
        return board.insights
    return await board.reveal(visit.params["run"], visit.access.person, visit.now)


async def show_run(board: Board, visit: Visit) -> Content:
    """Show one run with its timeline, and one of its steps."""
    run_id = visit.params["run"]
    try:
        insights = await insights_for(board, visit)
        facts = await insights.run(run_id)
    except RunNotFound:
        return await _missing(board, run_id)
    steps = await insights.steps(run_id, visit.after, STEPS_PER_PAGE)
    picture = timeline.draw(facts, steps.steps, is_last=not steps.after, now=visit.now)
    key = _chosen(visit, facts, steps)
    pending = picture.pending(key)
    selected = await insights.step(run_id, key) if key and not pending else None
    context = {
        "run": facts.run,
        "facts": facts,
        "steps": steps,
        "timeline": picture,
        "chosen": key,
        "selected": selected,
        "pending": pending,
        "revealed": insights is board.revealed,
        **_offered(visit, facts.run.status, _state(pending, selected)),
    }
    topics = () if facts.run.ended_at else (f"run:{run_id}",)
    return Content("run.html", (facts, steps, selected), context, topics=topics)


def _chosen(visit: Visit, facts: RunFacts, steps: StepsPage) -> str:
    """Return the requested step, or the one that ended the run, or the last one."""
    last = steps.steps[-1].key if steps.steps else ""
    asked = visit.query.get("step") or visit.query.get("key")
    return asked or next(iter(facts.error_steps), last)


def _state(pending: timeline.Bar | None, selected: StepDetail | None) -> str:
    if selected is None:
        return "pending" if pending else ""
    return "ok" if selected.step.ok else "failed"


def _offered(visit: Visit, status: RunStatus, state: str) -> dict[str, Any]:
    """Return the verbs that make sense now, and that the person may use."""
    verbs = [verb for verb in VERBS.values() if visit.may(verb.right)]
    fitting = [verb for verb in verbs if status in verb.statuses]
    main = [verb for verb in fitting if verb.main][:2]
    return {
        "main_verbs": main,
        "other_verbs": [verb for verb in fitting if verb not in main],
        "step_verbs": [verb for verb in verbs if state in verb.steps],
    }


async def _missing(board: Board, run_id: str) -> Content:
    """Show runs with similar ids, and whether an operator deleted the run."""
    prefix = run_id[: max(len(run_id) // 2, 1)]
    try:
        similar = (await board.insights.runs(quote_term("", prefix), limit=10)).runs
    except InvalidArgument:
        similar = ()
    context = {"run_id": run_id, "similar": similar}
    return Content("run_missing.html", {"error": "not found", "run": run_id}, context, 404)


async def download(board: Board, visit: Visit) -> Response:
    """Return the input, the output or the value of a step as a file, or the run for an import."""
    insights, run_id = await insights_for(board, visit), visit.params["run"]
    part = visit.choice("part", ("payload", "output", "step"), "payload")
    value: Any
    if visit.path.endswith("/export"):
        part, value = "run", to_json(await insights.export(run_id))
    elif part == "step":
        value = (await insights.step(run_id, visit.query.get("key", ""))).value
    else:
        facts = await insights.run(run_id)
        value = facts.output if part == "output" else facts.payload
    headers = {"Content-Disposition": f'attachment; filename="{part}.json"'}
    return Response(msgspec.json.encode(value), media_type="application/json", headers=headers)


async def compare(insights: Insights, visit: Visit) -> Comparison | None:
    """Return how two runs differ, if both are named."""
    left, right = visit.query.get("a"), visit.query.get("b")
    return await insights.compare(left, right) if left and right else None


async def complete(board: Board, visit: Visit) -> Response:
    """Return completions of the last word of a query, as whole queries."""
    query = visit.query.get("q", "")
    found = await board.insights.complete(query)
    body = [{"value": query[: each.start] + each.text, "hint": each.hint} for each in found[:12]]
    return Response(msgspec.json.encode(body), media_type="application/json")
