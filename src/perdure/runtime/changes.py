"""What happens to a run whose workflow function has changed since the run was started."""

import logging
from collections.abc import Mapping
from typing import Any

from perdure.errors import SnapshotMismatch
from perdure.runtime.definition import Definition
from perdure.validation import Reaction

logger = logging.getLogger(__name__)


class ChangeCheck:
    """Compares a run's definition with the registered one."""

    def __init__(self, reaction: Reaction) -> None:
        self._reaction = reaction
        self._logged: set[tuple[str, str, str]] = set()

    def check(
        self, run_id: str, metadata: Mapping[str, Any] | None, definition: Definition[Any, Any]
    ) -> None:
        """Log a change of the function under the same version, or raise `SnapshotMismatch`.

        A warning is logged once per change, because it concerns all runs that were started before.
        """
        now = definition.definition_hash
        previous_hash = (metadata or {}).get("definitionHash")
        if previous_hash is None or previous_hash == now or self._reaction == "ignore":
            return
        if self._reaction == "error":
            hint = "Keep the previous code for it, and register the changed one as a new version"
            raise SnapshotMismatch("definition_hash", f"{_change(run_id, definition)}. {hint}")
        change = (definition.name, previous_hash, now)
        if change not in self._logged:
            self._logged.add(change)
            logger.warning(
                "%s (definition %s, now %s). Recorded steps answer from their records, and the new "
                "code runs from there. That is fine if steps kept their ids and arguments; "
                "otherwise raise version= of the workflow. Logged once for all runs concerned",
                _change(run_id, definition),
                previous_hash,
                now,
            )


def _change(run_id: str, definition: Definition[Any, Any]) -> str:
    return (
        f"the function {definition.__name__!r} of workflow {definition.name!r} has changed since "
        f"run {run_id!r} was started, and its version is still {definition.version}"
    )
