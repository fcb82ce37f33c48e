"""Resume states: the results of a run's finished steps, collected from events."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeGuard, overload

from perdure.clock import isoformat
from perdure.errors import InvalidArgument, StateFormatError
from perdure.events import StepCacheHit, StepComplete
from perdure.result import Result
from perdure.snapshot import Origin


@dataclass(frozen=True, slots=True)
class ResumeEntry:
    """The result of one step.

    `origin` is "result" if a failure was returned as `Err`, and "throw" if it was raised. `facts`
    are the other fields of the step's record; if they include `typed`, the value is rebuilt from
    data by the step's return type. `serialized_cause` is a failure's cause as it was recorded; its
    class is restored from it where it is declared.
    """

    result: Result[Any, Any]
    origin: Origin | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    serialized_cause: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class ResumeState:
    """The finished steps of a run by key, in the order in which they were recorded.

    A run that resumes from it does not run these steps again, not even failed ones. To retry failed
    steps, leave them out:

        ResumeState({key: entry for key, entry in state.steps.items() if entry.result.ok})
    """

    steps: Mapping[str, ResumeEntry] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.steps, Mapping):
            raise InvalidArgument("steps", self.steps, "a dict of ResumeEntry by step key")
        for key, entry in self.steps.items():
            if not isinstance(key, str) or not isinstance(entry, ResumeEntry):
                raise InvalidArgument(f"steps[{key!r}]", entry, "a ResumeEntry under a string key")
        object.__setattr__(self, "steps", dict(self.steps))


class ResumeStateCollector:
    """Collects a resume state from the events of a run.

    Replayed steps are collected too, so the state of a resumed run contains the earlier steps.

        collector = ResumeStateCollector()
        workflow = Workflow("checkout", deps, on_event=collector.handle_event)
    """

    def __init__(self) -> None:
        self._steps: dict[str, ResumeEntry] = {}

    def handle_event(self, event: object) -> None:
        """Collect the result of a finished step; ignore other events."""
        if isinstance(event, StepComplete | StepCacheHit):
            facts = {"at": isoformat(event.at), **event.facts}
            self._steps[event.key] = ResumeEntry(event.result, event.origin, facts)

    def resume_state(self) -> ResumeState:
        """Return the steps collected so far; later events do not change the state."""
        return ResumeState(self._steps)

    def clear(self) -> None:
        """Forget the collected steps; states that were returned do not change."""
        self._steps.clear()


@overload
def is_step_complete(state: ResumeState | None, key: str, /) -> bool: ...
@overload
def is_step_complete(event: object, /) -> TypeGuard[StepComplete]: ...
def is_step_complete(subject: object, key: str | None = None, /) -> bool:
    """Return whether a state contains a step, or whether an event marks the end of a step.

    is_step_complete(state, "user:123")
    is_step_complete(event)
    """
    if key is None:
        return isinstance(subject, StepComplete)
    if not isinstance(key, str):
        raise InvalidArgument("key", key, "the key of a step")
    state = as_resume_state(subject, "state")
    return state is not None and key in state.steps


def as_resume_state(value: object, parameter: str = "resume_state") -> ResumeState | None:
    """Return the state or `None`; raise `StateFormatError` with a hint for anything else."""
    if value is None or isinstance(value, ResumeState):
        return value
    if isinstance(value, Mapping) and "formatVersion" in value:
        kind, hint = "a snapshot", "pass it as snapshot=, or convert it with state_of(snapshot)"
    elif isinstance(value, Mapping) and ("kind" in value or "entries" in value):
        kind, hint = "a serialized state", "read it with deserialize_state"
    elif isinstance(value, str | bytes):
        kind, hint = "a string", "read it with parse_state"
    else:
        kind, hint = type(value).__name__, "ResumeStateCollector and parse_state return one"
    raise StateFormatError(f"{parameter}: expected a ResumeState, got {kind}; {hint}")


def check_resume_state(state: object) -> ResumeState:
    """Return the state; raise `StateFormatError` with a hint for anything else."""
    resume_state = as_resume_state(state, "state")
    if resume_state is None:
        raise StateFormatError("state: expected a ResumeState, got None")
    return resume_state
