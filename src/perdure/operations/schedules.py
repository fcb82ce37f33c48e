"""Operators' actions on schedules. Most of them act on the run that implements the schedule."""

from datetime import datetime

from msgspec.structs import replace

from perdure.errors import RunNotFound, ScheduleNotFound
from perdure.insights.words import count_words
from perdure.operations.approvals import ApprovalOperations
from perdure.operations.outcome import Outcome
from perdure.runtime.acts import copy_acts
from perdure.runtime.requests import Verb
from perdure.runtime.schedule_workflow import schedule_id
from perdure.validation import check_user_id


class ScheduleOperations(ApprovalOperations):
    """Changes schedules on behalf of operators; `Operations` can do more."""

    async def pause_schedule(self, schedule: str, *, by: str, why: str = "") -> Outcome:
        """Stop a schedule from starting runs; runs that it started continue."""
        return await self._change_schedule(schedule, "pause", "is paused", by, why)

    async def unpause_schedule(self, schedule: str, *, by: str, why: str = "") -> Outcome:
        """Let a paused schedule start runs again, beginning with its next time."""
        return await self._change_schedule(schedule, "unpause", "is resumed", by, why)

    async def trigger_schedule(self, schedule: str, *, by: str, why: str = "") -> Outcome:
        """Start a run of a schedule now, whether or not others are open."""
        act = self.act("trigger_schedule", by, why, check_user_id(schedule, "schedule"))
        run = await self._starter.trigger_schedule(schedule, act)
        await copy_acts(self.store, run.id, [act])
        sentence = f"Started {run.id}."
        return Outcome(run.id, "trigger_schedule", "done", run.status, sentence)

    async def backfill_schedule(
        self, schedule: str, start: datetime, end: datetime, *, by: str, why: str = ""
    ) -> Outcome:
        """Start the runs for all times of a schedule in a period; existing runs are kept."""
        act = self.act("backfill_schedule", by, why, check_user_id(schedule, "schedule"))
        runs = await self._starter.backfill_schedule(schedule, start, end, act)
        await self.note({**act, "was": f"{start.isoformat()} to {end.isoformat()}"})
        sentence = f"Schedule {schedule} has {count_words(len(runs), 'run')} in this period."
        return Outcome("", "backfill_schedule", "done", None, sentence)

    async def delete_schedule(self, schedule: str, *, by: str, why: str = "") -> Outcome:
        """Delete a schedule; the runs that it started continue."""
        name = check_user_id(schedule, "schedule")
        try:
            outcome = await self.delete(schedule_id(name), by=by, why=why)
        except RunNotFound:
            raise ScheduleNotFound(name) from None
        return replace(outcome, run_id="", sentence=f"Schedule {name} is deleted.")

    async def _change_schedule(
        self, schedule: str, verb: Verb, done: str, by: str, why: str
    ) -> Outcome:
        name = check_user_id(schedule, "schedule")
        try:
            outcome = await self._apply(schedule_id(name), verb, by, why)
        except RunNotFound:
            raise ScheduleNotFound(name) from None
        # The dashboard then shows the page of the schedule, not that of its run.
        outcome = replace(outcome, run_id="")
        is_done = outcome.state == "done"
        return replace(outcome, sentence=f"Schedule {name} {done}.") if is_done else outcome
