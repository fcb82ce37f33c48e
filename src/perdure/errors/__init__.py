"""The exceptions that perdure raises.

A message says what happened, to which run or step, and what to do about it; the same data are
attributes. All derive from `PerdureError`, except `Suspended` and `ContinuedAsNew`: they are not
errors, and handlers of `Exception` do not catch them.
"""

from perdure.errors.error import PerdureError
from perdure.errors.operators import (
    AlreadyAnswered,
    AppliedBefore,
    InvalidToken,
    Refused,
    ScheduleConflict,
    ScheduleNotFound,
    TooLate,
)
from perdure.errors.runs import (
    AlreadyRunning,
    Cancelled,
    ContinuedAsNew,
    DeadlinePassed,
    IdempotencyConflict,
    LeaseLost,
    RollbackFailed,
    RunConflict,
    RunFailed,
    RunNotFound,
    Suspended,
    TooDeep,
    UnknownWorkflow,
    VersionMismatch,
)
from perdure.errors.steps import (
    DriftError,
    ManualValueError,
    NestedStep,
    NotAwaited,
    Rejected,
    RunOver,
    StepError,
    StepFailed,
    StepTimeout,
    WrongRun,
)
from perdure.errors.stores import (
    MissingAbility,
    PermitLost,
    StoreClosed,
    StoreCorrupted,
    StoreError,
    StoreNotOpened,
    StoreUnavailable,
    ValueTooLarge,
)
from perdure.errors.values import (
    CodecError,
    InvalidArgument,
    InvalidCron,
    InvalidDuration,
    InvalidPayload,
    MissingDependency,
    SnapshotFormatError,
    SnapshotMismatch,
    StateFormatError,
    UnwrapError,
)

__all__ = [
    "AlreadyAnswered",
    "AlreadyRunning",
    "AppliedBefore",
    "Cancelled",
    "CodecError",
    "ContinuedAsNew",
    "DeadlinePassed",
    "DriftError",
    "IdempotencyConflict",
    "InvalidArgument",
    "InvalidCron",
    "InvalidDuration",
    "InvalidPayload",
    "InvalidToken",
    "LeaseLost",
    "ManualValueError",
    "MissingAbility",
    "MissingDependency",
    "NestedStep",
    "NotAwaited",
    "PerdureError",
    "PermitLost",
    "Refused",
    "Rejected",
    "RollbackFailed",
    "RunConflict",
    "RunFailed",
    "RunNotFound",
    "RunOver",
    "ScheduleConflict",
    "ScheduleNotFound",
    "SnapshotFormatError",
    "SnapshotMismatch",
    "StateFormatError",
    "StepError",
    "StepFailed",
    "StepTimeout",
    "StoreClosed",
    "StoreCorrupted",
    "StoreError",
    "StoreNotOpened",
    "StoreUnavailable",
    "Suspended",
    "TooDeep",
    "TooLate",
    "UnknownWorkflow",
    "UnwrapError",
    "ValueTooLarge",
    "VersionMismatch",
    "WrongRun",
]

for _name in __all__:
    # The path by which programs import the class: stored tracebacks and telemetry contain it, so it
    # must not depend on which file defines the class.
    globals()[_name].__module__ = __name__
