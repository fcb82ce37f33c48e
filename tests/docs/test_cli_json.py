"""The JSON of the commands is exactly what docs/reference/cli-json.md says."""

import pytest

from tests.docs.cli_json import EXAMPLE, PAGE, updated

SHOWN: list[tuple[str, str]] = EXAMPLE.findall(PAGE.read_text())


@pytest.fixture(scope="module")
def printed() -> dict[str, str]:
    """Return what each command prints; they are called one after the other on one store."""
    return dict(EXAMPLE.findall(updated(PAGE.read_text())))


@pytest.mark.parametrize(("command", "text"), SHOWN, ids=[command for command, _ in SHOWN])
def test_a_command_prints_what_the_page_shows(
    command: str, text: str, printed: dict[str, str]
) -> None:
    """If a change is intended, run `python -m tests.docs.cli_json`."""
    assert printed[command] == text
