"""A short diff of two runs of one workflow."""

import re
from collections.abc import Iterator
from difflib import unified_diff
from pprint import pformat

from perdure.runtime.run import Run

MAX_LINES = 20
_WIDTH = 96
# Calls with one id are numbered in the order they are made, which may vary between branches.
_NUMBERS = re.compile(r"(#\d+)+$")


def difference(clean: Run, survived: Run, *, values: bool) -> str:
    """Return a short diff of the outcomes and histories of two runs; empty if they are equal.

    Without `values` only the shape is compared: statuses, and the steps' keys, kinds and outcomes.
    """
    before, after = (list(_description(run, values)) for run in (clean, survived))
    lines = list(
        unified_diff(before, after, "without a crash", "after the crash", n=1, lineterm="")
    )
    shown = [line if len(line) <= _WIDTH else line[: _WIDTH - 1] + "…" for line in lines]
    if len(lines) > MAX_LINES:
        shown[MAX_LINES:] = [f"… and {len(lines) - MAX_LINES} more lines"]
    return "\n".join(shown)


def _description(run: Run, values: bool) -> Iterator[str]:
    yield f"status: {run.status}"
    if values:
        yield from _formatted("output", run.output)
        yield from _formatted("error", run.error)
    # Branches finish in any order, but the steps of one branch do not.
    for step in sorted(run.history, key=lambda step: step.branch):
        name = _NUMBERS.sub("", step.key)
        branch = f" in branch {step.branch}" if step.branch else ""
        yield f"{step.kind} {name}{branch}: {'ok' if step.ok else 'failed'}"
        if values:
            yield from _formatted(
                "value" if step.ok else "error", step.value if step.ok else step.error
            )


def _formatted(name: str, value: object) -> Iterator[str]:
    """Format a value in lines that are short enough to compare."""
    for line in pformat(value, width=_WIDTH - 20, compact=True, sort_dicts=False).splitlines():
        yield f"    {name}: {line}"
