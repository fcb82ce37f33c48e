"""One verb for many runs: those that were selected, or all that match a query."""

import asyncio
from collections.abc import AsyncIterator

from starlette.responses import Response

from perdure.dashboard.board import Board
from perdure.dashboard.formatting import plural
from perdure.dashboard.ids import decode_id
from perdure.dashboard.replies import redirect
from perdure.dashboard.rendering import Content
from perdure.dashboard.verbs import VERBS, Verb, shell_command
from perdure.dashboard.views.actions import check_why
from perdure.dashboard.visit import Visit
from perdure.errors import InvalidArgument, PerdureError, StoreError
from perdure.insights.model import BulkProgress

LIMIT = 1000
"""How many runs an operator may change at once; more needs the right `admin`."""


async def confirm_selected(board: Board, visit: Visit) -> Content:
    """Show the runs that were selected."""
    ids = [decode_id(each) or "" for each in visit.request.query_params.getlist("run")]
    return _page(visit, _asked_verb(visit), ids=[each for each in ids if each])


async def act_on_selected(board: Board, visit: Visit) -> Content | Response:
    """Apply the verb to each selected run; those that refuse it are named."""
    verb = VERBS[visit.params["verb"]]
    ids = [decode_id(each) or "" for each in visit.form.get("run", [])]
    try:
        why = check_why(verb, visit)
    except InvalidArgument as error:
        return _page(visit, verb, ids=ids, error=str(error))
    refused: list[str] = []
    for run_id in ids:
        try:
            method = getattr(board.operations, verb.name)
            await method(run_id, by=visit.access.person, why=why)
        except StoreError:
            raise
        except PerdureError as error:
            refused.append(f"{run_id}: {error}")
    done = f"{verb.title}: {plural(len(ids) - len(refused), 'run')} done"
    text = f"{done}, {len(refused)} refused. {' '.join(refused[:3])}" if refused else f"{done}."
    return redirect(visit.url("runs"), text, visit)


async def confirm_all(board: Board, visit: Visit) -> Content:
    """Count the runs that match, before anything is done."""
    query = visit.query.get("q", "")
    tally = await board.operations.count_bulk(query, LIMIT)
    return _page(visit, _asked_verb(visit), query=query, count=tally)


def _asked_verb(visit: Visit) -> Verb:
    verb = VERBS.get(visit.query.get("verb", ""))
    if verb is None or not verb.is_bulk:
        raise InvalidArgument("verb", visit.query.get("verb", ""), "a verb for many runs")
    return verb


async def act_on_all(board: Board, visit: Visit) -> Content | Response:
    """Begin the bulk operation; it continues after the page has been answered."""
    verb, query = VERBS[visit.params["verb"]], visit.value("q")
    try:
        progress = board.operations.bulk(
            query,
            verb.name,
            rate=_rate(visit.value("rate")),
            limit=limit_of(visit.value("limit")),
            by=visit.access.person,
            why=check_why(verb, visit),
        )
        first = await _begin(board, progress)
    except StoreError:
        raise
    except PerdureError as error:
        return _page(visit, verb, query=query, error=str(error))
    if first is None:
        return redirect(visit.url("runs", q=query), "No run matches.", visit)
    return redirect(visit.url("bulk", first.id), "The bulk operation has begun.", visit)


def limit_of(text: str) -> int:
    """Return how many runs may be changed."""
    if text and not text.isdecimal():
        raise InvalidArgument("limit", text, "a number")
    return int(text) if text else LIMIT


def _rate(text: str) -> float | None:
    try:
        return float(text) if text.strip() else None
    except ValueError as error:
        raise InvalidArgument("rate", text, "a number of runs per second") from error


async def _begin(board: Board, progress: AsyncIterator[BulkProgress]) -> BulkProgress | None:
    """Wait for the first report, and let the rest happen in the background.

    If this process ends first, the operation is shown as interrupted and can be resumed.
    """
    first = await anext(progress, None)

    async def drain() -> None:
        async for _ in progress:
            pass

    task: asyncio.Task[object] = asyncio.create_task(drain())
    board.background.add(task)
    task.add_done_callback(board.background.discard)
    return first


def _page(
    visit: Visit,
    verb: Verb,
    *,
    ids: list[str] | None = None,
    query: str = "",
    count: object = None,
    error: str = "",
) -> Content:
    command = shell_command(verb.command, *(ids or ()), where=query)
    context = {
        "section": "runs",
        "verb": verb,
        "ids": ids,
        "query_text": query,
        "count": count,
        "limit": LIMIT,
        "error": error,
        "why": visit.value("why"),
        "command": command,
    }
    data = {"verb": verb.name, "ids": ids, "query": query, "count": count, "error": error}
    return Content("bulk_confirm.html", data, context, 422 if error else 200)


async def show_bulk(board: Board, visit: Visit) -> Content:
    """Show how far a bulk operation is."""
    progress = await board.insights.bulk(visit.params["bulk"])
    if progress is None:
        text = f"There is no bulk operation {visit.params['bulk']!r}."
        return Content("message.html", {"error": text}, {"title": "Not found", "text": text}, 404)
    context = {"section": "runs", "bulk": progress, "verb": VERBS.get(progress.verb)}
    topics = ("bulk",) if progress.state == "running" else ()
    return Content("bulk.html", progress, context, topics=topics)


async def stop_bulk(board: Board, visit: Visit) -> Response:
    """Ask the process that works on a bulk operation to stop."""
    await _check_verb(board, visit)
    await board.operations.stop_bulk(
        visit.params["bulk"], by=visit.access.person, why=visit.value("why")
    )
    return redirect(visit.url("bulk", visit.params["bulk"]), "Stop requested.", visit)


async def resume_bulk(board: Board, visit: Visit) -> Response:
    """Continue a bulk operation that was stopped or interrupted."""
    await _check_verb(board, visit)
    progress = board.operations.resume_bulk(
        visit.params["bulk"], by=visit.access.person, why=visit.value("why")
    )
    await _begin(board, progress)
    return redirect(visit.url("bulk", visit.params["bulk"]), "Resumed.", visit)


async def _check_verb(board: Board, visit: Visit) -> None:
    """Check that the path names the operation's verb, whose right was checked."""
    progress = await board.insights.bulk(visit.params["bulk"])
    if progress is None or progress.verb != visit.params["verb"]:
        raise InvalidArgument("verb", visit.params["verb"], "the verb of the bulk operation")
