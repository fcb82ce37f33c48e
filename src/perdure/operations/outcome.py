"""The outcomes of operators' actions, in words and as data."""

from enum import Enum
from typing import Final, Literal

import msgspec

from perdure.runtime.edits import RunEdit
from perdure.runtime.requests import Request
from perdure.snapshot import RunStatus, is_over


class Keep(Enum):
    """The type of `KEEP`."""

    KEEP = "keep"


KEEP: Final = Keep.KEEP
"""An argument that means: as in the original."""


class Outcome(msgspec.Struct, frozen=True):
    """The outcome of a verb.

    `requested` means that another process owns the run and will apply the verb after its current
    step. `sentence` describes the outcome. `kept` counts the records that stay, `dropped` names the
    others.
    """

    run_id: str
    verb: str
    state: Literal["done", "requested"]
    status: RunStatus | None
    sentence: str
    kept: int = 0
    dropped: tuple[str, ...] = ()


class Preview(msgspec.Struct, frozen=True):
    """What a verb would do: which records stay or are dropped, and which steps run again."""

    kept: tuple[str, ...]
    dropped: tuple[str, ...]
    runs_again: tuple[str, ...]
    sentence: str


_DONE = {
    "cancel": "Cancelled.",
    "pause": "Paused. Nothing happens until it is resumed.",
    "unpause": "Resumed. A worker will continue the run.",
    "retry": "A worker will run the failed steps again.",
    "wake": "Woken. A worker will continue the run.",
    "signal": "Event {step!r} delivered.",
    "complete_step": "Step {step!r} completed by hand.",
    "skip_step": "Step {step!r} skipped: it returns null.",
    "fail_step": "Step {step!r} failed by hand.",
    "retry_step": "A worker will run step {step!r} again.",
    "rewind": "Rewound to {step!r}. A worker will continue the run there.",
    "edit_payload": "Payload replaced.",
}

_WAITING = {"signal", "complete_step", "skip_step", "fail_step", "retry_step", "rewind", "wake"}
"""The verbs after which a run continues unless it is paused."""

_BY_HAND = {"complete_step", "skip_step", "fail_step"}


def compare(run: RunEdit, before: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return which of a run's earlier records are kept, and which are dropped."""
    after = set(run.history)
    kept = tuple(key for key in before if key in after and key != run.entered_key)
    return kept, tuple(key for key in before if key not in after)


def describe(request: Request, run: RunEdit, before: tuple[str, ...]) -> Outcome:
    """Describe the outcome of a verb that was applied to a run with these records."""
    kept_keys, dropped_keys = compare(run, before)
    return Outcome(
        run.run_id,
        request.verb,
        "done",
        run.written_status,
        _sentence(request, run, before, len(kept_keys), dropped_keys),
        len(kept_keys),
        dropped_keys,
    )


def _sentence(
    request: Request, run: RunEdit, before: tuple[str, ...], kept: int, dropped: tuple[str, ...]
) -> str:
    parts = [_DONE[request.verb].format(step=request.step)]
    if request.verb in _BY_HAND and request.step not in before:
        # Perhaps a typing error.
        parts.append("It had no record, so this is used when the run calls it.")
    if run.history.rollback is not None and not is_over(run.written_status):
        parts = [_undoing(request, len(run.history.steps_to_undo()))]
    if dropped:
        parts.append(f"{records(kept)} kept, {len(dropped)} dropped.")
    if run.status == "paused" and request.verb in _WAITING:
        parts.append("The run is still paused.")
    elif request.verb in _BY_HAND:
        parts.append("A worker will continue the run.")
    return " ".join(parts)


def _undoing(request: Request, owed: int) -> str:
    if request.verb != "cancel":
        return "A worker will continue the rollback."
    return f"Cancelled. A worker will undo {'1 step' if owed == 1 else f'{owed:,} steps'} first."


def requested(request: Request, run_id: str, owner: str) -> Outcome:
    """Return the outcome of a verb that was sent to the owner of a run."""
    # Only cancelling interrupts a step.
    when = "within seconds" if request.verb == "cancel" else "after the current step"
    sentence = f"Requested. {owner} will apply it {when}."
    return Outcome(run_id, request.verb, "requested", "running", sentence)


def records(number: int) -> str:
    """Return "1 record" or "n records"."""
    return "1 record" if number == 1 else f"{number:,} records"
