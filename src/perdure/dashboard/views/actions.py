"""The pages on which an operator confirms what will happen to a run, a workflow or a worker."""

from collections.abc import Mapping
from typing import Any, cast

from starlette.responses import Response

from perdure.dashboard.board import Board
from perdure.dashboard.rendering import Content, page
from perdure.dashboard.replies import redirect
from perdure.dashboard.values import to_text
from perdure.dashboard.verbs import VERBS, Verb, read_arguments, shell_command
from perdure.dashboard.visit import Visit
from perdure.errors import InvalidArgument, PerdureError, RunNotFound, StoreError
from perdure.operations import Preview

_PREVIEWED = ("rewind", "retry_step", "complete_step", "skip_step", "fail_step")


async def confirm(board: Board, visit: Visit) -> Content:
    """Show what a verb will do, and ask for its arguments and the reason."""
    verb = VERBS[visit.params["verb"]]
    return await _form(board, visit, verb, await _suggested(board, visit, verb), "")


async def act(board: Board, visit: Visit) -> Content | Response:
    """Do it; a refusal shows the form again, with the reason."""
    verb, name = VERBS[visit.params["verb"]], visit.params["name"]
    try:
        arguments, why = read_arguments(verb, visit.form), check_why(verb, visit)
        method = getattr(board.operations, verb.name)
        outcome = await method(name, **arguments, by=visit.access.person, why=why)
    except (StoreError, RunNotFound):
        raise
    except PerdureError as error:
        values = {field: texts[-1] for field, texts in visit.form.items()}
        return await _form(board, visit, verb, values, str(error))
    if verb.name == "delete":
        return redirect(visit.url("runs"), outcome.sentence, visit)
    return redirect(visit.url(verb.place, outcome.run_id or name), outcome.sentence, visit)


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
        revealed = await board.reveal(visit.params["name"], visit.access.person, visit.now)
        values["payload"] = to_text((await revealed.run(visit.params["name"])).payload)
    return values


async def _form(
    board: Board, visit: Visit, verb: Verb, values: Mapping[str, str], error: str
) -> Content:
    name, step = visit.params["name"], values.get("step") or values.get("at") or ""
    preview, refusal = await _preview(board, verb, name, step)
    run = (await board.insights.run(name)).run if verb.place == "runs" else None
    return page(
        "action.html",
        {"name": name, "verb": verb.name, "preview": preview, "error": error},
        422 if error else 200,
        verb=verb,
        name=name,
        run=run,
        values=values,
        step=step,
        preview=preview,
        error=error or refusal,
        command=shell_command(verb.command, name, *([step] if step else ())),
    )


async def _preview(board: Board, verb: Verb, name: str, step: str) -> tuple[Preview | None, str]:
    """Return what a verb would do to the records of a run, or why it would be refused."""
    if verb.name not in _PREVIEWED or not step:
        return None, ""
    try:
        return await board.operations.preview(name, cast(Any, verb.name), step), ""
    except StoreError:
        raise
    except PerdureError as refused:
        return None, str(refused)
