"""The pages on which an operator confirms what will happen to a run, a queue and so on."""

from typing import Any, cast

from starlette.responses import Response

from perdure.dashboard.board import Board
from perdure.dashboard.rendering import Content, page
from perdure.dashboard.values import to_text
from perdure.dashboard.verbs import VERBS, Verb, read_arguments, shell_command
from perdure.dashboard.visit import Visit
from perdure.errors import InvalidArgument, PerdureError, StoreError
from perdure.operations import Preview
from perdure.urls import decode_id

_ANSWERS = ("approve", "reject", "answer")
_PREVIEWED = ("rewind", "retry_step", "complete_step", "skip_step", "fail_step")


async def confirm(board: Board, visit: Visit) -> Content:
    """Show what a verb will do, and ask for its arguments and the reason."""
    verb, name = VERBS[visit.params["verb"]], visit.params["name"]
    entered = {field: texts[-1] for field, texts in visit.form.items()}
    values = entered or await _suggested(board, visit, verb)
    step = values.get("step") or values.get("at") or ""
    # A form sends the key as it is in URLs.
    step = (decode_id(step) if entered else step) or step
    preview, refusal = await _preview(board, verb, name, step)
    facts = await board.insights.run(name) if verb.place == "runs" else None
    wait = ("--wait", values["wait"]) if values.get("wait") else ()
    return page(
        "action.html",
        {"name": name, "verb": verb.name, "preview": preview, "error": visit.error},
        verb=verb,
        name=name,
        run=None if facts is None else facts.run,
        asked=facts.question(values.get("wait", "")) if facts and verb.name in _ANSWERS else None,
        values=values,
        step=step,
        preview=preview,
        error=visit.error or refusal,
        command=shell_command(*verb.command.split(), name, *([step] if step else ()), *wait),
    )


async def act(board: Board, visit: Visit) -> Response:
    """Apply the verb."""
    verb, name = VERBS[visit.params["verb"]], visit.params["name"]
    arguments, why = read_arguments(verb, visit.form), check_why(verb, visit)
    method = getattr(board.operations, verb.name)
    outcome = await method(name, **arguments, by=visit.access.person, why=why)
    target = () if verb.to_list else (outcome.run_id or name,)
    return visit.redirect(outcome.sentence, "runs" if outcome.run_id else verb.place, *target)


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
    values |= {name: visit.query[name] for name in ("event", "wait", "of") if name in visit.query}
    # The current input is shown as it is: saving a redacted one would destroy it.
    if verb.name == "edit_payload" and visit.may("payloads"):
        revealed = await board.reveal(visit.params["name"], visit.access.person, visit.now)
        values["payload"] = to_text((await revealed.run(visit.params["name"])).payload)
    return values


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
