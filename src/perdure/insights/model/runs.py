"""One run in full, two runs compared, and a run as a file."""

from datetime import datetime
from typing import Literal

import msgspec

from perdure.insights.model.acts import Act
from perdure.insights.model.errors import ErrorFacts
from perdure.insights.model.json import Json
from perdure.insights.model.rows import RunRow, Tally
from perdure.insights.model.steps import InFlight, StepGroup
from perdure.insights.model.waits import MessageFacts, WaitFacts
from perdure.snapshot import RunStatus


class Why(msgspec.Struct, frozen=True):
    """Why a run is where it is, in one or a few sentences.

    `situation` is the name of the rule that matched (`failed`, `paused`, `suspended`, `waiting`,
    `running`, `owner_silent`, `held_back`, `no_worker`, …), `facts` are the values in the sentence.
    """

    situation: str
    sentence: str
    facts: dict[str, Json] = {}


class Fork(msgspec.Struct, frozen=True):
    """The run and the step that a run was forked from."""

    run_id: str
    at: str


class Parent(msgspec.Struct, frozen=True):
    """The run and the step that started a run; without a status if the run was deleted."""

    run_id: str
    call: str
    workflow: str | None = None
    status: RunStatus | None = None


class Children(msgspec.Struct, frozen=True):
    """The children of a run: the newest ones, and how many have each status.

    `counts` covers the newest 200 children; if there are more, the counts are capped. The query
    `parent:<id>` finds all of them.
    """

    runs: tuple[RunRow, ...] = ()
    counts: dict[str, Tally] = {}


class RollbackFacts(msgspec.Struct, frozen=True):
    """How far the steps of a run were undone, since when, and after which error.

    `undone` of the `steps` were undone. `not_undone` maps the key of each step that could not be
    undone to the reason.
    """

    began_at: datetime
    error: str
    steps: int
    undone: int
    not_undone: dict[str, str] = {}


class RunFacts(msgspec.Struct, frozen=True):
    """Everything about a run except its steps, which have their own pages.

    `known_by` are the live workers that can execute the run. `acts` are in order, newest first.
    `schedule` is the name of the schedule that started the run.
    """

    run: RunRow
    why: Why
    payload: Json = None
    output: Json = None
    error: ErrorFacts | None = None
    error_steps: tuple[str, ...] = ()
    waits: tuple[WaitFacts, ...] = ()
    inbox: tuple[MessageFacts, ...] = ()
    inbox_has_more: bool = False
    in_flight: tuple[InFlight, ...] = ()
    acts: tuple[Act, ...] = ()
    act_count: int = 0
    generation: int = 1
    deadline: datetime | None = None
    progress: float | None = None
    note: str = ""
    forked_from: Fork | None = None
    known_by: tuple[str, ...] = ()
    groups: tuple[StepGroup, ...] = ()
    warnings: tuple[str, ...] = ()
    truncated: bool = False
    parent: Parent | None = None
    children: Children = Children()
    schedule: str = ""
    rollback: RollbackFacts | None = None

    def question(self, wait: str = "") -> WaitFacts | None:
        """Return the approval or callback of this name, or the only one without a name."""
        asks = [each for each in self.waits if each.kind in ("approval", "callback")]
        questions = [each for each in asks if wait in ("", each.id)]
        return questions[0] if len(questions) == 1 else None


class Difference(msgspec.Struct, frozen=True):
    """One difference between two runs; `where` is a path in the input or the key of a step."""

    where: str
    left: Json = None
    right: Json = None
    kind: Literal["changed", "only_left", "only_right"] = "changed"


class Comparison(msgspec.Struct, frozen=True):
    """How two runs differ. `first` is the position of the first step that differs."""

    left: RunRow
    right: RunRow
    payload: tuple[Difference, ...]
    steps: tuple[Difference, ...]
    first: str = ""


class BundleMessage(msgspec.Struct, frozen=True):
    """A message in the inbox of an exported run; `id` is its id in the original store."""

    event: str
    payload: Json
    sent_at: str
    id: str


class Bundle(msgspec.Struct, frozen=True):
    """An exported run: its snapshot and inbox, and a checksum of everything else.

    If `redacted`, some values were hidden, and an imported copy contains the mask instead.
    """

    run_id: str
    workflow: str | None
    version: int
    status: RunStatus
    queue: str
    tags: dict[str, str]
    exported_at: str
    redacted: bool
    snapshot: Json
    inbox: tuple[BundleMessage, ...] = ()
    format: Literal["perdure-run-1"] = "perdure-run-1"
    checksum: str = ""
