"""The interpreter: one workflow function that executes its payload and logs what it sees."""

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from itertools import count
from typing import Any, assert_never

import msgspec

from perdure import Approval, Retry, errors, workflow
from perdure import Step as Handle
from perdure.errors import (
    PerdureError,
    RollbackFailed,
    RunFailed,
    StepError,
    StepFailed,
    StepTimeout,
)
from perdure.runtime.definition import Definition
from tests.durability.verifier import language as lang
from tests.durability.verifier.joins import join, retrieve
from tests.durability.verifier.log import Kind, Line, Log, tokens_in

NAME, CHILD = "program", "child"
_SEEN: frozenset[Kind] = frozenset(
    {"call", "saw", "failed", "broke", "cut", "kept", "returned", "raised"}
)
"""What is logged otherwise by a replay, which is only to learn how steps are undone."""

Insert = Callable[[Any, str, str, str], Awaitable[None]]


class Planned(Exception):
    """A failure that the program requested, of a class that the workflow declares."""


class Undeclared(Exception):
    """A failure that the program requested, of a class that the workflow does not declare."""


class ChildWork(msgspec.Struct, frozen=True):
    """What a child run does, for which command of which run."""

    run: str
    path: str
    ms: int
    fails: bool


class World:
    """What one process shares with the outside: its log, its tokens, and the table of effects."""

    def __init__(
        self,
        process: str,
        log: Log,
        *,
        healed: Callable[[str], bool],
        insert: Insert | None,
        threads: bool = False,
    ) -> None:
        self.process = process
        self.log = log
        self.healed = healed
        self.insert = insert
        self.threads = threads
        self.left_behind: set[asyncio.Task[None]] = set()
        self._numbers = count(1)

    def token(self) -> str:
        """Return a string that occurs once in the whole log."""
        return f"<{self.process}.{next(self._numbers)}>"

    def definitions(self) -> list[Definition[Any, Any]]:
        """Return the workflows of this process: programs, and the child runs that they start."""
        return [self._program(), self._child()]

    def _child(self) -> Definition[Any, Any]:
        @workflow(CHILD, errors=[Planned])
        async def child(step: Handle, work: ChildWork) -> Any:
            activation = self.token().strip("<>")

            async def effect() -> Any:
                token, key = self.token(), step.idempotency_key
                line = Line("begin", self.process, work.run, activation, work.path, key, (token,))
                self.log.write(msgspec.structs.replace(line, n=1))
                await asyncio.sleep(work.ms / 1000)
                if work.fails and not self.healed(work.run):
                    raise Planned(f"planned {token}")
                return {"x": token}

            return await step("effect", effect)

        return child

    def _program(self) -> Definition[Any, Any]:

        @workflow(NAME, errors=[Planned])
        async def program(step: Handle, payload: str) -> list[Any]:
            return await Activation(self, step, lang.loads(payload)).run()

        return program


