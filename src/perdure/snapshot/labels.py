"""Readable names for the records that the engine creates itself."""

from perdure.snapshot.asks import APPROVE, NOTIFY
from perdure.snapshot.rollback import SAGA, UNDO

SIGNAL = "~signal:"
"""The prefix of the keys of events that an operator sent."""

_LABELS = {
    UNDO: "undo of",
    SAGA: "saga",
    SIGNAL: "signal",
    f"{APPROVE}:": "approval of",
}


def label_of(key: str) -> str:
    """Return a readable name for a record if its own name is the engine's."""
    if key.startswith(NOTIFY):
        # The prefix is followed by the numbers of the question and of the reminder.
        return f"notification of {label_of(key.partition(':')[2])}"
    for prefix, label in _LABELS.items():
        if key.startswith(prefix):
            return f"{label} {label_of(key.removeprefix(prefix))}"
    return key
