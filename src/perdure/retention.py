"""How long finished runs are kept: `Keep(completed="7d", failed="90d", cancelled="30d")`."""

from collections.abc import Mapping
from datetime import timedelta
from typing import Literal, Never, TypeAlias, get_args

from perdure.clock import Duration, parse_duration
from perdure.errors import InvalidArgument, InvalidDuration

FLOOR = timedelta(days=1)
"""No run is removed earlier: another run may still ask for its result, or repeat its start."""

What: TypeAlias = Literal["run", "result"]
Over: TypeAlias = Literal["completed", "failed", "cancelled"]
OVER: tuple[Over, ...] = get_args(Over)


class Keep:
    """How long the finished runs of a workflow are kept, by the status with which they ended.

    `None` means forever. With `what="result"`, the steps of a completed run are dropped when it
    ends: the run keeps its payload and output, so that its id stays taken.
    """

    __slots__ = ("spans", "what")

    def __init__(
        self,
        *,
        completed: Duration | None = None,
        failed: Duration | None = None,
        cancelled: Duration | None = None,
        what: What = "run",
        **unknown: Never,
    ) -> None:
        _check(what, unknown)
        ages = {"completed": completed, "failed": failed, "cancelled": cancelled}
        self.what: What = what
        self.spans: Mapping[Over, timedelta] = {
            status: _span(ages[status], status) for status in OVER if ages[status] is not None
        }

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Keep):
            return NotImplemented
        return (self.spans, self.what) == (other.spans, other.what)

    def __hash__(self) -> int:
        return hash((*self.spans.items(), self.what))

    def __repr__(self) -> str:
        spans = [f"{status}={str(span)!r}" for status, span in self.spans.items()]
        options = [f"what={self.what!r}"] if self.what != "run" else []
        return f"Keep({', '.join([*spans, *options])})"


def check_keep(keep: Keep | Literal["result"] | None) -> Keep | None:
    """Return how long runs are kept; `"result"` stands for `Keep(what="result")`."""
    if keep == "result":
        return Keep(what="result")
    if keep is not None and not isinstance(keep, Keep):
        raise InvalidArgument("keep", keep, "a Keep, such as Keep(completed='7d'), or 'result'")
    return keep


def _check(what: object, unknown: Mapping[str, object]) -> None:
    if unknown:
        hint = "Runs with any other status are not over, and are never removed"
        expected = "the options completed, failed, cancelled and what"
        raise InvalidArgument(", ".join(unknown), dict(unknown), expected, hint)
    if what not in get_args(What):
        raise InvalidArgument("what", what, "'run' or 'result'")


def _span(duration: Duration | None, status: str) -> timedelta:
    span = parse_duration(duration, status)  # type: ignore[arg-type]  # not None, see the caller
    if span < FLOOR:
        hint = "Runs that started it, or that it started, may still ask for it"
        raise InvalidDuration(status, duration, "a duration of one day or more", hint)
    return span
