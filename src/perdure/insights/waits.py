"""Rules for `why`: what a run waits for."""

import difflib
from collections.abc import Sequence
from datetime import datetime

from perdure.insights.family import fan_out
from perdure.insights.model import Why
from perdure.insights.phrases import quote
from perdure.insights.rows import read_time
from perdure.insights.state import RunState
from perdure.insights.words import count_words, duration_words, list_words, time_words
from perdure.snapshot import PendingWait, open_waits
from perdure.snapshot.asks import is_ask
from perdure.snapshot.labels import label_of


def for_runs(state: RunState) -> Why | None:
    """Match if the run waits for runs that it started with `step.map_runs`."""
    for wait in event_waits(state):
        many, ended = fan_out(state.snapshot, wait), state.dependencies.ended
        if many is not None:
            number = 0 if ended is None else ended.count
            least = "at least " if ended is not None and ended.capped else ""
            runs = f"the {many.total:,} runs that {quote(wait['id'])} started"
            sentence = f"Waiting for {runs}, of which {least}{number:,} have ended."
            return Why("waiting", sentence, {"total": many.total, "ended": number})
    return None


def event_waits(state: RunState) -> list[PendingWait]:
    """Return the events that a run waits for, if nothing wakes it earlier."""
    waits = open_waits(state.snapshot)
    if state.row.status == "suspended" and not all("event" in wait for wait in waits):
        return []
    is_waiting = state.row.status in ("waiting", "suspended")
    return [wait for wait in waits if "event" in wait] if is_waiting else []


def timeout_words(state: RunState, waits: Sequence[PendingWait]) -> str:
    """Return when the waits time out, as the end of a sentence."""
    ends = [at for wait in waits if (at := read_time(wait.get("wakeAt"))) is not None]
    return f"; times out in {duration_words(min(ends) - state.now)}" if ends else ""


def for_answer(state: RunState) -> Why | None:
    """Match if the run waits for an approval or a callback."""
    asks = [wait for wait in event_waits(state) if is_ask(wait)]
    if not asks:
        return None
    wait = asks[0]
    others = f" One of {len(asks)} open questions." if len(asks) > 1 else ""
    ends = read_time(wait.get("expiresAt"))
    expiry = "" if ends is None else f"; expires in {duration_words(ends - state.now)}"
    expiry = f" for {duration_words(state.now - _began_at(state, [wait]))}{expiry}"
    facts = {"wait": wait["id"], "to": wait.get("to", "")}
    if wait.get("ask") == "callback":
        sentence = f"Waiting for the callback {quote(wait['id'])}{expiry}."
    else:
        question = quote(state.redact.text(wait.get("question", "")))
        sentence = f"Waiting for {wait.get('to') or 'someone'} to answer {question}{expiry}."
    return Why("waiting", f"{sentence}{others}", facts)


def for_event(state: RunState) -> Why | None:
    """Match if the run waits for other events."""
    waits = [wait for wait in open_waits(state.snapshot) if "event" in wait]
    if state.row.status not in ("waiting", "suspended") or not waits:
        return None
    if state.row.status == "suspended" and _earliest(state) is not None:
        return None
    names = list(dict.fromkeys(wait["event"] for wait in waits if "event" in wait))
    since = duration_words(state.now - _began_at(state, waits))
    event = "event" if len(names) == 1 else "events"
    sentence = f"Waiting for {event} {list_words([*map(quote, names)][:5])} for {since}"
    sentence += timeout_words(state, waits)
    return Why("waiting", f"{sentence}.{_inbox_hint(state, names)}", {"events": names})


def _inbox_hint(state: RunState, awaited_names: Sequence[str]) -> str:
    """Return a sentence about messages whose names are similar to what the run waits for."""
    names = [message.name for message in state.inbox if not message.name.startswith("~")]
    for name in dict.fromkeys(names):
        if name not in awaited_names and difflib.get_close_matches(
            name.lower(), _lower(awaited_names), 1
        ):
            number = names.count(name)
            count = "one message" if number == 1 else f"{number} messages"
            return f" The inbox holds {count} named {quote(name)}."
    return ""


def _lower(names: Sequence[str]) -> list[str]:
    return [name.lower() for name in names]


def for_time(state: RunState) -> Why | None:
    """Match if the run sleeps, or waits for the next attempt of a step."""
    wait = _earliest(state)
    if state.row.status != "suspended" or wait is None:
        return None
    at = read_time(wait.get("wakeAt"))
    assert at is not None, "the earliest wait has a time"
    time_left = duration_words(at - state.now)
    facts = {"wait": wait["id"], "wake_at": at}
    if wait["kind"] != "retry":
        until = time_words(at, state.now)
        sentence = f"Suspended by {quote(wait['id'])} until {until}, in {time_left}."
        return Why("suspended", sentence, facts)
    attempts = count_words(wait.get("attempt", 1), "attempt")
    failure_text = f"Step {quote(label_of(wait['id']))} failed {attempts}"
    error = state.redact.text(wait.get("error", "")).partition("\n")[0]
    because = f" ({error})" if error else ""
    return Why("suspended", f"{failure_text}{because}; the next one starts in {time_left}.", facts)


def _earliest(state: RunState) -> PendingWait | None:
    timed_waits = [wait for wait in open_waits(state.snapshot) if "wakeAt" in wait]
    return min(timed_waits, key=lambda wait: wait.get("wakeAt", ""), default=None)


def _began_at(state: RunState, waits: Sequence[PendingWait]) -> datetime:
    """Return when the first of the waits began, or when the run was stored if that is unknown."""
    times = [at for wait in waits if (at := read_time(wait.get("since"))) is not None]
    stored_at = read_time(state.snapshot["execution"]["lastUpdated"]) or state.row.updated_at
    return min(times, default=stored_at)
