"""All checks in one class."""

import pytest

from perdure.testing.conformance.base import BaseChecks
from perdure.testing.conformance.declared import DeclaredChecks
from perdure.testing.conformance.inbox import InboxChecks
from perdure.testing.conformance.journal import JournalChecks
from perdure.testing.conformance.lease import LeaseChecks
from perdure.testing.conformance.schedule import ScheduleChecks


@pytest.mark.asyncio
class StoreConformance(
    DeclaredChecks, BaseChecks, JournalChecks, LeaseChecks, ScheduleChecks, InboxChecks
):
    """Every check. Give it the fixture `store`: a fresh and empty store."""
