"""Errors of operators' actions, of answers from outside, and of schedules."""

from collections.abc import Sequence
from datetime import datetime

from perdure.errors.error import PerdureError
from perdure.errors.values import InvalidArgument


class Refused(PerdureError):
    """An operator's action does not apply to the run in its current state; nothing was changed."""

    def __init__(self, run_id: str, verb: str, reason: str) -> None:
        super().__init__(f"{verb} was refused for run {run_id!r}: {reason}")
        self.run_id = run_id
        self.verb = verb
        self.reason = reason


class AppliedBefore(Refused):
    """An operator's request was already applied to the run."""

    def __init__(self, run_id: str, verb: str) -> None:
        super().__init__(run_id, verb, "this request was already applied")


class InvalidToken(InvalidArgument):
    """A string is not a token of an approval or callback."""

    def __init__(self) -> None:
        # The token is a secret, even if it was damaged in transit.
        PerdureError.__init__(
            self,
            "token: expected the token of an approval or callback, exactly as notify= or start= "
            "received it, or as approvals() returned it",
        )
        self.parameter, self.got, self.expected = "token", None, "the token of a wait"


class AlreadyAnswered(Refused):
    """An approval or callback was already answered: `by` whom and when (`at`)."""

    def __init__(self, run_id: str, by: str = "", at: datetime | None = None) -> None:
        author = f" by {by}" if by else ""
        time = "" if at is None else f" at {at}"
        super().__init__(
            run_id, "answer", f"it was answered{author}{time}; the first answer counts"
        )
        self.by = by
        self.at = at


class TooLate(Refused):
    """An approval or callback is no longer open: it expired, or the run no longer needs it."""

    def __init__(self, run_id: str, reason: str) -> None:
        super().__init__(run_id, "answer", reason)


class ScheduleConflict(PerdureError):
    """A schedule cannot be created: another one has this name, and has these `differences`."""

    def __init__(self, name: str, differences: Sequence[str]) -> None:
        self.name = name
        self.differences = tuple(differences)
        names = ", ".join(self.differences)
        verb = "differs" if len(self.differences) == 1 else "differ"
        super().__init__(
            f"schedule {name!r} already exists, and its {names} {verb} from what was passed; "
            "change it with (await client.get_schedule(name)).update(…), or choose another name"
        )


class ScheduleNotFound(PerdureError):
    """The store has no schedule of this name."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"there is no schedule {name!r} in this store; schedules() returns those that exist"
        )
        self.name = name
