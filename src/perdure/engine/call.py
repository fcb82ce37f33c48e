"""A call of a step, and the host through which its record becomes durable."""

import hashlib
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextvars import ContextVar
from datetime import datetime, timedelta
from functools import partial
from types import MappingProxyType, MethodType
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

from perdure import codec
from perdure.engine.branches import Branch, Leaf, join_path
from perdure.engine.records import EncodedRecord
from perdure.errors import DriftError
from perdure.limits import Cost
from perdure.retry import Retry, Timeout
from perdure.snapshot import PendingWait, StepRecord

Kind: TypeAlias = Literal[
    "step",
    "sleep",
    "event",
    "race",
    "transaction",
    "call",
    "start",
    "result",
    "map",
    "approval",
    "callback",
    "undo",
    "saga",
]

ASKS = ("approval", "callback")
"""The kinds of calls that wait for an answer from outside."""

WAITS = ("sleep", "event", *ASKS)
"""The kinds of calls that only wait."""

SCOPE: ContextVar[Any] = ContextVar("perdure_saga", default=None)
"""The innermost scope of a saga that the running code belongs to; branches inherit it."""


class Received(NamedTuple):
    """A message that a wait received."""

    message_id: str
    payload: Any
    sent_at: datetime


class StepCall(Leaf):
    """One call of a step: its identity and its options.

    Defaults that most calls keep are class attributes. `key` is the explicit key, `record_key` the
    key that was reserved for the record when the call began. The write of the record also consumes
    the messages in `consumes` and replaces the earlier records in `replaces`. `failures` are the
    keys of the failures that made a race fail, `event` is the name of the event that a wait
    received, `run` is the id of the run that the call started or waited for. `is_permitted` is set
    once its limit has permitted an attempt, `within` is the branch of a call with an explicit key.
    `answer` describes the answer to an approval or callback, `token` is the idempotency key of a
    step that sends out a token, `gate` awaits the approval of a step before it begins. `undo` is
    the function that undoes the step, given its value, `undo_retry` is how that is retried, and
    `sagas` are the scopes that the step belongs to.
    """

    kind: Kind = "step"
    retries: Retry | None = None
    timeout: Timeout | None = None
    limit: Cost | None = None
    is_permitted: bool = False
    returns: Any = None
    errors: tuple[type[BaseException], ...] = ()
    ttl: timedelta | None = None
    record_key: str = ""
    started_at: float = 0.0
    consumes: tuple[str, ...] = ()
    replaces: Mapping[str, bytes] = MappingProxyType({})
    failures: Sequence[str] = ()
    event: str = ""
    run: str = ""
    undo: Callable[[Any], object] | None = None
    undo_retry: Retry | None = None
    sagas: Sequence[str] = ()
    within: str = ""
    answer: dict[str, Any] | None = None
    token: str = ""
    gate: "Callable[[Any, StepCall], Awaitable[object]] | None" = None

    def __init__(
        self,
        id: str,
        branch: Branch,
        key: str | None,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
    ) -> None:
        self.branch = branch
        self.attempt = 1
        self.id = id
        self.key = key
        # The identity is fixed by the call, not by the await: a step that is passed to `gather`
        # belongs to the branch that called it, not to the task that awaits it.
        if key is None:
            self.call = branch.call(id)
            self.path = branch.path
            self.fingerprint = codec.fingerprint(args) if args else ""
        else:
            # The key alone is the identity; branch and arguments are not compared.
            self.call = key
            self.path = self.fingerprint = ""
            self.within = branch.path
        self.fn = fn
        self.args = args

    def return_type(self) -> object:
        """Return the type of the value, if it is known."""
        return self.returns if self.returns is not None else codec.return_type(self.fn)

    def error_type(self) -> object:
        """Return the type of the error of a returned `Err`, if it is known."""
        return codec.error_type(self.fn)

    def wait_id(self) -> str:
        """Return an id for a wait that no other call of the run has."""
        return join_path(self.path, self.call)

    def on_behalf(self, id: str, fn: Callable[..., Any]) -> "StepCall":
        """Return a call that the engine makes on behalf of this one; its id contains this call."""
        # Like a call with a key: calls with this id are not numbered, since it is unique. But it
        # must not be found in a cache by another run.
        call = StepCall(id, self.branch, id, fn, ())
        call.key, call.path, call.within = None, self.path, self.within
        return call

    def facts(self, key: str) -> dict[str, str]:
        """Return the fields of a record under `key` that identify the call."""
        own_facts = {
            "kind": self.kind,
            "args": self.fingerprint,
            "branch": self.path,
            "call": self.call,
        }
        default_facts = {"kind": "step", "args": "", "branch": "", "call": key}
        return {name: fact for name, fact in own_facts.items() if fact != default_facts[name]}

    def drift_from(self, record: StepRecord) -> DriftError | None:
        """Return an error if the record belongs to a different call."""
        if "by" in record and self.kind != "race":
            # An operator knows the name of the step, but neither its arguments nor its kind.
            return None
        kind = record.get("kind", "step")
        if kind != self.kind:
            problem = f"is recorded as a {kind}, and the function now asks for a {self.kind}"
            hint = "use new step ids for changed code, or a new version of the workflow"
            return self._drift(f"{problem}; {hint}", kind, self.kind)
        # An empty fingerprint means that arguments were not, or could not be, compared.
        stored_args = record.get("args", "")
        if stored_args == self.fingerprint or not stored_args or not self.fingerprint:
            return None
        problem = (
            f"was recorded with other arguments (fingerprint {stored_args}) than it is called with "
            f"now ({self.fingerprint}): its record belongs to another call"
        )
        hint = "make arguments depend only on earlier steps, or pass key= to the call"
        return self._drift(f"{problem}; {hint}", stored_args, self.fingerprint)

    def _drift(self, problem: str, recorded: str, requested: str) -> DriftError:
        return DriftError(
            self.call, f"{self.place()} {problem}", recorded=recorded, asked=requested
        )

    def place(self) -> str:
        """Return a readable name of the step."""
        return f"step {self.call!r}" + (f" of branch {self.path!r}" if self.path else "")


