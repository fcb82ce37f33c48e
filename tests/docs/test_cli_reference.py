"""docs/reference/cli.md describes the commands that exist."""

import pytest

from perdure.cli.app import COMMANDS
from tests.docs.cli_reference import PAGE, updated

TEXT = PAGE.read_text()


def test_the_reference_is_up_to_date() -> None:
    """If this fails, run `python -m tests.docs.cli_reference`."""
    assert updated(TEXT) == TEXT


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_a_section(name: str) -> None:
    assert f"### `perdure {name}" in TEXT


@pytest.mark.parametrize("code", ["0", "1", "2", "3", "4", "5", "124", "130"])
def test_every_exit_code_is_explained(code: str) -> None:
    assert f"\n| {code} | " in TEXT
