"""What executes runs: workflows, queues and workers; and what they do next."""

from typing import Any

from starlette.responses import Response

from perdure.dashboard.board import Board
from perdure.dashboard.replies import redirect
from perdure.dashboard.rendering import Content
from perdure.dashboard.verbs import parse_json, quote_term, shell_command
from perdure.dashboard.visit import Visit
from perdure.errors import InvalidArgument, InvalidPayload, PerdureError

AGENDA_HOURS = 24


async def list_workflows(board: Board, visit: Visit) -> Content:
    """Show all workflows that have runs, or that a worker knows."""
    workflows = await board.insights.workflows()
    context = {"section": "workflows", "workflows": workflows}
    return Content("workflows.html", workflows, context, topics=("counts",))


async def show_workflow(board: Board, visit: Visit) -> Content:
    """Show one workflow: its versions, durations and definition."""
    workflow = await board.insights.workflow(visit.params["workflow"])
    if workflow is None:
        return _unknown("workflow", visit.params["workflow"])
    context = {"section": "workflows", "workflow": workflow, "show_source": board.show_source}
    return Content("workflow.html", workflow, context, topics=("counts",))


def _unknown(kind: str, name: str) -> Content:
    text = f"There is no {kind} {name!r}."
    return Content("message.html", {"error": text}, {"title": "Not found", "text": text}, 404)


async def start_form(board: Board, visit: Visit) -> Content:
    """Show the form that starts a run."""
    return await _start_page(board, visit, {}, "")


async def start_run(board: Board, visit: Visit) -> Content | Response:
    """Start a run with the payload of the form."""
    name = visit.params["workflow"]
    try:
        text = visit.value("payload")
        payload = parse_json(text, "payload") if text.strip() else None
        outcome = await board.operations.start(
            name,
            payload,
            run_id=visit.value("run_id") or None,
            tags=_tags(visit.value("tags")),
            by=visit.access.person,
            why=visit.value("why"),
        )
    except InvalidPayload as error:
        return await _start_page(board, visit, visit.form, "\n".join(error.errors))
    except PerdureError as error:
        return await _start_page(board, visit, visit.form, str(error))
    return redirect(visit.url("runs", outcome.run_id), outcome.sentence, visit)


def _tags(text: str) -> dict[str, str] | None:
    """Read `name=value` pairs that are separated by spaces."""
    tags: dict[str, str] = {}
    for word in text.split():
        name, separator, value = word.partition("=")
        if not separator:
            raise InvalidArgument("tags", word, "name=value")
        tags[name] = value
    return tags or None


async def _start_page(board: Board, visit: Visit, form: Any, error: str) -> Content:
    name = visit.params["workflow"]
    workflow = await board.insights.workflow(name)
    definitions = workflow.definitions if workflow else ()
    context = {
        "section": "workflows",
        "name": name,
        "definition": definitions[-1] if definitions else None,
        "form": form,
        "error": error,
        "has_types": board.has_types,
        "command": shell_command("start", name),
    }
    return Content("start.html", (workflow, error), context, 422 if error else 200)


async def list_queues(board: Board, visit: Visit) -> Content:
    """Show the queues that have due or owned runs."""
    queues = await board.insights.queues()
    context = {"section": "queues", "queues": queues}
    return Content("queues.html", queues, context, topics=("counts",))


async def list_workers(board: Board, visit: Visit) -> Content:
    """Show the workers that are live, and those that disappeared within a day."""
    workers = await board.insights.workers()
    context = {"section": "workers", "workers": workers}
    return Content("workers.html", workers, context, topics=("fleet",))


async def show_worker(board: Board, visit: Visit) -> Content:
    """Show one worker and what it is executing."""
    worker = await board.insights.worker(visit.params["worker"])
    if worker is None:
        return _unknown("worker", visit.params["worker"])
    owned = await board.insights.runs(_owned_by(worker.id)) if worker.state == "lost" else None
    flying = sorted(worker.in_flight, key=lambda each: each.since)
    context = {"section": "workers", "worker": worker, "owned": owned, "in_flight": flying}
    return Content("worker.html", (worker, owned), context, topics=("fleet",))


def _owned_by(worker: str) -> str:
    return quote_term("status", "running") + " " + quote_term("owner", worker)


async def show_agenda(board: Board, visit: Visit) -> Content:
    """Show what wakes next, and which events runs wait for."""
    agenda = await board.insights.agenda(AGENDA_HOURS)
    context = {"section": "agenda", "agenda": agenda, "hours": AGENDA_HOURS}
    return Content("agenda.html", agenda, context, topics=("counts",))
