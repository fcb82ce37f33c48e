"""The identities of an agent's calls: what the model said, not the tasks that carry it out."""

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
    """Options of the steps that are made of model requests or tool calls, as those of `step`.

    With an int as `retry`, errors that another attempt cannot repair are not retried: a request
    that the provider rejects, a value that cannot be recorded, a mistake in the code.
    """

    retry: Retry | int | None
    timeout: Timeout | Duration | None
    limit: Limit | Cost | None


def check_options(options: object, where: str) -> StepOptions:
    """Return options that a user has given, or raise `InvalidArgument` that says where."""
    if options is None:
        return StepOptions()
    names = StepOptions.__annotations__
    # Not a subset of keys: those of a user need not be strings.
    if not isinstance(options, dict) or any(name not in names for name in options):
        raise InvalidArgument(where, options, f"a dict with keys among {', '.join(names)}")
    as_retry(options.get("retry"))
    as_timeout(options.get("timeout"))
    as_cost(options["limit"]) if options.get("limit") is not None else None
    return cast(StepOptions, dict(options))


class AgentCalls:
    """The steps of one run of an agent, in a branch below the one that runs the agent.

    Libraries for agents start tasks as they like, and other ones after an upgrade. Branches are
    numbered by tasks: a run that waited for an approval during the upgrade would not find its
    records, and would repeat its tools. So the branch is named after the agent, and that of a tool
    call after its place in the conversation, which is recorded.
    """

    def __init__(self, step: Step, agent: str) -> None:
        """Must be called in the task that runs the agent, before the library starts others."""
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
    """Raise the error of a step or wait that the function of the current step has called.

    A library that tells the model about the errors of tools would hide this one.
    """
    if (refusal := getattr(POSITION.get(), "refusal", None)) is not None:
        raise refusal


def _policy(retry: Retry | int | None, is_final: Callable[[Exception], bool]) -> Retry | None:
    """Return how often a step is retried; a whole policy of the user decides for itself."""
    if retry is None or isinstance(retry, Retry):
        return retry
    return Retry(
        retry, retry_if=lambda error: not (isinstance(error, NestedStep) or is_final(error))
    )
