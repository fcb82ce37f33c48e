"""The command language: a program is a tree of commands that the interpreter executes.

A command is identified by its path in the tree, such as `"2.0.1"`: command 1 of body 0 of command
2. Step ids repeat on purpose; outside of perdure, calls are distinguished by their path.
"""

from collections.abc import Iterator
from typing import Literal, TypeAlias

import msgspec

Value = Literal["small", "large", "unicode", "typed"]
Call = Literal["nothing", "step", "sleep"]
How = Literal[
    "gather", "collect", "taskgroup", "wait", "first", "exception", "wait_for", "tasks",
    "as_completed", "generator", "shield", "event", "condition", "queue", "stream", "semaphore",
    "anyio", "beside", "all", "calls", "names", "map",
]  # fmt: skip
Start = Literal["call", "start", "map"]
Undo = Literal["", "ok", "flaky", "broken"]
CANCELLING: frozenset[How] = frozenset({"taskgroup", "anyio", "stream"})
LEAVES_ONLY: frozenset[How] = frozenset({"calls", "names", "map"})


class Base(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """A command; times are in milliseconds."""


class Step(Base, frozen=True):
    """A step that takes `ms`. Its first `fails` attempts fail, unless it `heals` and has healed.
    The delay between two attempts is `delay`; a run may be suspended during a long one.

    One that `wraps` turns a cancellation into a failure, as clients of services do. The `undo` of a
    step works, fails in its first attempt, or is broken until the run has healed.
    """

    id: str
    ms: int = 0
    fails: int = 0
    retry: int = 1
    delay: int = 5
    heals: bool = False
    declared: bool = True
    timeout: int = 0
    value: Value = "small"
    key: str = ""
    thread: bool = False
    wraps: bool = False
    undo: Undo = ""


class Sleep(Base, frozen=True):
    """A durable sleep."""

    id: str
    ms: int


class Wait(Base, frozen=True):
    """A wait for an event, without a limit or until `timeout`."""

    id: str
    event: str
    timeout: int | None = None


class Transaction(Base, frozen=True):
    """A step that inserts a row through the store's own connection, and may fail after that."""

    id: str
    ms: int = 0
    fails: bool = False
    undo: Undo = ""


class Ask(Base, frozen=True):
    """A question to a person, or a callback, until `timeout`; several callers answer it."""

    id: str
    timeout: int | None = None
    callback: bool = False


class Fail(Base, frozen=True):
    """Raise an exception from the workflow function itself."""


class LeaveTask(Base, frozen=True):
    """A step whose function leaves a task running, which may try to call a step."""

    id: str
    after: int
    calls: Call = "nothing"


class Nested(Base, frozen=True):
    """A step whose function tries to call another step, which must be refused."""

    id: str


class Child(Base, frozen=True):
    """A child run with one step that takes `ms`: called, started and awaited, or one of a map.

    It `fails` unless it has healed.
    """

    id: str
    how: Start = "call"
    ms: int = 0
    fails: bool = False


class Parallel(Base, frozen=True):
    """Branches at the same time, joined by one of asyncio's means, by `step.all` or `step.map`.

    `step.all` is given coroutines ("all"), calls of steps and waits, or steps by their names.
    """

    how: How
    branches: "tuple[Body, ...]"


class Race(Base, frozen=True):
    """The first branch to finish wins; the others are cancelled.

    The branches have names; or they are `calls` of steps and waits, made before the race begins.
    """

    id: str
    branches: "tuple[Body, ...]"
    calls: bool = False


class Try(Base, frozen=True):
    """Run the body; if it fails, run the handler."""

    body: "Body"
    handler: "Body"


class Scope(Base, frozen=True):
    """Cancel the one command inside when it takes longer than `ms`, and continue in any case."""

    ms: int
    inner: "Command"


class Saga(Base, frozen=True):
    """Run the body; if it fails or is cancelled, its steps are undone."""

    id: str
    body: "Body"


class Finally(Base, frozen=True):
    """Run the body, and call a step afterwards in any case."""

    id: str
    body: "Body"


Leaf: TypeAlias = Step | Sleep | Wait | Transaction | LeaveTask | Nested | Child | Ask
Command: TypeAlias = Leaf | Fail | Parallel | Race | Try | Scope | Saga | Finally
Body: TypeAlias = tuple[Command, ...]

_decode = msgspec.json.Decoder(Body).decode


def dumps(program: Body) -> str:
    """Return the program as JSON."""
    return msgspec.json.encode(program).decode()


def loads(text: str) -> Body:
    """Return the program that `dumps` wrote."""
    return _decode(text)


def bodies(command: Command) -> tuple[Body, ...]:
    """Return the bodies inside a command."""
    match command:
        case Parallel() | Race():
            return command.branches
        case Try():
            return (command.body, command.handler)
        case Saga() | Finally():
            return (command.body,)
        case Scope():
            return ((command.inner,),)
        case _:
            return ()


def has_only_leaves(command: Command) -> bool:
    """Return whether each body inside a command is a single call."""
    match command:
        case Parallel():
            return command.how in LEAVES_ONLY
        case Race():
            return command.calls
        case _:
            return False


def child(path: str, body: int, index: int) -> str:
    """Return the path of a command inside another."""
    return f"{path}.{body}.{index}"


def last(path: str) -> str:
    """Return the path of the step that a `Finally` calls in the end."""
    return f"{path}.finally"


def walk(program: Body) -> Iterator[tuple[str, Command]]:
    """Yield every command with its path, parents first."""

    def inside(path: str, command: Command) -> Iterator[tuple[str, Command]]:
        yield path, command
        for number, body in enumerate(bodies(command)):
            for index, inner in enumerate(body):
                yield from inside(child(path, number, index), inner)

    for index, command in enumerate(program):
        yield from inside(str(index), command)


def ancestors(path: str) -> Iterator[tuple[str, int]]:
    """Yield the path of each command around `path`, innermost first, with the body it is in."""
    parts = path.removesuffix(".finally").split(".")
    if path.endswith(".finally"):
        yield ".".join(parts), -1
    while len(parts) > 1:
        *parts, body, _ = parts
        yield ".".join(parts), int(body)


def show(program: Body, indent: str = "") -> str:
    """Return the program in readable form: one command per line, bodies indented."""
    lines = []
    for command in program:
        fields = {name: getattr(command, name) for name in command.__struct_fields__}
        plain = {
            name: value
            for name, value in fields.items()
            if name not in ("branches", "body", "handler", "inner")
            and (name, value) not in _DEFAULTS.get(type(command), ())
        }
        arguments = ", ".join(f"{name}={value!r}" for name, value in plain.items())
        lines.append(f"{indent}{type(command).__name__}({arguments})")
        for number, body in enumerate(bodies(command)):
            lines += [f"{indent}  [{number}]", show(body, indent + "    ")]
    return "\n".join(lines)


_DEFAULTS = {
    command: tuple(zip(command.__struct_fields__[-len(defaults) :], defaults, strict=True))
    for command in Base.__subclasses__()
    if (defaults := command.__struct_defaults__)
}
