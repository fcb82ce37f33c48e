"""Parts of the conformance kit, for stores that differ only in their connections or their clock."""

import pytest

from perdure.testing.conformance.base import BaseChecks
from perdure.testing.conformance.batches import BatchesChecks
from perdure.testing.conformance.declared import DeclaredChecks
from perdure.testing.conformance.handoff import HandoffChecks
from perdure.testing.conformance.lease import LeaseChecks
from perdure.testing.conformance.maintenance import MaintenanceChecks
from perdure.testing.conformance.model import ModelChecks
from perdure.testing.conformance.payloads import PayloadChecks
from perdure.testing.conformance.queues import QueuesChecks
from perdure.testing.conformance.races import RaceChecks
from perdure.testing.conformance.schedule import ScheduleChecks
from perdure.testing.conformance.transaction import TransactionChecks
from perdure.testing.conformance.transactional_enqueue import TransactionalEnqueueChecks


@pytest.mark.asyncio
class ConnectionConformance(
    DeclaredChecks,
    BaseChecks,
    BatchesChecks,
    PayloadChecks,
    HandoffChecks,
    TransactionChecks,
    TransactionalEnqueueChecks,
    RaceChecks,
    ModelChecks,
):
    """Transactions, races, large values, and all verbs in random order.

    The statements are the same however a store is opened, and the whole kit runs with one way to
    open it. This part is for the others.
    """


@pytest.mark.asyncio
class ClockConformance(
    DeclaredChecks,
    LeaseChecks,
    ScheduleChecks,
    QueuesChecks,
    MaintenanceChecks,
    RaceChecks,
    ModelChecks,
):
    """Leases, wake times, queues, ages, and all verbs in random order: what depends on the time.

    The whole kit runs with a clock that the checks set. This part is for the system clock.
    """
