"""All checks in one class."""

import pytest

from perdure.testing.conformance.base import BaseChecks
from perdure.testing.conformance.declared import DeclaredChecks
from perdure.testing.conformance.hostile import HostileChecks
from perdure.testing.conformance.inbox import InboxChecks
from perdure.testing.conformance.journal import JournalChecks
from perdure.testing.conformance.lease import LeaseChecks
from perdure.testing.conformance.maintenance import UpkeepChecks
from perdure.testing.conformance.model import ModelChecks
from perdure.testing.conformance.payloads import PayloadChecks
from perdure.testing.conformance.prefixes import PrefixChecks
from perdure.testing.conformance.races import RaceChecks
from perdure.testing.conformance.schedule import ScheduleChecks
from perdure.testing.conformance.transaction import TransactionChecks


@pytest.mark.asyncio
class StoreConformance(
    DeclaredChecks,
    BaseChecks,
    JournalChecks,
    LeaseChecks,
    ScheduleChecks,
    InboxChecks,
    UpkeepChecks,
    TransactionChecks,
    PrefixChecks,
    HostileChecks,
    PayloadChecks,
    RaceChecks,
    ModelChecks,
):
    """Every check. Give it the fixture `store`: a fresh and empty store."""
