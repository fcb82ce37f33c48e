"""All checks in one class."""

import pytest

from perdure.testing.conformance.base import BaseChecks
from perdure.testing.conformance.batches import BatchesChecks
from perdure.testing.conformance.declared import DeclaredChecks
from perdure.testing.conformance.deletion import DeletionChecks
from perdure.testing.conformance.handoff import HandoffChecks
from perdure.testing.conformance.header import HeaderChecks
from perdure.testing.conformance.hostile import HostileChecks
from perdure.testing.conformance.inbox import InboxChecks
from perdure.testing.conformance.journal import JournalChecks
from perdure.testing.conformance.lease import LeaseChecks
from perdure.testing.conformance.maintenance import MaintenanceChecks
from perdure.testing.conformance.model import ModelChecks
from perdure.testing.conformance.payloads import PayloadChecks
from perdure.testing.conformance.prefixes import PrefixChecks
from perdure.testing.conformance.queues import QueuesChecks
from perdure.testing.conformance.races import RaceChecks
from perdure.testing.conformance.schedule import ScheduleChecks
from perdure.testing.conformance.search import SearchesChecks
from perdure.testing.conformance.transaction import TransactionChecks
from perdure.testing.conformance.transactional_enqueue import TransactionalEnqueueChecks


@pytest.mark.asyncio
class StoreConformance(
    DeclaredChecks,
    BaseChecks,
    JournalChecks,
    DeletionChecks,
    LeaseChecks,
    ScheduleChecks,
    QueuesChecks,
    InboxChecks,
    BatchesChecks,
    HandoffChecks,
    HeaderChecks,
    SearchesChecks,
    MaintenanceChecks,
    TransactionChecks,
    TransactionalEnqueueChecks,
    PrefixChecks,
    HostileChecks,
    PayloadChecks,
    RaceChecks,
    ModelChecks,
):
    """All checks. A subclass must have the fixture `store`: a new and empty store."""
