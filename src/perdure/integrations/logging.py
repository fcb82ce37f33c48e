"""Add the current run and step to log records, with `logging` or structlog.

handler.addFilter(RunFilter(drop_replays=True))
structlog.configure(processors=[RunProcessor(), …])

In each activation, the workflow function runs again from its first line, and repeats what it logged
before. `replaying` marks these lines, and `drop_replays` drops them. A step that is answered from
its record is not executed and logs nothing.
"""

import logging
from collections.abc import Mapping, MutableMapping
from typing import Any

from perdure.engine.current import current
from perdure.validation import check_flag

__all__ = ["RunFilter", "RunProcessor"]

OUTSIDE_VALUES: Mapping[str, Any] = {
    "run_id": "",
    "workflow": "",
    "step": "",
    "attempt": 0,
    "replaying": False,
}
"""The values for records outside a run, so that a format can use all names everywhere."""


class RunFilter(logging.Filter):
    """Adds `run_id`, `workflow`, `step`, `attempt` and `replaying` to log records.

    Outside a run they are empty, and so are `step` and `attempt` outside a step. Existing
    attributes of a record are kept. With `drop_replays`, lines that a replay repeats are dropped.
    Add it to handlers: the filter of a logger does not see the records of its child loggers.
    """

    def __init__(self, *, drop_replays: bool = False) -> None:
        super().__init__()
        self._drops = check_flag(drop_replays, "drop_replays")

    def filter(self, record: logging.LogRecord) -> bool:
        """Add the attributes; return whether to log the record."""
        if not hasattr(record, "replaying"):
            # Only once: a second handler may run in another thread, outside the run.
            for name, value in {**OUTSIDE_VALUES, **_facts()}.items():
                record.__dict__.setdefault(name, value)
        return not (self._drops and record.__dict__["replaying"])


class RunProcessor:
    """A processor of structlog that adds `run_id`, `workflow`, `step`, `attempt` and `replaying`.

    It adds only what applies: nothing outside a run, and `replaying` only if it is true. Bound
    values are kept. With `drop_replays`, lines that a replay repeats are dropped.
    """

    def __init__(self, *, drop_replays: bool = False) -> None:
        self._drops = check_flag(drop_replays, "drop_replays")
        # Imported here, because `RunFilter` does not need structlog.
        from structlog import DropEvent

        self._drop_event = DropEvent

    def __call__(
        self, logger: Any, method_name: str, event_dict: MutableMapping[str, Any]
    ) -> MutableMapping[str, Any]:
        """Add the values, or drop the event."""
        facts = _facts()
        if self._drops and facts.get("replaying"):
            raise self._drop_event
        for name, value in facts.items():
            if value:
                event_dict.setdefault(name, value)
        return event_dict


def _facts() -> dict[str, Any]:
    """Return the attributes of the run that the calling code belongs to."""
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
