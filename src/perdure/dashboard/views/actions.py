"""The pages on which an operator confirms what will happen to a run, a workflow or a worker."""

from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from perdure.dashboard.board import Board
from perdure.dashboard.replies import redirect
from perdure.dashboard.rendering import Content
from perdure.dashboard.values import to_text
from perdure.dashboard.verbs import VERBS, Verb, read_arguments, shell_command
from perdure.dashboard.visit import Visit
from perdure.errors import InvalidArgument, PerdureError, RunNotFound, StoreError

_CHANGES_HISTORY = ("rewind", "retry_step", "complete_step", "skip_step", "fail_step", "fork")


async def confirm(board: Board, visit: Visit) -> Content:
    """Show what a verb will do to a run, and ask for its arguments and the reason."""
    verb = VERBS[visit.params["verb"]]
    return await _page(board, visit, verb, await _suggested(board, visit, verb), "")


async def act(board: Board, visit: Visit) -> Content | Response:
    """Do it; a refusal shows the form again, with the reason."""
    verb, run_id = VERBS[visit.params["verb"]], visit.params["run"]
    try:
        arguments = read_arguments(verb, visit.form)
        why = check_why(verb, visit)
        method = getattr(board.operations, verb.name)
        outcome = await method(run_id, **arguments, by=visit.access.person, why=why)
    except (StoreError, RunNotFound):
        raise
    except PerdureError as error:
        values = {name: texts[-1] for name, texts in visit.form.items()}
        return await _page(board, visit, verb, values, str(error))
    url = visit.url("runs") if verb.name == "delete" else visit.url("runs", outcome.run_id)
    return redirect(url, outcome.sentence, visit)


def check_why(verb: Verb, visit: Visit) -> str:
    """Return the reason; verbs that change or delete history need one."""
    why = visit.value("why").strip()
    if verb.needs_why and not why:
        raise InvalidArgument("why", "", "a reason", "It is recorded with your name")
    return why


async def _suggested(board: Board, visit: Visit, verb: Verb) -> dict[str, str]:
    """Return what the fields begin with: what the link said, and the current input."""
    step = visit.query.get("step", "")
    values = {"step": step, "at": step}
    values |= {name: visit.query[name] for name in ("event", "wait") if name in visit.query}
    # The current input is shown as it is: saving a redacted one would destroy it.
    if verb.name == "edit_payload" and visit.may("payloads"):
        facts = await board.revealed.run(visit.params["run"])
        values["payload"] = to_text(facts.payload)
    return values


async def _page(
    board: Board, visit: Visit, verb: Verb, values: Mapping[str, str], error: str
) -> Content:
    run_id = visit.params["run"]
    facts = await board.insights.run(run_id)
    step = values.get("step") or values.get("at") or ""
    preview, refusal = None, ""
    if verb.name in _CHANGES_HISTORY and step:
        try:
            preview = await board.operations.preview(run_id, verb.name, step)
        except StoreError:
            raise
        except PerdureError as refused:
            refusal = str(refused)
    context = {
        "section": "runs",
        "verb": verb,
        "run": facts.run,
        "facts": facts,
        "values": values,
        "step": step,
        "preview": preview,
        "error": error or refusal,
        "has_types": board.has_types,
        "why": values.get("why", ""),
        "command": shell_command(verb.command, run_id, *([step] if step else ())),
    }
    data: Any = {"run": facts.run, "verb": verb.name, "preview": preview, "error": error}
    return Content("action.html", data, context, 422 if error else 200)


SWITCHES: Mapping[str, tuple[str, str, str]] = {
    "pause_workflow": (
        "workflows",
        "Pause workflow",
        "No worker claims runs of this workflow. Runs that are executing continue.",
    ),
    "unpause_workflow": ("workflows", "Resume workflow", "Workers claim runs of it again."),
    "drain_worker": (
        "workers",
        "Drain worker",
        "The worker claims nothing more, finishes what it executes, and stops.",
    ),
}


async def confirm_switch(board: Board, visit: Visit) -> Content:
    """Show what a switch does."""
    place, title, text = SWITCHES[visit.params["switch"]]
    context = {
        "section": place,
        "title": title,
        "text": text,
        "name": visit.params["name"],
        "place": place,
    }
    return Content("switch.html", context, context)


async def switch(board: Board, visit: Visit) -> Response:
    """Pause or resume a workflow, or drain a worker."""
    place, _, _ = SWITCHES[visit.params["switch"]]
    method = getattr(board.operations, visit.params["switch"])
    name = visit.params["name"]
    outcome = await method(name, by=visit.access.person, why=visit.value("why"))
    return redirect(visit.url(place, name), outcome.sentence, visit)
