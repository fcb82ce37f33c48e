"""A short diff of two runs of one workflow."""

import re
from collections.abc import Iterator, Sequence
from difflib import unified_diff
from pprint import pformat

from perdure.runtime.run import Run, StepInfo
from perdure.snapshot.asks import NOTIFY

MAX_LINES = 20
_WIDTH = 96
# Calls with the same id are numbered in the order they are made, which may vary between branches.
_ITEM = re.compile(r"(.*)\[.*\](#\d+)*", re.DOTALL)
_NUMBERS = re.compile(r"(#\d+)+$")
# Their records contain times and random names. The runs that they refer to are compared separately.
_OF_OTHERS = ("start", "map")


def difference(clean: Run, survived: Run, *, values: bool) -> str:
    """Return a short diff of the outcomes and histories of two runs; empty if they are equal.

    Without `values` only the shape is compared: statuses, and the steps' keys, kinds and outcomes.
    """
    before, after = (list(_description(run, values)) for run in (clean, survived))
    lines = list(
        unified_diff(before, after, "without a crash", "after the crash", n=1, lineterm="")
    )
    short_lines = [line if len(line) <= _WIDTH else line[: _WIDTH - 1] + "…" for line in lines]
    if len(lines) > MAX_LINES:
        short_lines[MAX_LINES:] = [f"… and {len(lines) - MAX_LINES} more lines"]
    return "\n".join(short_lines)


def _description(run: Run, values: bool) -> Iterator[str]:
    yield f"status: {run.status}"
    if values:
        yield from _format("output", run.output)
        yield from _format("error", run.error)
    # After a crash, a question may be asked again with another token.
    for step in _sort_steps([step for step in run.history if not step.key.startswith(NOTIFY)]):
        name = _NUMBERS.sub("", step.key)
        branch = f" in branch {step.branch}" if step.branch else ""
        yield f"{step.kind} {name}{branch}: {'ok' if step.ok else 'failed'}"
        if values and not step.ok:
            yield from _format("error", step.error)
        elif values and step.kind in _OF_OTHERS:
            yield from _format("run", step.run)
        elif values:
            yield from _format("value", _value(step))


def _sort_steps(history: Sequence[StepInfo]) -> list[StepInfo]:
    """Return the steps in a deterministic order.

    Branches finish in any order, but the steps of one branch do not. The exception are items of a
    map with explicit keys, which are all in the branch of the map.
    """
    places: dict[tuple[str, str], int] = {}
    for place, step in enumerate(history):
        places.setdefault((step.branch, _name_of_map(step)), place)

    def key(step: StepInfo) -> tuple[str, int, str]:
        return step.branch, places[step.branch, _name_of_map(step)], step.key

    return sorted(history, key=key)


def _name_of_map(step: StepInfo) -> str:
    item = _ITEM.fullmatch(step.key)
    return step.key if item is None else item[1]


def _value(step: StepInfo) -> object:
    if step.kind == "approval" and isinstance(step.value, dict):
        # The time of the answer differs.
        return {name: value for name, value in step.value.items() if name != "at"}
    return step.value


def _format(name: str, value: object) -> Iterator[str]:
    """Format a value as lines that are short enough to compare."""
    for line in pformat(value, width=_WIDTH - 20, compact=True, sort_dicts=False).splitlines():
        yield f"    {name}: {line}"
