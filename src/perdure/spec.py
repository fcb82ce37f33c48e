"""A call of a step, the record that is made of it, and where that becomes durable."""

from collections.abc import Awaitable, Callable, Sequence
from datetime import timedelta
from typing import Any, Literal, Protocol, TypeAlias

import msgspec

from perdure import codec
from perdure.lineage import Branch, Call
from perdure.retry import Retry, Timeout
from perdure.snapshot import PendingWait

Kind: TypeAlias = Literal["step", "sleep", "event", "race", "transaction"]


class Home(Protocol):
    """Where a run's records become durable and its waits are spent."""

    async def record(
        self,
        step: str,
        key: str,
        record: bytes,
        at: str,
        warnings: Sequence[Any] = (),
        takes: Sequence[str] = (),
    ) -> None:
        """Return when the record, made at that time, is durable; an exception breaks the run."""
        ...

    async def wait(self, wait: PendingWait) -> tuple[str, object] | None:
        """Wait for the wait's time or event: an event gives its message id and payload."""
        ...

    async def transact(
        self, step: str, work: Callable[[Any], Awaitable[tuple[str, bytes, str]]]
    ) -> None:
        """Call `work` with the store's connection; its record commits with what it wrote."""
        ...


class Spec(Call):
    """One call of a step, as the function asked for it.

    What most calls leave as it is stands in the class.
    """

    kind: Kind = "step"
    retries: Retry | None = None
    timeout: Timeout | None = None
    returns: Any = None
    errors: tuple[type[BaseException], ...] = ()
    ttl: timedelta | None = None

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
        self.inner = None
        self.id = id
        self.key = key
        if key is None:
            self.call = branch.call(id)
            self.path = branch.path
            self.print = codec.fingerprint(args) if args else ""
        else:
            self.call = key
            self.path = self.print = ""
        self.fn = fn
        self.args = args

    def return_type(self) -> object:
        """Give the type the value comes back as, if that is known."""
        return self.returns if self.returns is not None else codec.return_type(self.fn)

    def error_type(self) -> object:
        """Give the type that the error of a returned `Err` comes back as, if that is known."""
        return codec.error_type(self.fn)

    def facts(self, key: str) -> dict[str, str]:
        """Give what a record under `key` holds of the call's identity."""
        named = {"kind": self.kind, "args": self.print, "branch": self.path, "call": self.call}
        usual = {"kind": "step", "args": "", "branch": "", "call": key}
        return {name: fact for name, fact in named.items() if fact != usual[name]}

    def place(self) -> str:
        """Give the step's name for people."""
        return f"step {self.call!r}" + (f" of branch {self.path!r}" if self.path else "")


class Made(msgspec.Struct, frozen=True, gc=False):
    """A record as it was made: where it stands, its JSON, when, what the function sees of the
    value, and what was lost of it.
    """

    key: str
    record: bytes
    at: str
    seen: Any
    losses: tuple[codec.Loss, ...]
