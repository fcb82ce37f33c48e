"""Apply one verb to many runs: the selected ones, or all that match a query."""

from typing import Any, cast

from starlette.responses import Response

from perdure.dashboard.board import Board
from perdure.dashboard.rendering import Content, Problem, shell_command
from perdure.dashboard.visit import Visit
from perdure.errors import InvalidArgument, PerdureError, StoreError
from perdure.insights import BulkProgress
from perdure.insights.words import count_words
from perdure.operations.bulk import begin
from perdure.operations.verbs import VERBS, parse_number
from perdure.urls import decode_id

LIMIT = 1000
"""How many runs an operator may change at once; more needs the right `admin`."""


async def confirm(board: Board, visit: Visit) -> Content:
    """Show the runs that were selected, or count those that match, before anything is done."""
    name = visit.params.get("verb") or visit.query.get("verb", "")
    verb = VERBS.get(name)
    if verb is None or not verb.bulk:
        raise InvalidArgument("verb", name, "a verb for many runs")
    ids = _selected(visit) if visit.path.startswith("/bulk/selected") else None
    query = visit.value("q") or visit.query.get("q", "") if ids is None else ""
    count = await board.operations.count_bulk(query, LIMIT) if ids is None else None
    data = {"verb": name, "ids": ids, "query": query, "count": count, "error": visit.error}
    command = shell_command(*verb.command.split(), *(ids or ()), where=query)
    context = {**data, "verb": verb, "query_text": query, "limit": LIMIT, "command": command}
    return Content("bulk_confirm.html", data, context)


def _selected(visit: Visit) -> list[str]:
    asked = visit.form.get("run") or visit.request.query_params.getlist("run")
    return [id for each in asked if (id := decode_id(each))]


async def act_on_selected(board: Board, visit: Visit) -> Response:
    """Apply the verb to each selected run, and list the refusals."""
    verb, ids = VERBS[visit.params["verb"]], _selected(visit)
    why = verb.check_why(visit.value("why"))
    refused: list[str] = []
    for run_id in ids:
        try:
            await getattr(board.operations, verb.name)(run_id, by=visit.access.person, why=why)
        except StoreError:
            raise
        except PerdureError as error:
            refused.append(str(error))
    done = f"{verb.title}: {count_words(len(ids) - len(refused), 'run')} done"
    text = f"{done}, {len(refused)} refused. {' '.join(refused[:3])}" if refused else f"{done}."
    return visit.redirect(text, "runs")


async def act_on_all(board: Board, visit: Visit) -> Response:
    """Begin the bulk operation, which continues after the response."""
    verb, query = VERBS[visit.params["verb"]], visit.value("q")
    rate, limit = visit.value("rate").strip(), visit.value("limit").strip()
    progress = board.operations.bulk(
        query,
        cast(Any, verb.name),
        rate=parse_number(rate, "rate") if rate else None,
        limit=parse_number(limit, "limit") if limit else LIMIT,
        by=visit.access.person,
        why=verb.check_why(visit.value("why")),
    )
    first = await begin(progress)
    if first is None:
        return visit.redirect("No run matches.", "runs", q=query)
    return visit.redirect("The bulk operation has begun.", "bulk", first.id)


async def show(board: Board, visit: Visit) -> Content:
    """Show how far a bulk operation is."""
    bulk = await _read(board, visit)
    topics = (f"bulk:{bulk.id}",) if bulk.state == "running" else ()
    context = {"bulk": bulk, "verb": VERBS.get(bulk.verb)}
    return Content("bulk.html", bulk, context, topics=topics)


async def stop(board: Board, visit: Visit) -> Response:
    """Ask the process that works on a bulk operation to stop."""
    bulk = await _read(board, visit)
    await board.operations.stop_bulk(bulk.id, by=visit.access.person, why=visit.value("why"))
    return visit.redirect("It stops within a second.", "bulk", bulk.id)


async def resume(board: Board, visit: Visit) -> Response:
    """Continue a bulk operation that was stopped or interrupted."""
    bulk = await _read(board, visit)
    by, why = visit.access.person, visit.value("why")
    await begin(board.operations.resume_bulk(bulk.id, by=by, why=why))
    return visit.redirect("Resumed.", "bulk", bulk.id)


async def _read(board: Board, visit: Visit) -> BulkProgress:
    """Return the operation; its verb must be the one in the path, whose right was checked."""
    bulk = await board.insights.bulk(visit.params["bulk"])
    if bulk is None or visit.params.get("verb") not in (None, bulk.verb):
        raise Problem(404, f"There is no bulk operation {visit.params['bulk']!r}.")
    return bulk
