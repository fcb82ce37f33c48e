"""The progress of a run's rollback."""

from perdure.clock import parse_iso
from perdure.insights.failures import error_of
from perdure.insights.model import RollbackFacts
from perdure.insights.phrases import quote
from perdure.insights.redaction import Redact
from perdure.insights.words import count_words
from perdure.snapshot import Snapshot, is_over, rest_status
from perdure.snapshot.rollback import failures_in, owed_in, rollback_of

_UNKNOWN = "its code no longer has an undo for it"


def rollback_facts(snapshot: Snapshot, redact: Redact) -> RollbackFacts | None:
    """Return how far the rollback of a run is, or `None` if it was not rolled back."""
    mark = rollback_of(snapshot)
    if mark is None:
        return None
    error = error_of(mark["error"], redact, ("output",))
    return RollbackFacts(
        began_at=parse_iso(mark["at"]),
        error="an unknown error" if error is None else error.type,
        steps=mark["steps"],
        undone=max(mark["steps"] - len(owed_in(snapshot["steps"])), 0),
        not_undone={key: redact.text(text) for key, text in _not_undone(snapshot).items()},
    )


def _not_undone(snapshot: Snapshot) -> dict[str, str]:
    """Return why steps were not undone, by key.

    If the run is over, every step that was not undone could not be undone.
    """
    failures = failures_in(snapshot["steps"])
    if not is_over(rest_status(snapshot)):
        return failures
    return {key: failures.get(key, _UNKNOWN) for key in owed_in(snapshot["steps"])}


def describe_rollback(rollback: RollbackFacts) -> str:
    """Return a sentence about a run that is being rolled back."""
    steps = count_words(rollback.steps, "step")
    return f"Rolling back after {rollback.error}: {rollback.undone} of {steps} undone."


def describe_failed_rollback(rollback: RollbackFacts) -> str:
    """Return sentences about a run some of whose steps could not be undone."""
    key, reason = next(iter(rollback.not_undone.items()))
    others = len(rollback.not_undone) - 1
    rest = f", and {count_words(others, 'other step')}" if others else ""
    return (
        f"Rollback failed: step {quote(key)} could not be undone ({reason}){rest}. The run was "
        f"rolled back after {rollback.error}. Retry the run to continue the rollback."
    )


def describe_undone(rollback: RollbackFacts | None) -> str:
    """Return a sentence about the steps that were undone before the run ended, or ""."""
    if rollback is None:
        return ""
    verb = "was" if rollback.undone == 1 else "were"
    return f" {count_words(rollback.undone, 'step')} {verb} undone."
