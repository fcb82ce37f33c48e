"""Type errors that users must see: each line that ends in `# refused`, and no other.

The other files in this directory contain what type checkers must accept; mypy and pyright check
them together with the source.
"""

import json
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CASES = sorted((Path(__file__).parent / "refused").glob("*.py"))

Errors = dict[Path, dict[int, str]]


@cache
def mypy() -> Errors:
    """Return mypy's errors by file and line."""
    command = [sys.executable, "-m", "mypy", "--no-error-summary", "--no-pretty", *map(str, CASES)]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert not process.stderr, process.stderr
    errors: Errors = defaultdict(dict)
    for found in re.finditer(r"^(.*?):(\d+): error: (.*)$", process.stdout, re.MULTILINE):
        path, line, message = found.groups()
        errors[ROOT / path][int(line)] = message
    return errors


@cache
def pyright() -> Errors:
    """Return pyright's errors by file and line."""
    command = [sys.executable, "-m", "pyright", "--outputjson", *map(str, CASES)]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    errors: Errors = defaultdict(dict)
    for diagnostic in json.loads(process.stdout)["generalDiagnostics"]:
        if diagnostic["severity"] == "error":
            line = diagnostic["range"]["start"]["line"] + 1
            errors[Path(diagnostic["file"])][line] = diagnostic["message"]
    return errors


@pytest.mark.parametrize("checker", [mypy, pyright])
@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_exactly_the_marked_lines_are_refused(path: Path, checker: Callable[[], Errors]) -> None:
    errors = checker().get(path, {})
    lines = enumerate(path.read_text().splitlines(), start=1)
    marked = {number for number, line in lines if line.endswith("# refused")}
    accepted = marked - errors.keys()
    unexpected = {line: errors[line] for line in errors.keys() - marked}
    assert not accepted, f"{checker.__name__} accepts lines {sorted(accepted)}"
    assert not unexpected
