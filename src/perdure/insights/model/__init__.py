"""The results of `Insights`: frozen structs for terminals, pages and JSON.

Values (payloads, outputs, the values of steps) are JSON as it is stored, after redaction. Times are
aware UTC datetimes.
"""

from perdure.insights.model.acts import (
    Act,
    ActsPage,
    BulkProgress,
    SavedView,
)
from perdure.insights.model.errors import (
    ErrorFacts,
    ErrorGroup,
    ErrorGroups,
    Frame,
)
from perdure.insights.model.fleet import (
    Attention,
    Finding,
    HistoryPoint,
    Lag,
    Overview,
    StoreFacts,
    WorkerHistory,
    WorkerRow,
    WorkflowVersions,
)
from perdure.insights.model.json import (
    Json,
)
from perdure.insights.model.rows import (
    HourDurations,
    Percentiles,
    RunRow,
    RunsPage,
    Tally,
)
from perdure.insights.model.runs import (
    Bundle,
    BundleMessage,
    Children,
    Comparison,
    Difference,
    Fork,
    Parent,
    RollbackFacts,
    RunFacts,
    Why,
)
from perdure.insights.model.steps import (
    InFlight,
    StepDetail,
    StepGroup,
    StepPeriod,
    StepRow,
    StepsPage,
)
from perdure.insights.model.waits import (
    Agenda,
    AgendaHour,
    ApprovalRow,
    ApprovalsPage,
    AwaitedEvent,
    MessageFacts,
    WaitFacts,
)
from perdure.insights.model.workflows import (
    DefinitionFacts,
    KeyRow,
    LimitRow,
    QueueRow,
    Retention,
    RetentionRow,
    ScheduleRow,
    WorkflowRow,
)

__all__ = [
    "Act",
    "ActsPage",
    "Agenda",
    "AgendaHour",
    "ApprovalRow",
    "ApprovalsPage",
    "Attention",
    "AwaitedEvent",
    "BulkProgress",
    "Bundle",
    "BundleMessage",
    "Children",
    "Comparison",
    "DefinitionFacts",
    "Difference",
    "ErrorFacts",
    "ErrorGroup",
    "ErrorGroups",
    "Finding",
    "Fork",
    "Frame",
    "HistoryPoint",
    "HourDurations",
    "InFlight",
    "Json",
    "KeyRow",
    "Lag",
    "LimitRow",
    "MessageFacts",
    "Overview",
    "Parent",
    "Percentiles",
    "QueueRow",
    "Retention",
    "RetentionRow",
    "RollbackFacts",
    "RunFacts",
    "RunRow",
    "RunsPage",
    "SavedView",
    "ScheduleRow",
    "StepDetail",
    "StepGroup",
    "StepPeriod",
    "StepRow",
    "StepsPage",
    "StoreFacts",
    "Tally",
    "WaitFacts",
    "Why",
    "WorkerHistory",
    "WorkerRow",
    "WorkflowRow",
    "WorkflowVersions",
]