class Activation:
    """One call of the workflow function."""

    def __init__(self, world: World, step: Handle, program: lang.Body) -> None:
        self._world = world
        self._step = step
        self._program = program
        self._commands = dict(lang.walk(program))
        self._is_replay = step._run.replays_only
        self._name = world.token().strip("<>")

    async def run(self) -> list[Any]:
        """Execute the whole program."""
        run: Any = self._step._run
        epoch = run.host.lease.epoch
        line = Line("activation", self._world.process, run.run_id, self._name, epoch=epoch)
        self._world.log.write(line)
        try:
            values = [_plain(await self._do(str(n), each)) for n, each in enumerate(self._program)]
        except Exception as error:
            self._log("raised", text=str(error))
            raise
        self._log("returned", text=repr(values))
        return values

    async def _body(self, path: str, number: int) -> list[Any]:
        body = lang.bodies(self._commands[path])[number]
        return [await self._do(lang.child(path, number, n), each) for n, each in enumerate(body)]

    async def _do(self, path: str, command: lang.Command) -> Any:
        match command:
            case lang.Fail():
                raise Planned(f"the function fails at {path}")
            case lang.Parallel():
                return await self._parallel(path, command)
            case lang.Race():
                return await self._observe(path, lambda: self._race(path, command))
            case lang.Try():
                with suppress(Exception):
                    return await self._body(path, 0)
                # Outside of the except clause, so that a failure here has no context.
                return await self._body(path, 1)
            case lang.Scope():
                with suppress(Exception):
                    async with asyncio.timeout(command.ms / 1000):
                        await self._body(path, 0)
                # The result of the scope depends on time, so it is not part of the output.
                return None
            case lang.Saga():
                async with self._step.saga(command.id):
                    values = await self._body(path, 0)
                self._log("kept", path)
                return values
            case lang.Finally():
                try:
                    return await self._body(path, 0)
                finally:
                    final = lang.last(path)
                    await self._observe(final, lambda: self._step(command.id, self._work, final))
            case _:
                return await self._observe(path, lambda: self._leaf(path, command))

    def _leaf(self, path: str, command: lang.Leaf) -> Awaitable[Any]:
        step, milliseconds = self._step, timedelta(milliseconds=1)
        match command:
            case lang.Step():
                options: dict[str, Any] = {"key": command.key or None}
                if command.retry > 1:
                    options["retry"] = Retry(command.retry, delay=command.delay * milliseconds)
                if command.timeout:
                    options["timeout"] = command.timeout * milliseconds
                options["undo"] = self._undo(command.undo)
                return step(command.id, self._function(command), path, **options)
            case lang.Sleep():
                return step.sleep(command.id, command.ms * milliseconds)
            case lang.Wait():
                limit = None if command.timeout is None else command.timeout * milliseconds
                return step.wait_for_event(command.id, command.event, timeout=limit)
            case lang.Transaction():
                undo = self._undo(command.undo)
                return step.transaction(command.id, self._transact, path, undo=undo)
            case lang.Ask():
                limit = None if command.timeout is None else command.timeout * milliseconds
                if command.callback:
                    return step.callback(command.id, timeout=limit)
                return step.approval(command.id, "Continue?", timeout=limit)
            case lang.LeaveTask():
                return step(command.id, self._leave, path)
            case lang.Nested():
                return step(command.id, self._nest, path)
            case lang.Child():
                return self._start_child(path, command)
            case _:
                assert_never(command)

    def _start_child(self, path: str, command: lang.Child) -> Awaitable[Any]:
        step, id = self._step, command.id
        work = ChildWork(step.run_id, path, command.ms, command.fails)
        match command.how:
            case "call":
                return step.call(id, CHILD, work)
            case "start":
                return self._start_and_wait(id, work)
            case "map":
                return self._only_one(step.map_runs(id, CHILD, [work]))

    async def _start_and_wait(self, id: str, work: ChildWork) -> Any:
        return await self._step.result(f"{id} ends", await self._step.start(id, CHILD, work))

    async def _only_one(self, mapped: Awaitable[list[Any]]) -> Any:
        (value,) = await mapped
        return value

    async def _observe(self, path: str, call: Callable[[], Awaitable[Any]]) -> Any:
        """Make a call of perdure, and log what the workflow function sees of it."""
        self._log("call", path)
        try:
            value = await call()
        except (StepError, StepFailed, StepTimeout, RunFailed, RollbackFailed) as error:
            self._saw("failed", path, f"{type(error).__name__}: {error}")
            raise
        except PerdureError as error:
            self._log("broke", path, f"{type(error).__name__}: {error}")
            raise
        except Exception as error:
            self._saw("failed", path, f"{type(error).__name__}: {error}")
            raise
        except asyncio.CancelledError:
            self._log("cut", path)
            raise
        self._saw("saw", path, repr(value))
        tokens = tokens_in(repr(value).encode())
        return tokens[0] if len(tokens) == 1 else value

    async def _parallel(self, path: str, command: lang.Parallel) -> Any:
        indexes = range(len(command.branches))
        if command.how == "all":
            return [*await self._step.all(*(self._body(path, n) for n in indexes))]
        if command.how not in lang.LEAVES_ONLY:
            return await join(command.how, [self._branch(path, n) for n in indexes])
        paths = [lang.child(path, n, 0) for n in indexes]
        if command.how == "calls":
            return await self._observe(path, lambda: self._all_calls(paths))
        ids = [_id(self._commands[each]) for each in paths]
        if command.how == "map":
            undo = self._undo(getattr(self._commands[paths[0]], "undo", ""))
            return await self._observe(
                path, lambda: self._step.map(ids[0], paths, self._work, undo=undo)
            )
        thunks = {id: self._thunk(each) for id, each in zip(ids, paths, strict=True)}
        return await self._observe(path, lambda: self._step.all(thunks))

    def _thunk(self, path: str) -> Callable[[], Any]:
        return lambda: self._work(path)

    def _branch(self, path: str, number: int) -> Callable[[], Awaitable[list[Any]]]:
        return lambda: self._body(path, number)

    async def _all_calls(self, paths: list[str]) -> list[Any]:
        values = await self._step.all(*self._calls(paths))
        for path, value in zip(paths, values, strict=True):
            self._saw("saw", path, repr(value))
        return [*values]

    async def _race_calls(self, id: str, paths: list[str]) -> Any:
        index, value = await self._step.race(id, *self._calls(paths))
        self._saw("saw", paths[index], repr(value))
        return index, value

    def _calls(self, paths: list[str]) -> list[Awaitable[Any]]:
        """Make calls that `step.all` or `step.race` awaits; what they return is logged there."""
        calls: list[Awaitable[Any]] = []
        for path in paths:
            self._log("call", path)
            calls.append(self._leaf(path, _leaf(self._commands[path])))
        return calls

    def _race(self, path: str, command: lang.Race) -> Awaitable[Any]:
        if command.calls:
            paths = [lang.child(path, n, 0) for n in range(len(command.branches))]
            return self._race_calls(command.id, paths)
        names = (chr(ord("a") + n) for n in range(len(command.branches)))
        return self._step.race(
            command.id, {name: self._branch(path, n) for n, name in enumerate(names)}
        )

    # The functions of steps.

    def _function(self, command: lang.Step) -> Callable[[str], Any]:
        return self._work_in_thread if command.thread and self._world.threads else self._work

    async def _work(self, path: str) -> Any:
        command, token = self._commands.get(path), self._begin(path)
        try:
            await asyncio.sleep(getattr(command, "ms", 0) / 1000)
        except asyncio.CancelledError:
            if not getattr(command, "wraps", False):
                raise
            raise Planned(f"interrupted {token}") from None
        return self._outcome(command, token)

    def _work_in_thread(self, path: str) -> Any:
        command, token = self._commands.get(path), self._begin(path)
        time.sleep(getattr(command, "ms", 0) / 1000)
        return self._outcome(command, token)

    def _outcome(self, command: lang.Command | None, token: str) -> Any:
        run, attempt = self._step.run_id, self._step.attempt
        if not isinstance(command, lang.Step):
            return {"x": token}
        if attempt <= command.fails and not (command.heals and self._world.healed(run)):
            raise (Planned if command.declared else Undeclared)(f"planned {token}")
        return _value(command.value, token)

    def _undo(self, kind: lang.Undo) -> Callable[[Any], Awaitable[None]] | None:
        """Return what undoes a step; the token in its value tells which one."""
        if not kind:
            return None

        async def undo(value: Any) -> None:
            step = self._step
            text = f"{step.executing} {step.idempotency_key}"
            self._log("undo", text=text, tokens=tokens_in(repr(value).encode()), n=step.attempt)
            await asyncio.sleep(0.01)
            if kind == "flaky" and step.attempt == 1:
                raise Planned("the first attempt fails")
            if kind == "broken" and not self._world.healed(step.run_id):
                raise Planned("the undo is broken")

        return undo

    async def _transact(self, connection: Any, path: str) -> Any:
        command, token = self._commands[path], self._begin(path)
        assert isinstance(command, lang.Transaction)
        assert self._world.insert is not None
        await self._world.insert(connection, self._step.run_id, path, token)
        # As a client's own timeout around a statement does.
        await asyncio.wait_for(asyncio.sleep(command.ms / 1000), 60)
        if command.fails:
            raise Planned(f"planned {token}")
        return {"x": token}

    async def _leave(self, path: str) -> Any:
        command, token = self._commands[path], self._begin(path)
        assert isinstance(command, lang.LeaveTask)

        async def leftover_task() -> None:
            await asyncio.sleep(command.after / 1000)
            if command.calls == "step":
                await self._refused(path, lambda: self._step("left", asyncio.sleep, 0.2))
            elif command.calls == "sleep":
                await self._refused(path, lambda: self._step.sleep("left", 0.05))

        task = asyncio.create_task(leftover_task())
        self._world.left_behind.add(task)
        task.add_done_callback(self._world.left_behind.discard)
        task.add_done_callback(retrieve)
        return {"x": token}

    async def _nest(self, path: str) -> Any:
        token = self._begin(path)
        await self._refused(path, lambda: self._step("inner", lambda: 1))
        return {"x": token}

    async def _refused(self, path: str, call: Callable[[], Awaitable[Any]]) -> None:
        """Call a step from a step's function, which the engine must refuse."""
        with suppress(Exception):
            await call()
            if hasattr(errors, "NestedStep"):
                self._log("nested", path)

    def _begin(self, path: str) -> str:
        token = self._world.token()
        key = self._step.idempotency_key
        self._log("begin", path, key, tokens=(token,), n=self._step.attempt)
        return token

    def _saw(self, kind: Kind, path: str, text: str) -> None:
        tokens = tokens_in(text.encode())
        if len(text) > 200:
            text = f"{text[:60]}… {hashlib.sha1(text.encode()).hexdigest()}"
        self._log(kind, path, text, tokens)

    def _log(
        self, kind: Kind, path: str = "", text: str = "", tokens: tuple[str, ...] = (), n: int = 0
    ) -> None:
        world = self._world
        if self._is_replay and kind in _SEEN:
            # It sees errors that the run itself does not see, and nothing comes of it.
            kind, text = "replay", f"{kind} {text}"
        line = Line(kind, world.process, self._step.run_id, self._name, path, text, tokens, n)
        world.log.write(line)


def _id(command: lang.Command) -> str:
    assert isinstance(command, lang.Step)
    return command.id


def _leaf(command: lang.Command) -> lang.Leaf:
    assert isinstance(command, lang.Leaf)
    return command


def _plain(value: Any) -> Any:
    """Return the output of a command as JSON: of an approval, who answered."""
    if isinstance(value, Approval):
        return value.by
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value


def _value(kind: lang.Value, token: str) -> Any:
    match kind:
        case "small":
            return {"x": token}
        case "large":
            return {"x": token, "pad": "x" * 30_000}
        case "unicode":
            return {"x": token, "naïve ☃\u2028": ["𝄞", 'é\n"\\', ""]}
        case "typed":
            at = datetime(2031, 2, 3, 4, 5, 6, 789, tzinfo=UTC)
            return {"x": token, "at": at, "price": Decimal("1.10"), "raw": b"\x00\xff"}
