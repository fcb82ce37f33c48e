"""The steps of a run, recorded or in flight."""

from datetime import datetime, timedelta

import msgspec

from perdure.insights.model.errors import ErrorFacts
from perdure.insights.model.json import Json


class InFlight(msgspec.Struct, frozen=True):
    """A step that a worker is executing, as of the worker's last heartbeat.

    `next_attempt_at` is set while the worker waits for the step's next attempt.
    """

    run_id: str
    workflow: str
    key: str
    since: datetime
    attempt: int = 1
    next_attempt_at: datetime | None = None
    worker: str = ""


class StepRow(msgspec.Struct, frozen=True):
    """One record of a run.

    `error` is the first line of the error; `by` is the operator who entered the record by hand.

    `value` is a preview: JSON text of at most 80 characters. `run_id` is the run that the step
    started or waited for.
    """

    key: str
    name: str
    kind: str
    ok: bool
    branch: str
    started_at: datetime | None
    ended_at: datetime | None
    duration: timedelta | None
    attempts: int
    value: str = ""
    error: str = ""
    by: str = ""
    size: int = 0
    run_id: str = ""


class StepPeriod(msgspec.Struct, frozen=True):
    """How many steps of a run ended in a period, including those that `failed`."""

    begin: datetime
    end: datetime
    count: int
    failed: int = 0


class StepsPage(msgspec.Struct, frozen=True):
    """Records of a run in order; `after` is the key that continues the list.

    `first` is how many of the `total` come before them. If they are not all, `periods` say when the
    steps of the whole run ended; those in which the run was idle are longer than the others.
    """

    steps: tuple[StepRow, ...]
    total: int
    after: str | None = None
    first: int = 0
    periods: tuple[StepPeriod, ...] = ()


class StepGroup(msgspec.Struct, frozen=True):
    """Calls with the same name, folded."""

    name: str
    kind: str
    count: int
    failed: int
    first_started_at: datetime | None
    last_ended_at: datetime | None
    p50: timedelta | None


class StepDetail(msgspec.Struct, frozen=True):
    """One record in full. `position` counts from 1; `later` is how many records come after it.

    `arguments` are the arguments of the call, if the runtime records them.
    """

    step: StepRow
    value: Json = None
    error: ErrorFacts | None = None
    event: str = ""
    position: int = 0
    later: int = 0
    arguments: Json = None
