"""What executes runs: workflows, queues, schedules and workers; and what they do next."""

from starlette.responses import Response

from perdure.dashboard.board import Board
from perdure.dashboard.rendering import Content, View, missing, page
from perdure.dashboard.verbs import parse_json, shell_command
from perdure.dashboard.visit import Visit
from perdure.errors import InvalidArgument


def listing(place: str, topic: str) -> View:
    """Return the view that shows all that `Insights` knows of one kind."""

    async def show_list(board: Board, visit: Visit) -> Content:
        answer = await getattr(board.insights, place)()
        return page(f"{place}.html", answer, topics=(topic,), **{place: answer})

    return show_list


def showing(what: str, topic: str) -> View:
    """Return the view that shows one workflow, queue, schedule or worker."""

    async def show_one(board: Board, visit: Visit) -> Content:
        if (answer := await getattr(board.insights, what)(visit.params[what])) is None:
            return missing(f"There is no {what} {visit.params[what]!r}.")
        return page(f"{what}.html", answer, topics=(topic,), **{what: answer})

    return show_one


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
    """Show the queues, and the limits of steps."""
    queues, limits = await board.insights.queues(), await board.insights.limits()
    return page("queues.html", (queues, limits), topics=("counts",), queues=queues, limits=limits)


async def list_approvals(board: Board, visit: Visit) -> Content:
    """Show the approvals that runs wait for."""
    to, after = visit.query.get("to") or None, visit.query.get("after") or None
    answer = await board.insights.approvals(to, after=after)
    return page("approvals.html", answer, topics=("counts",), page=answer, to=to or "")
