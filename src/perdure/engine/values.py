"""Values that belong to a run: its time, random numbers, UUIDs, tags and progress.

Random numbers and UUIDs are hashes of the run's seed and of the place in the function that asks for
them. Nothing is written: a replay asks in the same places and gets the same values.
"""

import hashlib
from collections.abc import Coroutine
from datetime import datetime
from typing import Any
from uuid import UUID

from perdure import codec
from perdure.clock import as_utc, isoformat, parse_iso
from perdure.engine.branches import Leaf
from perdure.engine.execution import Execution
from perdure.engine.patches import is_patched
from perdure.engine.tasks import POSITION
from perdure.errors import InvalidArgument, PerdureError
from perdure.snapshot import rewinds_of
from perdure.snapshot.tags import changed_tags
from perdure.validation import check_text, check_unreserved

_UUID_NAME = "a string, empty for a new UUID at each call"


class RunValues:
    """The part of `Step` that concerns the run as a whole."""

    __slots__ = ("_run",)

    def __init__(self, execution: Execution) -> None:
        self._run = execution

    @property
    def scheduled_for(self) -> datetime | None:
        """The nominal time for which a schedule started the run, or `None`."""
        time = self._run.history.metadata.get("scheduledFor")
        return parse_iso(time) if isinstance(time, str) else None

    def now(self, id: str = "now") -> Coroutine[Any, Any, datetime]:
        """Return the current time in UTC, recorded as a step: a replay returns the same."""
        clock = self._run.clock
        return self._run.perform(self._run.call(id, lambda: as_utc(clock.now())))

    def random(self) -> float:
        """Return a random number in [0, 1), the same on every replay, without a write.

        Each call in each branch returns a different number. For use in the workflow function:
        inside a step's function, use Python's own `random`.
        """
        # The maximum precision of a float in this range, as in `random.random`.
        return (int.from_bytes(self._derive("random")[:8], "big") >> 11) / (1 << 53)

    def uuid(self, name: str = "") -> UUID:
        """Return a random UUID, the same on every replay, without a write.

        Each call in each branch returns a different UUID. With a name, it depends only on the name:
        a branch that asks again gets the same UUID, and calls that are added to the code do not
        change it. For use in the workflow function: inside a step's function, use Python's own
        `uuid4`.
        """
        if name != "":
            name = check_unreserved(check_text(name, "name", _UUID_NAME), "name")
        return UUID(bytes=self._derive("uuid", name)[:16], version=4)

    def _derive(self, method: str, name: str = "") -> bytes:
        run = self._run
        _refuse_in_step(
            f"step.{method}()",
            "There, use Python's own modules random and uuid: the value of a step is recorded. Or "
            f"call step.{method}() in the workflow function and pass the value to the step",
        )
        branch = run.branches.current(run.run_id, f"step.{method}")
        # Counted under a reserved name, which neither a step nor a UUID of the user can have.
        place = name or branch.call(f"~{method}")
        seed = run.history.metadata.get("seed")
        # Other writers of the format draw no seed; their runs have only an id.
        seed = seed if type(seed) is str and seed else run.run_id
        # A rewind raises the generation, but keeps records whose arguments were derived before it.
        generation = run.history.generation - rewinds_of(run.history.metadata)
        return derive(seed, generation, branch.path, method, place)

    def patched(self, id: str, /) -> bool:
        """Return whether this branch runs new code: nothing after this place is recorded yet.

        The answer is stored with the run's next write and stays the same from then on. In a loop,
        include the item in the id: otherwise the first answer applies to all.
        """
        id = check_unreserved(check_text(id, "id", "the patch's name, a non-empty string"), "id")
        _refuse_in_step("step.patched()", "Call it in the workflow function, and pass the answer")
        run = self._run
        run.check_live("step.patched")
        branch = run.branches.current(run.run_id, "step.patched")
        return is_patched(run.history, branch, id)

    def tag(self, **tags: str | None) -> None:
        """Set tags of the run, by which it can be found; `None` removes a tag.

        They are stored with the run's next write. A name that is not an identifier is passed as
        `step.tag(**{"order-id": "7"})`.
        """
        _refuse_in_step(
            "step.tag()",
            "A replay that answers the step from its record would not set the tags: call it in the "
            "workflow function",
        )
        self._run.check_live("step.tag")
        history = self._run.history
        history.set_metadata("tags", changed_tags(history.metadata, tags))

    def report(self, *, progress: float | None = None, note: str = "") -> None:
        """Report the progress of the run: a number from 0 to 1, a note, or both.

        The report replaces the previous one and is stored with the run's next write. From inside a
        step's function, in any thread, it is also written at once to the store's documents, at most
        once a second.
        """
        run = self._run
        report: dict[str, Any] = {"progress": _check_progress(progress), "note": _check_note(note)}
        run.check_live("step.report")
        previous = run.history.metadata.get("report")
        if type(previous) is dict and {**previous, **report} == previous:
            # A replay repeats the reports of the function: keep the time of the first one.
            return
        report["at"] = isoformat(run.clock.now())
        if run.host is not None and isinstance(POSITION.get(), Leaf):
            run.host.report(report)
        else:
            run.history.set_metadata("report", report)


def derive(seed: str, generation: int, branch: str, method: str, place: str) -> bytes:
    """Return 32 bytes that belong to one place in one generation of a run.

    Never change this: an open run would see other values than those it acted on.
    """
    # As JSON, because with any separator, a name that contains the separator could imitate another.
    return hashlib.sha256(codec.dumps([seed, generation, branch, method, place])).digest()


def _check_progress(progress: object) -> float | None:
    if progress is None:
        return None
    expected = "a number from 0 to 1, or None"
    if isinstance(progress, bool) or not isinstance(progress, int | float):
        raise InvalidArgument("progress", progress, expected)
    if not 0 <= progress <= 1:
        raise InvalidArgument("progress", progress, expected)
    return float(progress)


def _check_note(note: object) -> str:
    return "" if note == "" else check_text(note, "note", "a string")


def _refuse_in_step(caller: str, hint: str) -> None:
    position = POSITION.get()
    if isinstance(position, Leaf):
        raise PerdureError(
            f"{caller} was called inside the function of step {position.id!r}. {hint}"
        )
