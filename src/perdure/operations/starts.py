"""Start runs on behalf of operators, with the act in the new run."""

from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any

from perdure import codec
from perdure.durable.session import wake_workers
from perdure.errors import RunConflict
from perdure.insights.model import Bundle
from perdure.operations.forks import imported
from perdure.runtime.acts import add_act
from perdure.runtime.options import check_options
from perdure.runtime.run import Run
from perdure.runtime.schedules import ScheduleClient
from perdure.snapshot import Metadata, Snapshot, is_over, workflow_of
from perdure.snapshot.acts import acts_of
from perdure.store import (
    NewMessage,
    NewRun,
    Rest,
    header_of,
    require_inbox,
    require_schedule,
    rest_of,
)
from perdure.validation import check_user_id


class OperatorStarter(ScheduleClient):
    """Creates runs on behalf of an operator."""

    async def start(
        self,
        workflow: str,
        payload: object,
        run_id: str | None,
        tags: Mapping[str, str] | None,
        act: dict[str, Any],
    ) -> Run:
        """Create a run for a worker; raise `RunConflict` if the id is taken."""
        plan = check_options(self.clock.now(), tags=tags, if_exists="error")
        plan = replace(plan, metadata={**plan.metadata, **_metadata_with(act)})
        [run] = await self._create([self._start(workflow, payload, run_id, plan)])
        return run

    async def trigger_schedule(self, name: str, act: dict[str, Any]) -> Run:
        """Create the run of a schedule for the current time."""
        return await self._trigger_schedule(name, _metadata_with(act))

    async def backfill_schedule(
        self, name: str, start: datetime, end: datetime, act: dict[str, Any]
    ) -> list[Run]:
        """Create the runs of a schedule for a period; existing runs are kept."""
        return await self._backfill_schedule(name, start, end, _metadata_with(act))

    def check_payload(self, workflow: str | None, payload: object) -> Any:
        """Return a payload as JSON, checked if the definition of the workflow is known."""
        if workflow is None or workflow not in self.registry.names:
            return payload
        return self.registry.newest(workflow).encode_payload(payload)

    async def create(
        self, run_id: str, snapshot: Snapshot, rest: Rest | None = None, queue: str = ""
    ) -> None:
        """Create a run with this snapshot; raise `RunConflict` if the id is taken.

        The default `queue` is that of its workflow, if the definition is known.
        """
        data = codec.dumps(snapshot)
        definition = self.registry.find(workflow_of(snapshot) or "")
        if not queue and definition is not None:
            queue = definition.queue_for((snapshot.get("metadata") or {}).get("input"))
        new = NewRun(
            check_user_id(run_id, "run_id"),
            workflow_of(snapshot) or "",
            data,
            rest=rest,
            queue=queue,
            **header_of(snapshot, len(data)),
        )
        [is_new] = await require_schedule(self.store, "Operations").enqueue([new])
        if not is_new and not await self._is_own(run_id, snapshot):
            raise RunConflict(run_id, workflow_of(snapshot), "there is a run with this id")
        wake_workers(self.store)

    async def create_imported(self, bundle: Bundle, run_id: str, act: dict[str, Any]) -> Snapshot:
        """Create a run from a bundle with this act, and return its snapshot."""
        snapshot = imported(bundle, act, self.clock.now())
        await self.create(run_id, snapshot, rest_of(snapshot), bundle.queue)
        await self.send_imported(bundle, run_id)
        return snapshot

    async def send_imported(self, bundle: Bundle, run_id: str) -> None:
        """Send the messages of a bundle to the run that was created from it, each exactly once."""
        if bundle.inbox and not is_over(bundle.status):
            inbox = require_inbox(self.store, "Operations.import_run")
            await inbox.send(
                [
                    NewMessage(run_id, each.event, codec.dumps(each.payload), f"import:{each.id}")
                    for each in bundle.inbox
                ]
            )

    async def _is_own(self, run_id: str, snapshot: Snapshot) -> bool:
        """Return whether the run is the one that we just created, in case the reply was lost."""
        stored_snapshot = await self.store.load(run_id)
        if stored_snapshot is None:
            return False
        return acts_of(stored_snapshot.get("metadata")) == acts_of(snapshot.get("metadata"))


def _metadata_with(act: dict[str, Any]) -> dict[str, Any]:
    """Return the metadata that stores in a new run who started it."""
    metadata: Metadata = {}
    add_act(metadata, act)
    return {**metadata}
