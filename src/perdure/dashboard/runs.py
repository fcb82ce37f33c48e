"""The list of runs, and one run."""

from collections.abc import AsyncGenerator
from typing import Any, cast

import msgspec
from starlette.responses import Response, StreamingResponse

from perdure.dashboard.rendering import quote_term, render
from perdure.dashboard.visit import Visit
from perdure.errors import InvalidArgument, RunNotFound
from perdure.insights import Comparison, Insights, InvalidQuery, ParsedQuery, timeline
from perdure.insights.steps import Part
from perdure.insights.words import visible
from perdure.operations.verbs import VERBS

STEPS_PER_PAGE = 100
_IDS_PER_READ = 500


async def list_runs(visit: Visit) -> Response:
    """Show the runs that a query finds, or return all of their ids."""
    text, insights = visit.query.get("q", "").strip(), visit.board.insights
    context: dict[str, Any] = {
        "query_text": text,
        "views": await insights.views(),
        "bulk_verbs": [verb for verb in VERBS.values() if verb.bulk and visit.may(verb.right)],
    }
    try:
        query = insights.parse(await insights.expand(text))
        if visit.query.get("format") == "ids":
            return StreamingResponse(_ids(visit, query), media_type="text/plain")
        page = await insights.runs(query, after=visit.after)
    except (InvalidArgument, InvalidQuery) as error:
        context |= {"query": None, "error": str(error)}
        return render(visit, "runs.html", str(error), status=400, **context)
    topics = () if visit.after else (f"query:{text}",)
    return render(visit, "runs.html", page, topics=topics, page=page, query=query, **context)


async def _ids(visit: Visit, query: ParsedQuery) -> AsyncGenerator[str, None]:
    """Yield the ids of all runs that a query finds, one per line."""
    after: str | None = ""
    while after is not None:
        async with visit.board.reading():
            page = await visit.board.insights.runs(query, _IDS_PER_READ, after or None)
        ids = (visible(run.id).replace("\n", r"\u000a") for run in page.runs)
        yield "".join(f"{id}\n" for id in ids)
        after = page.cursor


async def show_run(visit: Visit) -> Response:
    """Show one run with its timeline, and one of its steps."""
    run_id, whole = visit.params["run"], visit.query.get("format") == "json"
    try:
        insights = await _insights_for(visit)
        facts = await insights.run(run_id, whole=whole)
    except RunNotFound:
        return await _show_missing(visit, run_id)
    steps = await insights.steps(run_id, visit.after, STEPS_PER_PAGE)
    picture = timeline.draw(facts, steps.steps, is_last=not steps.after, now=visit.now)
    # The requested step, or the one that ended the run, or the last one.
    keys = (*facts.error_steps[:1], *(step.key for step in steps.steps[-1:]), "")
    key = visit.query.get("step") or visit.query.get("key") or keys[0]
    pending = picture.pending(key)
    detail = await insights.step(run_id, key, whole=whole) if key and not pending else None
    state = "pending" if pending else detail and ("ok" if detail.step.ok else "failed")
    # The verbs that make sense now, and that the person may use.
    verbs = [verb for verb in VERBS.values() if visit.may(verb.right)]
    run_verbs = [verb for verb in verbs if facts.run.status in verb.statuses]
    return render(
        visit,
        "run.html",
        (facts, steps, detail),
        topics=() if facts.run.ended_at else (f"run:{run_id}",),
        run=facts.run,
        facts=facts,
        steps=steps,
        timeline=picture,
        key=key,
        detail=detail,
        pending=pending,
        run_verbs=run_verbs,
        step_verbs=[verb for verb in verbs if state in verb.steps],
    )


async def _insights_for(visit: Visit) -> Insights:
    """Return the insights that show secrets, if the person may see them and requests it."""
    if visit.query.get("reveal") != "1" or not visit.may("payloads"):
        return visit.board.insights
    return await visit.board.reveal(visit.params["run"], visit.access.person, visit.now)


async def _show_missing(visit: Visit, run_id: str) -> Response:
    """Show runs with similar ids, and what operators did to this one."""
    insights, prefix = visit.board.insights, run_id[: max(len(run_id) // 2, 1)]
    try:
        similar = (await insights.runs(quote_term("", prefix), limit=10)).runs
        # A bare word is the beginning of an id.
        acts = (await insights.acts(quote_term("", run_id), limit=10)).acts
    except InvalidArgument:
        similar = acts = ()
    data = {"error": "not found", "run": run_id}
    context: dict[str, Any] = {"run_id": run_id, "similar": similar}
    context["acts"] = [act for act in acts if act.run_id == run_id]
    return render(visit, "run_missing.html", data, status=404, **context)


async def download(visit: Visit) -> Response:
    """Send the input, the output or the value of a step as a file, or the run for an import."""
    insights, part = await _insights_for(visit), "run"
    if visit.path.endswith("/value"):
        part = visit.choice("part", ("payload", "output", "step"), "payload")
    key = visit.query.get("key", "")
    chunks = await insights.download(visit.params["run"], cast(Part, part), key)
    headers = {"Content-Disposition": f'attachment; filename="{part}.json"'}
    return StreamingResponse(chunks, 200, headers, "application/json")


async def compare(visit: Visit) -> Comparison | None:
    """Return how two runs differ, if both are named."""
    left, right = visit.query.get("a"), visit.query.get("b")
    return await visit.board.insights.compare(left, right) if left and right else None


async def complete(visit: Visit) -> Response:
    """Return completions of the last word of a query, as whole queries."""
    query = visit.query.get("q", "")
    words = (await visit.board.insights.complete(query))[:12]
    body = [{"value": query[: each.start] + each.text, "hint": each.hint} for each in words]
    return Response(msgspec.json.encode(body), media_type="application/json")
