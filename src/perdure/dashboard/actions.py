"""The forms on which an operator confirms an action on a run, a queue and so on."""

from datetime import timedelta
from typing import Any, cast

from starlette.responses import RedirectResponse, Response

from perdure.clock import parse_duration
from perdure.dashboard.board import Board
from perdure.dashboard.rendering import Content, shell_command
from perdure.dashboard.values import to_text
from perdure.dashboard.visit import PREFERENCES_COOKIE, Preferences, Visit
from perdure.errors import InvalidArgument, PerdureError, StoreError
from perdure.insights import DefinitionFacts
from perdure.operations import Preview
from perdure.operations.verbs import VERBS, Verb, read_arguments
from perdure.urls import decode_id

_YEAR = 365 * 24 * 3600
_YOUNGEST = timedelta(minutes=1)
_FROM_LINKS = ("step", "event", "wait", "of", "query")


async def confirm(board: Board, visit: Visit) -> Content:
    """Show what a verb will do, and ask for its arguments and the reason."""
    verb, name = VERBS[visit.params["verb"]], visit.params.get("name", "")
    values = _entered(verb, visit) if visit.form else await _suggested(board, visit, verb)
    step = next((values.get(each.name, "") for each in verb.fields if each.kind == "key"), "")
    preview, refusal = await _preview(board, verb, name, step)
    facts = await board.insights.run(name) if verb.place == "runs" else None
    wait = ("--wait", values["wait"]) if values.get("wait") else ()
    context = {
        "verb": verb,
        "name": name,
        "run": facts and facts.run,
        "asked": facts and verb.answers and facts.question(values.get("wait", "")),
        "definition": await _definition(board, name) if verb.name == "start" else None,
        "values": values,
        "step": step,
        "preview": preview,
        "error": visit.error or refusal,
        "command": shell_command(*verb.command.split(), *filter(None, (name, step)), *wait),
    }
    data = {"name": name, "verb": verb.name, "preview": preview, "error": visit.error}
    return Content("action.html", data, context)


async def act(board: Board, visit: Visit) -> Response:
    """Apply the verb."""
    verb, name = VERBS[visit.params["verb"]], visit.params.get("name")
    arguments = read_arguments(verb.fields, _entered(verb, visit), visit.now)
    why, names = verb.check_why(visit.value("why")), () if name is None else (name,)
    method = getattr(board.operations, verb.name)
    outcome = await method(*names, **arguments, by=visit.access.person, why=why)
    if outcome.run_id:
        return visit.redirect(outcome.sentence, "runs", *(() if verb.to_list else [outcome.run_id]))
    return visit.redirect(outcome.sentence, verb.place, *(() if verb.to_list else names))


def _entered(verb: Verb, visit: Visit) -> dict[str, str]:
    """Return the values of a form; of several fields with one name, the last non-empty one."""
    texts = {name: [*filter(None, texts)][-1:] for name, texts in visit.form.items()}
    entered = {name: "".join(text) for name, text in texts.items()}
    # A form sends the key of a step as it is in URLs.
    keys = {each.name for each in verb.fields if each.kind == "key"} & entered.keys()
    return entered | {name: decode_id(entered[name]) or entered[name] for name in keys}


async def _suggested(board: Board, visit: Visit, verb: Verb) -> dict[str, str]:
    """Return the initial values of the fields, from the link and the current input."""
    values = {name: visit.query[name] for name in _FROM_LINKS if name in visit.query}
    values["at"] = values.get("step", "")
    # The current input is shown as it is: saving a redacted one would destroy it.
    if verb.name == "edit_payload" and visit.may("payloads"):
        revealed = await board.reveal(visit.params["name"], visit.access.person, visit.now)
        values["payload"] = to_text((await revealed.run(visit.params["name"])).payload)
    return values


async def _preview(board: Board, verb: Verb, name: str, step: str) -> tuple[Preview | None, str]:
    """Return what a verb would do to the records of a run, or why it would be refused."""
    if not verb.has_preview or not step:
        return None, ""
    try:
        return await board.operations.preview(name, cast(Any, verb.name), step), ""
    except StoreError:
        raise
    except PerdureError as refused:
        return None, str(refused)


async def _definition(board: Board, name: str) -> DefinitionFacts | None:
    workflow = await board.insights.workflow(name)
    return workflow.definitions[-1] if workflow and workflow.definitions else None


async def prune(board: Board, visit: Visit) -> Response:
    """Delete runs that have been over for a long time."""
    age, why = parse_duration(visit.value("older_than"), "older_than"), visit.value("why")
    if age < _YOUNGEST:
        raise InvalidArgument("older_than", visit.value("older_than"), "a duration such as 30d")
    by, why = visit.access.person, VERBS["delete"].check_why(why)
    count = await board.operations.prune(age, by=by, why=why)
    return visit.redirect(f"Deleted {count:,} runs.", "store")


async def save_preferences(board: Board, visit: Visit) -> Response:
    """Keep the preferences in a cookie."""
    preferences = Preferences.from_fields({name: visit.value(name) for name in visit.form})
    response = RedirectResponse(visit.url("preferences"), 303)
    return visit.set_cookie(response, PREFERENCES_COOKIE, preferences.to_cookie(), _YEAR)
