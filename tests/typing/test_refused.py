"""Type errors that users must see: each line that ends in `# refused`, and no other.

The other files in this directory contain what type checkers must accept; mypy and pyright check
them together with the source.
"""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CASES = sorted((Path(__file__).parent / "refused").glob("*.py"))

Lines = dict[int, str]


def mypy(path: Path) -> Lines:
    """Return mypy's errors by line."""
    command = [sys.executable, "-m", "mypy", "--no-error-summary", "--no-pretty", str(path)]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert not process.stderr, process.stderr
    errors = re.findall(r"^.*?:(\d+): error: (.*)$", process.stdout, re.MULTILINE)
    return {int(line): message for line, message in errors}


def pyright(path: Path) -> Lines:
    """Return pyright's errors by line."""
    command = [sys.executable, "-m", "pyright", "--outputjson", str(path)]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return {
        diagnostic["range"]["start"]["line"] + 1: diagnostic["message"]
        for diagnostic in json.loads(process.stdout)["generalDiagnostics"]
        if diagnostic["severity"] == "error"
    }


@pytest.mark.parametrize("checker", [mypy, pyright])
@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_exactly_the_marked_lines_are_refused(path: Path, checker: Callable[[Path], Lines]) -> None:
    errors = checker(path)
    lines = enumerate(path.read_text().splitlines(), start=1)
    marked = {number for number, line in lines if line.endswith("# refused")}
    accepted = marked - errors.keys()
    unexpected = {line: errors[line] for line in errors.keys() - marked}
    assert not accepted, f"{checker.__name__} accepts lines {sorted(accepted)}"
    assert not unexpected
