"""The warning about calls that a function makes while it is being unwound."""

import logging

from perdure.errors import Cancelled, LeaseLost, Suspended

logger = logging.getLogger(__name__)


def is_unwinding(reason: BaseException | None) -> bool:
    """Return whether a run was stopped for a reason other than its own failure."""
    return isinstance(reason, Suspended | Cancelled | LeaseLost)


def warn_of_late_call(run_id: str, id: str, reason: BaseException | None) -> None:
    """Log that a step or wait was called too late to be recorded."""
    logger.warning(
        "run %r: %r was called while the function is being unwound (%s), for example in a "
        "`finally` block. It can record nothing now, and is called again if the run resumes. Call "
        "it after the wait, not around it (docs/concepts/branches-and-suspension.md)",
        run_id,
        id,
        str(reason) or "the run is being suspended",
    )
