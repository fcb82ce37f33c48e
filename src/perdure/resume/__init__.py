"""Resume states: the results of a run's finished steps, to be passed to the next run.

`ResumeStateCollector` collects a state from a run's events, `stringify_state` and `parse_state`
convert it to a string and back, and `StatePersistence` stores these strings in a key-value store. A
snapshot contains more (the progress of the run, its metadata) and is passed as `snapshot=`.
"""

from perdure.resume.persistence import StatePersistence
from perdure.resume.serialization import (
    deserialize_state,
    parse_state,
    records_of,
    serialize_state,
    state_of,
    stringify_state,
)
from perdure.resume.state import (
    ResumeEntry,
    ResumeState,
    ResumeStateCollector,
    as_resume_state,
    is_step_complete,
)

__all__ = [
    "ResumeEntry",
    "ResumeState",
    "ResumeStateCollector",
    "StatePersistence",
    "as_resume_state",
    "deserialize_state",
    "is_step_complete",
    "parse_state",
    "records_of",
    "serialize_state",
    "state_of",
    "stringify_state",
]
