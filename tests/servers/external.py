"""A server that the developer already runs, named by an environment variable."""

from dataclasses import dataclass
from typing import NoReturn

import pytest


@dataclass
class ExternalServer:
    """A server that is used but never stopped. A test that would kill it is skipped."""

    name: str
    url: str
    version: str = "external"
    ours: bool = False

    def ensure(self) -> None:
        """Do nothing: the developer keeps it running."""

    def kill(self) -> NoReturn:
        pytest.skip(f"{self.name} at {self.url} is not ours to kill")

    def stop(self) -> NoReturn:
        pytest.skip(f"{self.name} at {self.url} is not ours to stop")

    def restart(self) -> NoReturn:
        pytest.skip(f"{self.name} at {self.url} is not ours to restart")

    def close(self) -> None:
        """Do nothing: the server is not ours."""
