"""What executes runs: workflows, queues and workers; and what they do next."""

from starlette.responses import Response

from perdure.dashboard.board import Board
from perdure.dashboard.rendering import Content, missing, page
from perdure.dashboard.verbs import parse_json, quote_term, shell_command
from perdure.dashboard.visit import Visit
from perdure.errors import InvalidArgument


async def list_workflows(board: Board, visit: Visit) -> Content:
    """Show all workflows that have runs, or that a worker knows."""
    workflows = await board.insights.workflows()
    return page("workflows.html", workflows, topics=("counts",), workflows=workflows)


async def show_workflow(board: Board, visit: Visit) -> Content:
    """Show one workflow: its versions, durations and definition."""
    workflow = await board.insights.workflow(visit.params["workflow"])
    if workflow is None:
        return missing(f"There is no workflow {visit.params['workflow']!r}.")
    return page("workflow.html", workflow, topics=("counts",), workflow=workflow)


async def start_form(board: Board, visit: Visit) -> Content:
    """Show the form that starts a run."""
    name = visit.params["workflow"]
    workflow = await board.insights.workflow(name)
    definition = workflow.definitions[-1] if workflow and workflow.definitions else None
    data, command = {"workflow": workflow, "error": visit.error}, shell_command("start", name)
    return page("start.html", data, name=name, definition=definition, command=command)


async def start_run(board: Board, visit: Visit) -> Response:
    """Start a run with the payload of the form."""
    text = visit.value("payload")
    outcome = await board.operations.start(
        visit.params["workflow"],
        parse_json(text, "payload") if text.strip() else None,
        run_id=visit.value("run_id") or None,
        tags=_tags(visit.value("tags")),
        by=visit.access.person,
        why=visit.value("why"),
    )
    return visit.redirect(outcome.sentence, "runs", outcome.run_id)


def _tags(text: str) -> dict[str, str] | None:
    """Read `name=value` pairs that are separated by spaces."""
    if any("=" not in word for word in text.split()):
        raise InvalidArgument("tags", text, "name=value, separated by spaces")
    return dict(word.split("=", 1) for word in text.split()) or None


async def list_queues(board: Board, visit: Visit) -> Content:
    """Show the queues that have due or owned runs."""
    queues = await board.insights.queues()
    return page("queues.html", queues, topics=("counts",), queues=queues)


async def list_workers(board: Board, visit: Visit) -> Content:
    """Show the workers that are live, and those that disappeared within a day."""
    workers = await board.insights.workers()
    return page("workers.html", workers, topics=("fleet",), workers=workers)


async def show_worker(board: Board, visit: Visit) -> Content:
    """Show one worker and what it executes; a lost one with the runs that it still owns."""
    worker = await board.insights.worker(visit.params["worker"])
    if worker is None:
        return missing(f"There is no worker {visit.params['worker']!r}.")
    owned = f"status:running {quote_term('owner', worker.id)}"
    runs = await board.insights.runs(owned) if worker.state == "lost" else None
    data = {"worker": worker, "owned": runs}
    return page("worker.html", data, topics=("fleet",), worker=worker, runs=runs)


async def show_agenda(board: Board, visit: Visit) -> Content:
    """Show what wakes next, and which events runs wait for."""
    agenda = await board.insights.agenda(hours=24)
    return page("agenda.html", agenda, topics=("counts",), agenda=agenda)
