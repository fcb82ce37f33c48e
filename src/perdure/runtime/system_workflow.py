"""The engine's own workflows: every runtime executes their runs, and no list shows them."""

from abc import abstractmethod
from typing import Any

from perdure.durable.host import RunHost
from perdure.runtime.definition import Definition
from perdure.snapshot import ExecutionBlock
from perdure.store import Rest


class SystemWorkflow(Definition[Any, Any]):
    """A workflow whose runs never end.

    When the function has returned, the next generation waits for its time.
    """

    @property
    def identity(self) -> dict[str, Any]:
        """The metadata of a run, without a checksum, since only a version changes the meaning."""
        return {"version": self.version}

    @abstractmethod
    def rest(self, host: RunHost, outcome: Any) -> tuple[ExecutionBlock, Rest]:
        """Return the block and the rest of the next generation, given the function's outcome."""
