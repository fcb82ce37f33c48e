"""Parts of the sentences that explain the state of a run."""

from perdure.insights.state import RunState
from perdure.insights.words import duration_words

_LONGEST_NAME = 100


def is_due(state: RunState) -> bool:
    """Return whether a worker could continue the run now."""
    return state.row.wake_at is not None and state.row.wake_at <= state.now


def due_for(state: RunState) -> str:
    """Return how long a run has been due, as a sentence."""
    assert state.row.wake_at is not None, "a run that is due has a wake time"
    return f"Due for {duration_words(state.now - state.row.wake_at)}."


def because(reason: str) -> str:
    """Return a reason as the end of a sentence."""
    return f": {quote(reason)}" if reason else ""


def quote(name: str) -> str:
    """Return a name in quotes, shortened if it is long."""
    return f'"{name}"' if len(name) <= _LONGEST_NAME else f'"{name[: _LONGEST_NAME - 1]}…"'
