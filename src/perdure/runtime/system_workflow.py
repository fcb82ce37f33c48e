"""Workflows of the engine itself: every runtime drives their runs, and no list shows them."""

from abc import abstractmethod
from typing import Any

from perdure.durable.host import RunHost
from perdure.runtime.definition import Definition
from perdure.snapshot import ExecutionBlock
from perdure.store import Rest


class SystemWorkflow(Definition[Any, Any]):
    """A workflow whose runs never end: when the function has returned, the next generation waits
    for its time.
    """

    @property
    def identity(self) -> dict[str, Any]:
        """The metadata of a run: without a checksum, since only a version changes its meaning."""
        return {"version": self.version}

    @abstractmethod
    def rest(self, host: RunHost, outcome: Any) -> tuple[ExecutionBlock, Rest]:
        """Return how the next generation is stored, after the function returned `outcome`."""
