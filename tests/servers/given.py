"""A server that the developer already runs, named by an environment variable."""

from dataclasses import dataclass
from typing import NoReturn

import pytest


@dataclass
class GivenServer:
    """A server that is not ours: used, never stopped. A test that would kill it is skipped."""

    name: str
    url: str
    version: str = "given"
    ours: bool = False

    def ensure(self) -> None:
        """Nothing: whoever runs it keeps it alive."""

    def kill(self) -> NoReturn:
        pytest.skip(f"{self.name} at {self.url} is not ours to kill")

    def stop(self) -> NoReturn:
        pytest.skip(f"{self.name} at {self.url} is not ours to stop")

    def restart(self) -> NoReturn:
        pytest.skip(f"{self.name} at {self.url} is not ours to restart")

    def close(self) -> None:
        """Nothing: we did not open it."""
