"""The forms on which operators confirm verbs: for one run, queue and so on, or for many runs."""

from datetime import timedelta
from typing import Any, cast
from urllib.parse import urlencode
from zoneinfo import available_timezones

import msgspec
from starlette.exceptions import HTTPException
from starlette.responses import RedirectResponse, Response

from perdure.clock import parse_duration
from perdure.dashboard.rendering import render
from perdure.dashboard.visit import PREFERENCES_COOKIE, Preferences, Visit
from perdure.errors import InvalidArgument, PerdureError, StoreError
from perdure.insights import BulkProgress
from perdure.insights.words import count_words
from perdure.operations.bulk import begin
from perdure.operations.verbs import VERBS, parse_json, parse_number, read_arguments
from perdure.urls import decode_id

BULK_LIMIT = 1000
"""How many runs an operator may change at once; more needs the right `admin`."""

_YEAR = 365 * 24 * 3600
_MIN_AGE = timedelta(minutes=1)
_LINK_FIELDS = ("step", "event", "wait", "of", "query")


async def confirm(visit: Visit) -> Response:
    """Show what a verb will do, and ask for its arguments and the reason."""
    verb, name, board = visit.verb, visit.params.get("name", ""), visit.board
    values = _form_values(visit) if visit.form else await _initial_values(visit)
    step = next((values.get(each.name, "") for each in verb.fields if each.kind == "key"), "")
    context: dict[str, Any] = {"verb": verb, "name": name, "values": values, "step": step}
    context["facts"] = await board.insights.run(name) if verb.place == "runs" else None
    context["workflow"] = await board.insights.workflow(name) if verb.name == "start" else None
    preview = None
    if verb.has_preview and step:
        preview = await board.operations.preview(name, cast(Any, verb.name), step)
    refusal = {"error": visit.error, "problems": visit.problems}
    data = {"name": name, "verb": verb.name, "preview": preview, **refusal}
    return render(visit, "action.html", data, preview=preview, **context)


def _form_values(visit: Visit) -> dict[str, str]:
    """Return the values of a form; of several fields with one name, the last non-empty one."""
    texts = {name: [*filter(None, texts)][-1:] for name, texts in visit.form.items()}
    values = {name: "".join(text) for name, text in texts.items()}
    # A form sends the key of a step as it is in URLs.
    keys = {each.name for each in visit.verb.fields if each.kind == "key"} & values.keys()
    return values | {name: decode_id(values[name]) or values[name] for name in keys}


async def _initial_values(visit: Visit) -> dict[str, str]:
    """Return the initial values of the fields, from the link and the current input."""
    values = {name: visit.query[name] for name in _LINK_FIELDS if name in visit.query}
    values["at"] = values.get("step", "")
    # The current input is shown as it is: saving a redacted one would destroy it.
    if visit.verb.name == "edit_payload" and visit.may("payloads"):
        run_id = visit.params["name"]
        insights = await visit.board.reveal(run_id, visit.access.person, visit.now)
        payload = msgspec.json.encode((await insights.run(run_id)).payload)
        values["payload"] = msgspec.json.format(payload, indent=2).decode()
    return values


async def act(visit: Visit) -> Response:
    """Apply the verb."""
    verb, name = visit.verb, visit.params.get("name")
    arguments = read_arguments(verb.fields, _form_values(visit), visit.now)
    names = () if name is None else (name,)
    method = getattr(visit.board.operations, verb.name)
    outcome = await method(*names, **arguments, **visit.attribution(verb))
    place, target = ("runs", (outcome.run_id,)) if outcome.run_id else (verb.place, names)
    return visit.redirect(outcome.sentence, place, *(() if verb.to_list else target))


async def count_prunable(visit: Visit) -> int | None:
    """Return how many runs pruning would delete, if requested."""
    age = visit.query.get("older_than")
    if not age or not visit.may("delete"):
        return None
    return await visit.board.operations.prune(age, dry_run=True, by=visit.access.person)


async def prune(visit: Visit) -> Response:
    """Delete runs that have been over for a long time."""
    age = parse_duration(visit.value("older_than"), "older_than")
    if age < _MIN_AGE:
        raise InvalidArgument("older_than", visit.value("older_than"), "a duration such as 30d")
    count = await visit.board.operations.prune(age, **visit.attribution(VERBS["delete"]))
    return visit.redirect(f"Deleted {count_words(count, 'run')}.", "store")