class Decoration(NamedTuple):
    """The options of `@durable.step`, stored as the attribute `durable_step` of the function."""

    fn: Callable[..., Any]
    retries: Retry | None = None
    timeout: Timeout | None = None
    errors: tuple[type[BaseException], ...] = ()
    gate: Callable[[Any, StepCall], Awaitable[object]] | None = None
    undo: Callable[[Any], object] | None = None

    def apply(self, call: StepCall) -> StepCall:
        """Apply the options of the decorator to a call."""
        call.retries, call.timeout, call.errors = self.retries, self.timeout, self.errors
        call.gate, call.undo = self.gate, self.undo
        return call


def undecorated(fn: Any) -> tuple[Callable[..., Any], Decoration | None]:
    """Return the function inside `@durable.step`, bound or partial like `fn`.

    Calling the decorated function in a step would be a step inside a step.
    """
    if type(fn) is partial:
        # A step may bind keyword arguments this way, around a decorated function.
        inner, decoration = undecorated(fn.func)
        return (fn if decoration is None else partial(inner, *fn.args, **fn.keywords)), decoration
    decoration = getattr(fn, "durable_step", None)
    if type(decoration) is not Decoration:
        return fn, None
    # The attribute belongs to the function in the class, so a decorated method is bound again.
    owner = getattr(fn, "__self__", None)
    return decoration.fn if owner is None else MethodType(decoration.fn, owner), decoration


def idempotency_key(run_id: str, generation: int, branch: str, call: str) -> str:
    """Return 32 hexadecimal digits that identify a call of a run in one of its generations.

    Never change this: a different key for the same call would repeat the payments of open runs. The
    call is identified by its branch and name, which are the same on every replay; the key of its
    record is not, since it depends on which branch came first.
    """
    # As JSON, because with any separator, an id that contains the separator could imitate another.
    identity = codec.dumps([run_id, generation, branch, call])
    return hashlib.sha256(identity).hexdigest()[:32]


class Undos(NamedTuple):
    """What a replay found: the calls of steps that can be undone, by the keys of their records.

    `stopped_by` is the error that ended the replay early, if there was one.
    """

    calls: Mapping[str, StepCall]
    stopped_by: Exception | None


NO_STORE = "a Workflow in this process"
"""Named in errors of runs that have no store, and therefore no host."""


class RunHost(Protocol):
    """The interface through which a run's records become durable, and its waits are performed."""

    always_replay: bool
    suspend_after: timedelta
    """Longer waits are durable: the run may leave memory."""

    def record(self, call: StepCall, record: EncodedRecord, /) -> Coroutine[Any, Any, None]:
        """Make the record durable; an exception stops the run.

        A cancellation is raised as `Interrupted` after the write has ended.
        """
        ...

    async def persist(self) -> None:
        """Make open waits and the outbox durable; the items in the outbox are then delivered.

        A cancellation is raised as `Interrupted` after the write has ended.
        """
        ...

    async def read_log(self, run_id: str) -> list[tuple[str, Any]]:
        """Return the names and payloads of the messages of a log, a run that is never leased."""
        ...

    async def wait(self, wait: PendingWait) -> Received | None:
        """Wait for a time or an event; return the message, if one came."""
        ...

    async def conclude(self, wait: PendingWait, outcome: Mapping[str, Any]) -> Received:
        """Answer a wait on behalf of the run, unless it was already answered; return the answer.

        A cancellation is raised as `Interrupted` after the message was sent and read. If another
        owner has recorded the answer, `LeaseLost` is raised.
        """
        ...

    async def permit(self, cost: Cost, /) -> Callable[[], None]:
        """Wait until a limit permits an attempt; return a function that releases the permit.

        If the permit is lost, the host stops the run.
        """
        ...

    def give_back(self, key: str) -> None:
        """Make the event of an unclaimed record available to waits."""
        ...

    async def transact(
        self, call: StepCall, work: Callable[[Any], Awaitable[EncodedRecord]], /
    ) -> EncodedRecord:
        """Call `work` with the store's connection; its record is committed with its writes."""
        ...

    def report(self, report: Mapping[str, Any], /) -> None:
        """Set the report of a run from inside a step, in any thread, and publish it at once."""
        ...

    async def halt(self, key: str) -> None:
        """Stop the calling branch until the run has been suspended and resumed."""
        ...

    async def learn_undos(self) -> Undos:
        """Replay the function, once, and return how its steps are undone."""
        ...
