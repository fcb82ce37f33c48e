"""The output: progress, failures with the command that reproduces them, and the summary."""

from collections.abc import Sequence

import msgspec

from tests.durability.verifier import language as lang
from tests.durability.verifier.checker import Violation
from tests.durability.verifier.log import Line

_MOST_LINES = 60


class Failure(msgspec.Struct, frozen=True):
    """A program that violated a law, reduced as far as possible."""

    store: str
    seed: str
    program: lang.Body
    violations: Sequence[Violation]
    lines: Sequence[Line]
    conditions: str = ""


class Tally(msgspec.Struct):
    """What was done on one store."""

    store: str
    seconds: float = 0
    programs: int = 0
    runs: int = 0
    kills: int = 0
    pauses: int = 0
    drains: int = 0
    cuts: int = 0
    violations: int = 0

    def __str__(self) -> str:
        counts = {
            name: getattr(self, name)
            for name in self.__struct_fields__
            if name not in ("store", "seconds")
        }
        return f"{self.store:>10} {self.seconds:5.0f} s  " + ", ".join(
            f"{count} {name}" for name, count in counts.items()
        )


def describe(failure: Failure) -> str:
    """Return a failure as text: the laws, the program, the log, and how to reproduce it."""
    first = failure.violations[0]
    law = f"{failure.store}, seed {failure.seed}: {first.law}: {first.text}"
    lines = [line for line in failure.lines if line.kind != "ask"]
    left_out = [f"  … {len(lines) - _MOST_LINES} more lines"] if len(lines) > _MOST_LINES else []
    return "\n".join(
        [
            law,
            *(f"  also: {each.law}: {each.text}" for each in failure.violations[1:4]),
            *(f"  shown by: {line}" for line in first.lines),
            f"program ({failure.conditions}):" if failure.conditions else "program:",
            lang.show(failure.program, "  "),
            "log:",
            *(f"  {line}" for line in lines[:_MOST_LINES]),
            *left_out,
            f"repeat: make verify SEED={failure.seed} STORES={failure.store}",
        ]
    )