async def show_preferences(visit: Visit) -> Response:
    """Show the form of the preferences, and the keys."""
    zones = sorted(available_timezones())
    return render(visit, "preferences.html", visit.preferences, zones=zones)


async def save_preferences(visit: Visit) -> Response:
    """Keep the preferences in a cookie; invalid ones are ignored when it is read."""
    cookie = urlencode({name: visit.value(name) for name in Preferences.__struct_fields__})
    response = RedirectResponse(visit.url("preferences"), 303)
    return visit.set_cookie(response, PREFERENCES_COOKIE, cookie, _YEAR)


async def confirm_bulk(visit: Visit) -> Response:
    """Show the runs that were selected, or count those that match, before anything is done."""
    name = visit.params.get("verb") or visit.query.get("verb", "")
    verb = VERBS.get(name)
    if verb is None or not verb.bulk:
        raise InvalidArgument("verb", name, "a verb for many runs")
    ids = _selected_ids(visit) if visit.path.startswith("/bulk/selected") else None
    query = visit.value("q") or visit.query.get("q", "") if ids is None else ""
    count = await visit.board.operations.count_bulk(query, BULK_LIMIT) if ids is None else None
    data = {"verb": name, "ids": ids, "query": query, "count": count, "error": visit.error}
    context: dict[str, Any] = {"ids": ids, "query_text": query, "count": count, "limit": BULK_LIMIT}
    return render(visit, "bulk_confirm.html", data, verb=verb, **context)


def _selected_ids(visit: Visit) -> list[str]:
    segments = visit.form.get("run") or visit.request.query_params.getlist("run")
    return [id for segment in segments if (id := decode_id(segment))]


async def act_on_selected(visit: Visit) -> Response:
    """Apply the verb to each selected run, and list the refusals."""
    verb, ids, attribution = visit.verb, _selected_ids(visit), visit.attribution(visit.verb)
    refusals: list[str] = []
    for run_id in ids:
        try:
            await getattr(visit.board.operations, verb.name)(run_id, **attribution)
        except StoreError:
            raise
        except PerdureError as error:
            refusals.append(str(error))
    count = count_words(len(ids) - len(refusals), "run")
    reasons = f", {len(refusals)} refused. {' '.join(refusals[:3])}" if refusals else "."
    return visit.redirect(f"{verb.title}: {count} done{reasons}", "runs")


async def act_on_all(visit: Visit) -> Response:
    """Begin the bulk operation, which continues after the response."""
    verb, query = visit.verb, visit.value("q")
    rate, limit = visit.value("rate").strip(), visit.value("limit").strip()
    progress = visit.board.operations.bulk(
        query,
        cast(Any, verb.name),
        rate=parse_number(rate, "rate") if rate else None,
        limit=parse_number(limit, "limit") if limit else BULK_LIMIT,
        **visit.attribution(verb),
    )
    first = await begin(progress)
    if first is None:
        return visit.redirect("No run matches.", "runs", q=query)
    return visit.redirect("The bulk operation has started.", "bulk", first.id)


async def show_bulk(visit: Visit) -> Response:
    """Show the progress of a bulk operation."""
    bulk = await _read_bulk(visit)
    topics = (f"bulk:{bulk.id}",) if bulk.state == "running" else ()
    return render(visit, "bulk.html", bulk, topics=topics, bulk=bulk, verb=VERBS.get(bulk.verb))


async def stop_bulk(visit: Visit) -> Response:
    """Ask the process that works on a bulk operation to stop."""
    bulk = await _read_bulk(visit)
    await visit.board.operations.stop_bulk(bulk.id, **visit.attribution())
    return visit.redirect("The bulk operation will stop within a second.", "bulk", bulk.id)


async def resume_bulk(visit: Visit) -> Response:
    """Continue a bulk operation that was stopped or interrupted, perhaps at another rate."""
    bulk, rate = await _read_bulk(visit), visit.value("rate").strip()
    pace = parse_json(rate, "rate") if rate else None
    await begin(visit.board.operations.resume_bulk(bulk.id, rate=pace, **visit.attribution()))
    return visit.redirect("The bulk operation has resumed.", "bulk", bulk.id)


async def _read_bulk(visit: Visit) -> BulkProgress:
    """Return the operation; its verb must be the one in the path, whose right was checked."""
    bulk = await visit.board.insights.bulk(visit.params["bulk"])
    if bulk is None or visit.params.get("verb") not in (None, bulk.verb):
        raise HTTPException(404, f"There is no bulk operation {visit.params['bulk']!r}.")
    return bulk
