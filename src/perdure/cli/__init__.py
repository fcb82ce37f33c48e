"""The `perdure` command: find runs, see why they do not move, repair them, and run workers.

It uses `Insights` and `Operations`, and needs the extra `cli` (click and rich).
"""

import sys
from io import TextIOWrapper


def main() -> None:
    """Run the command with the arguments of this process."""
    try:
        from perdure.cli.app import root
    except ModuleNotFoundError as error:
        if error.name not in ("click", "rich"):
            raise
        sys.exit(f"{error.name} is not installed; run: pip install 'perdure[cli]'")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            # A terminal that lacks a character shows its code.
            stream.reconfigure(errors="backslashreplace")
    root(prog_name="perdure")
