"""Operators' actions on the runs, workflows and workers of a store, from any program.

operations = Operations(store)
await operations.complete_step("order-7", "ship", "parcel 7", by="ana", why="ticket 4411")
"""

from perdure.operations.copying import CopyProgress
from perdure.operations.operations import Operations
from perdure.operations.outcome import KEEP, Outcome, Preview

__all__ = ["KEEP", "CopyProgress", "Operations", "Outcome", "Preview"]
