"""Log lines that say which run and step they belong to, with `logging` or structlog.

handler.addFilter(RunFilter(drop_replays=True))
structlog.configure(processors=[RunProcessor(), …])

The workflow function runs again from its first line in each activation, and logs again what it
logged before. `replaying` marks these lines, and `drop_replays` drops them. A step that answers
from its record is not executed and logs nothing.
"""

import logging
from collections.abc import Mapping, MutableMapping
from typing import Any

from perdure.engine.step import current
from perdure.validation import check_flag

__all__ = ["RunFilter", "RunProcessor"]

OUTSIDE: Mapping[str, Any] = {
    "run_id": "",
    "workflow": "",
    "step": "",
    "attempt": 0,
    "replaying": False,
}
"""What a line has that belongs to no run: a format may use all names everywhere."""


class RunFilter(logging.Filter):
    """Adds `run_id`, `workflow`, `step`, `attempt` and `replaying` to log records.

    Outside a run they are empty, and so are `step` and `attempt` outside a step. What a record has
    already is kept. With `drop_replays` the lines that a replay repeats are dropped. It is a filter
    for handlers: one of a logger is not asked for the records of the loggers below it.
    """

    def __init__(self, *, drop_replays: bool = False) -> None:
        super().__init__()
        self._drops = check_flag(drop_replays, "drop_replays")

    def filter(self, record: logging.LogRecord) -> bool:
        """Add the names; return whether the record is to be logged."""
        if not hasattr(record, "replaying"):
            # Not in a second handler, which may be asked in another thread, outside the run.
            for name, value in {**OUTSIDE, **_facts()}.items():
                record.__dict__.setdefault(name, value)
        return not (self._drops and record.__dict__["replaying"])


class RunProcessor:
    """A processor of structlog that adds `run_id`, `workflow`, `step`, `attempt` and `replaying`.

    It adds only what applies: nothing outside a run, and `replaying` only if it is true. What is
    bound already is kept. With `drop_replays` the lines that a replay repeats are dropped.
    """

    def __init__(self, *, drop_replays: bool = False) -> None:
        self._drops = check_flag(drop_replays, "drop_replays")
        # Here, because `RunFilter` needs no structlog.
        from structlog import DropEvent

        self._drop_event = DropEvent

    def __call__(
        self, logger: Any, method_name: str, event_dict: MutableMapping[str, Any]
    ) -> MutableMapping[str, Any]:
        """Add the names, or drop the event."""
        facts = _facts()
        if self._drops and facts.get("replaying"):
            raise self._drop_event
        for name, value in facts.items():
            if value:
                event_dict.setdefault(name, value)
        return event_dict


def _facts() -> dict[str, Any]:
    """Return what is known about the run that the calling code belongs to."""
    step = current()
    if step is None:
        return {}
    executing = step.executing
    return {
        "run_id": step.run_id,
        "workflow": step.workflow,
        "step": executing or "",
        "attempt": step.attempt if executing is not None else 0,
        "replaying": step.replaying,
    }
