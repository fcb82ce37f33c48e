"""A call of a step: its identity and its options."""

import hashlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextvars import ContextVar
from datetime import timedelta
from functools import partial
from types import MappingProxyType, MethodType
from typing import Any, Literal, NamedTuple, TypeAlias

from perdure import codec
from perdure.engine.branches import Branch, Leaf
from perdure.engine.paths import join_path
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


_NOTHING: Mapping[str, bytes] = MappingProxyType({})


class StepCall(Leaf, eq=False):
    """One call of a step: its identity, its options, and facts about its record."""

    # A struct, because each step creates one: the fields with a default cost nothing.
    key: str | None
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    fingerprint: str = ""
    within: str = ""
    """The branch of a call with an explicit key."""
    kind: Kind = "step"

    retries: Retry | None = None
    timeout: Timeout | None = None
    limit: Cost | None = None
    returns: Any = None
    errors: tuple[type[BaseException], ...] = ()
    ttl: timedelta | None = None
    gate: "Callable[[Any, StepCall], Awaitable[object]] | None" = None
    """Awaits the approval of the step before it begins."""
    undo: Callable[[Any], object] | None = None
    """Undoes the step, given its value."""
    undo_retry: Retry | None = None
    sagas: Sequence[str] = ()
    """The scopes that the step belongs to."""
    token: str = ""
    """The idempotency key of a step that sends out a token."""

    record_key: str = ""
    """The key that was reserved for the record when the call began."""
    started_at: float = 0.0
    is_permitted: bool = False
    """Whether its limit has permitted an attempt."""

    consumes: tuple[str, ...] = ()
    """The messages that the write of the record consumes."""
    replaces: Mapping[str, bytes] = _NOTHING
    """The earlier records that the write of the record replaces."""
    failures: Sequence[str] = ()
    """The keys of the failures that made a race fail."""
    event: str = ""
    """The name of the event that a wait received."""
    run: str = ""
    """The id of the run that the call started or waited for."""
    answer: dict[str, Any] | None = None
    """The answer to an approval or callback."""

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
        return StepCall(id, self.branch, id, self.path, 1, None, None, fn, (), "", self.within)

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
        hint = (
            "if the code was changed, use a new step id or a new version of the workflow; if not, "
            "make arguments depend only on earlier steps, step.now() and step.random(), or pass "
            "key= to the call"
        )
        return self._drift(f"{problem}; {hint}", stored_args, self.fingerprint)

    def drift_from_wait(self, stored: PendingWait, new: PendingWait) -> DriftError | None:
        """Return an error if an open wait belongs to a different call than the `new` one."""
        if (began := _subject(stored)) == (asked := _subject(new)):
            return None
        problem = f"is waiting for {began}, and the function now asks to wait for {asked}"
        hint = "use new step ids for changed code, or a new version of the workflow"
        return self._drift(f"{problem}; {hint}", began, asked)

    def _drift(self, problem: str, recorded: str, requested: str) -> DriftError:
        return DriftError(
            self.call, f"{self.place()} {problem}", recorded=recorded, asked=requested
        )

    def place(self) -> str:
        """Return a readable name of the step."""
        return f"step {self.call!r}" + (f" of branch {self.path!r}" if self.path else "")


def _subject(wait: PendingWait) -> str:
    """Return what a wait is for."""
    if "run" in wait:
        return f"the end of run {wait['run']!r}"
    if "ask" in wait:
        return f"the answer to its {wait['ask']}"
    if wait["kind"] == "event":
        return f"event {wait.get('event', '')!r}"
    return "a time" if wait["kind"] == "sleep" else "the next attempt of a step"


def step_call(
    id: str,
    branch: Branch,
    key: str | None,
    fn: Callable[..., Any],
    args: tuple[Any, ...] = (),
) -> StepCall:
    """Return the next call of `id` in a branch, or the call with an explicit key."""
    # The identity is fixed by the call, not by the await: a step that is passed to `gather` belongs
    # to the branch that called it, not to the task that awaits it.
    if key is None:
        fingerprint = codec.fingerprint(args) if args else ""
        return StepCall(
            id, branch, branch.call(id), branch.path, 1, None, None, fn, args, fingerprint
        )
    # The key alone is the identity; branch and arguments are not compared.
    return StepCall(id, branch, key, "", 1, None, key, fn, args, "", branch.path)


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
