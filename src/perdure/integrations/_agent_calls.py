"""The identities of an agent's calls: derived from the conversation, not from tasks."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypedDict, cast

from perdure.clock import Duration
from perdure.engine.branches import Branch
from perdure.engine.step import Step
from perdure.engine.tasks import POSITION
from perdure.errors import InvalidArgument, NestedStep
from perdure.limits import Cost, Limit, as_cost
from perdure.retry import Retry, Timeout, as_retry, as_timeout


class StepOptions(TypedDict, total=False):
    """Options of the steps for model requests or tool calls, as in `step`.

    With an int as `retry`, errors that another attempt cannot fix are not retried: a request that
    the provider rejects, a value that cannot be recorded, a mistake in the code.
    """

    retry: Retry | int | None
    timeout: Timeout | Duration | None
    limit: Limit | Cost | None


def check_options(options: object, parameter: str) -> StepOptions:
    """Return the user's options, or raise `InvalidArgument` naming `where`."""
    if options is None:
        return StepOptions()
    names = StepOptions.__annotations__
    # Not compared as sets of keys: the user's keys need not be strings.
    if not isinstance(options, dict) or any(name not in names for name in options):
        raise InvalidArgument(parameter, options, f"a dict with keys among {', '.join(names)}")
    as_retry(options.get("retry"))
    as_timeout(options.get("timeout"))
    as_cost(options["limit"]) if options.get("limit") is not None else None
    return cast(StepOptions, dict(options))


class AgentCalls:
    """The steps of one run of an agent, in a branch below the one that runs the agent.

    Agent libraries start tasks as they like, and may start different ones after an upgrade.
    Branches are numbered by tasks, so a run that waited for an approval during the upgrade would
    not find its records, and would repeat its tool calls. So this branch is named after the agent,
    and the branch of a tool call after its place in the conversation, which is recorded.
    """

    def __init__(self, step: Step, agent: str) -> None:
        """Create the branch. Call this in the task that runs the agent, before it starts others."""
        self._run = step._run
        caller = self._run.branches.current(step.run_id, agent)
        # Counted under a reserved name, which no step or branch of the user has.
        self._branch = caller.child(caller.call(f"~agent:{agent}"))
        self._tools: dict[str, Branch] = {}

    async def perform(
        self,
        id: str,
        fn: Callable[..., Awaitable[Any]],
        *args: Any,
        options: StepOptions,
        is_final: Callable[[Exception], bool],
        errors: Sequence[type[BaseException]],
        tool_call: str = "",
    ) -> Any:
        """Run a step of the agent; an error that `is_final` is not retried by default."""
        call = self._run.call(id, fn, args, branch=self._branch_of(tool_call))
        call.retries = _policy(options.get("retry"), is_final)
        call.timeout = as_timeout(options.get("timeout"))
        if (limit := options.get("limit")) is not None:
            call.limit = as_cost(limit)
        call.errors = tuple(errors)
        return await self._run.perform(call)

    def _branch_of(self, tool_call: str) -> Branch:
        if not tool_call:
            return self._branch
        branch = self._tools.get(tool_call)
        if branch is None:
            branch = self._tools[tool_call] = self._branch.child(tool_call)
        return branch


def raise_refusal() -> None:
    """Raise the error if the function of the current step called a step or wait.

    A library that passes errors of tools to the model would hide it.
    """
    if (refusal := getattr(POSITION.get(), "refusal", None)) is not None:
        raise refusal


def _policy(retry: Retry | int | None, is_final: Callable[[Exception], bool]) -> Retry | None:
    """Return the retry policy of a step; a full policy of the user is used as it is."""
    if retry is None or isinstance(retry, Retry):
        return retry
    return Retry(
        retry, retry_if=lambda error: not (isinstance(error, NestedStep) or is_final(error))
    )
