"""What executes runs: workflows, queues and workers; and what they do next."""

from collections.abc import Awaitable, Callable

from starlette.responses import Response

from perdure.dashboard.board import Board
from perdure.dashboard.rendering import Content, missing, page
from perdure.dashboard.verbs import parse_json, quote_term, shell_command
from perdure.dashboard.visit import Visit
from perdure.errors import InvalidArgument


def list_all(name: str, topic: str) -> Callable[[Board, Visit], Awaitable[Content]]:
    """Return the view of all workflows, queues or workers, or of what is next."""

    async def show(board: Board, visit: Visit) -> Content:
        data = await getattr(board.insights, name)()
        return page(f"{name}.html", data, topics=(topic,), **{name: data})

    return show


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


async def show_worker(board: Board, visit: Visit) -> Content:
    """Show one worker and what it executes; a lost one with the runs that it still owns."""
    worker = await board.insights.worker(visit.params["worker"])
    if worker is None:
        return missing(f"There is no worker {visit.params['worker']!r}.")
    owned = f"status:running {quote_term('owner', worker.id)}"
    runs = await board.insights.runs(owned) if worker.state == "lost" else None
    data = {"worker": worker, "owned": runs}
    return page("worker.html", data, topics=("fleet",), worker=worker, runs=runs)
