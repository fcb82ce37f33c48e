"""Random programs of limited size; a seed always generates the same one."""

from collections.abc import Callable
from random import Random
from typing import Any

import msgspec

from perdure import errors
from tests.durability.verifier import language as lang

# Some ids look like the path of a branch, or like a repeated call.
IDS = ("a", "b", "c", "a", "b", "1/a", "a#2")
EVENTS = ("go", "stop")
KEYS = {"k1": 4, "k2": 40}
_SHORT = (0, 0, 1, 5, 20, 60)
_JOINS: tuple[lang.How, ...] = (
    "gather", "gather", "collect", "taskgroup", "taskgroup", "wait", "first", "first", "exception",
    "wait_for", "tasks", "as_completed", "generator", "shield", "event", "condition", "queue",
    "stream", "semaphore", "anyio", "beside", "beside", "all", "all",
)  # fmt: skip


class Mix(msgspec.Struct, frozen=True):
    """The commands that programs are made of."""

    transactions: bool = True
    threads: bool = False
    size: int = 12


def generate(seed: str, mix: Mix) -> lang.Body:
    """Return the program of a seed."""
    return _Generator(Random(seed), mix).program()


class _Generator:
    def __init__(self, random: Random, mix: Mix) -> None:
        self._random = random
        self._mix = mix
        self._left = random.randint(2, mix.size)
        self._names = 0
        self._compound: dict[Callable[[int], lang.Command], int] = {
            self._parallel: 6,
            self._race: 3,
            self._try: 3,
            self._scope: 2,
            self._saga: 3,
            self._finally: 1,
        }
        self._leaves: dict[Callable[[], lang.Leaf], int] = {
            self._step: 8,
            self._keyed: 2,
            self._wrapping: 2,
            self._sleep: 4,
            self._wait: 4,
            self._ask: 3,
            self._transaction: 3 if mix.transactions else 0,
            self._leave: 1,
            self._child: 4,
            self._nested: 1 if hasattr(errors, "NestedStep") else 0,
        }

    def program(self) -> lang.Body:
        body = self._body(0)
        while self._left > 0:
            body += self._body(0)
        return body

    def _body(self, depth: int) -> lang.Body:
        count = self._random.choice((1, 1, 2, 2, 3))
        return tuple(self._command(depth) for _ in range(count))

    def _command(self, depth: int) -> lang.Command:
        self._left -= 1
        if depth < 3 and self._left > 0 and self._random.random() < 0.4:
            compound: lang.Command = self._draw(self._compound)(depth + 1)
            return compound
        if self._random.random() < 0.02:
            return lang.Fail()
        return self._leaf()

    def _draw(self, weights: dict[Any, int]) -> Any:
        return self._random.choices([*weights], [*weights.values()])[0]

    def _leaf(self) -> lang.Leaf:
        leaf: lang.Leaf = self._draw(self._leaves)()
        return leaf

    def _id(self) -> str:
        return self._random.choice(IDS)

    def _unique(self, name: str) -> str:
        self._names += 1
        return f"{name}-{self._names}"

    def _step(self) -> lang.Step:
        random = self._random
        step = lang.Step(self._id(), random.choice(_SHORT), declared=random.random() < 0.7)
        if random.random() < 0.2:
            retry, fails = random.choice((1, 1, 2, 3)), random.randint(1, 3)
            delay = random.choice((5, 5, 400))
            # Most of them heal, because a program that ends early tests little.
            heals = random.random() < 0.9
            step = msgspec.structs.replace(step, retry=retry, fails=fails, heals=heals, delay=delay)
        if random.random() < 0.05:
            # Far from the duration of the step, so that a busy machine makes no difference.
            step = msgspec.structs.replace(step, timeout=random.choice((30, 30_000)))
            if step.timeout == 30:
                step = msgspec.structs.replace(step, ms=2000, fails=0, retry=1)
        value = random.choice(("small", "small", "small", "large", "unicode", "typed"))
        thread = self._mix.threads and not step.timeout and random.random() < 0.2
        return msgspec.structs.replace(step, value=value, thread=thread, undo=self._undo())

    def _undo(self) -> lang.Undo:
        undo: lang.Undo = self._random.choice(("", "", "", "ok", "ok", "ok", "flaky", "broken"))
        return undo

    def _plain_step(self, id: str, undo: lang.Undo) -> lang.Step:
        fails = int(self._random.random() < 0.1)
        return lang.Step(id, self._random.choice(_SHORT), fails=fails, heals=bool(fails), undo=undo)

    def _keyed(self) -> lang.Step:
        # One key is one step, so it must do the same whichever call is first.
        key = self._random.choice([*KEYS])
        return lang.Step("keyed", KEYS[key], key=key)

    def _wrapping(self) -> lang.Step:
        return lang.Step(self._id(), self._random.choice((5, 60, 300)), wraps=True)

    def _sleep(self) -> lang.Sleep:
        return lang.Sleep(self._id(), self._random.choice((0, 20, 100, 300, 900)))

    def _wait(self) -> lang.Wait:
        timeout = self._random.choice((None, 0, 0, 50, 400, 900))
        return lang.Wait(self._id(), self._random.choice(EVENTS), timeout)

    def _transaction(self) -> lang.Transaction:
        random = self._random
        fails = random.random() < 0.07
        return lang.Transaction(self._id(), random.choice(_SHORT), fails, self._undo())

    def _ask(self) -> lang.Ask:
        timeout = self._random.choice((None, 50, 400, 900))
        return lang.Ask(self._id(), timeout, self._random.random() < 0.3)

    def _leave(self) -> lang.LeaveTask:
        call: lang.Call = self._random.choice(("nothing", "step", "sleep"))
        return lang.LeaveTask(self._id(), self._random.choice((0, 50, 300)), call)

    def _child(self) -> lang.Child:
        random = self._random
        how: lang.Start = random.choice(("call", "call", "start", "map"))
        return lang.Child(self._id(), how, random.choice(_SHORT), random.random() < 0.1)

    def _nested(self) -> lang.Nested:
        return lang.Nested(self._id())

    def _parallel(self, depth: int) -> lang.Parallel:
        count = self._random.choice((2, 2, 2, 3))
        if self._random.random() < 0.2:
            how: lang.How = self._random.choice(("names", "map"))
            ids = self._random.sample(["a", "b", "c", "d"], count)
            undo = self._undo() if how == "map" else ""
            return lang.Parallel(how, tuple((self._plain_step(id, undo),) for id in ids))
        if self._random.random() < 0.1:
            return lang.Parallel("calls", self._calls(count))
        how = self._random.choice(_JOINS)
        if how == "beside" and self._random.random() < 0.3:
            # Concurrent waits of a branch and its parent: their ids collide unless escaped.
            branch, own = (
                msgspec.structs.replace(self._random.choice((self._sleep, self._wait))(), id=id)
                for id in ("a", "1/a")
            )
            return lang.Parallel(how, ((branch, *self._body(depth)), (own, *self._body(depth))))
        if self._random.random() < 0.3:
            # The same calls in every branch: only the branches distinguish them.
            return lang.Parallel(how, (self._body(depth),) * count)
        return lang.Parallel(how, tuple(self._body(depth) for _ in range(count)))

    def _race(self, depth: int) -> lang.Race:
        count = self._random.choice((2, 2, 3))
        if self._random.random() < 0.4:
            return lang.Race(self._unique("race"), self._calls(count), calls=True)
        return lang.Race(self._unique("race"), tuple(self._body(depth) for _ in range(count)))

    def _calls(self, count: int) -> tuple[lang.Body, ...]:
        return tuple((self._leaf(),) for _ in range(count))

    def _try(self, depth: int) -> lang.Try:
        body = self._body(depth)
        if self._random.random() < 0.6:
            failing = lang.Step(self._id(), self._random.choice(_SHORT), fails=9, heals=True)
            body += (failing,)
        return lang.Try(body, self._body(depth))

    def _scope(self, _: int) -> lang.Scope:
        # One call, or parallel ones: which calls are made must not depend on when the scope ends.
        inner = _as_one_call(self._leaf())
        if self._random.random() < 0.3:
            other = _as_one_call(self._leaf())
            inner = lang.Parallel(self._random.choice(_JOINS), ((inner,), (other,)))
        return lang.Scope(self._random.choice((1, 10, 30, 100)), inner)

    def _saga(self, depth: int) -> lang.Command:
        body = self._body(depth)
        if self._random.random() < 0.5:
            failing = lang.Step(self._id(), self._random.choice(_SHORT), fails=9, heals=True)
            # After the steps that are undone, or while they are executed and recorded.
            beside = lang.Parallel(self._random.choice(_JOINS), (body, (failing,)))
            body = (beside,) if self._random.random() < 0.4 else (*body, failing)
        saga = lang.Saga(self._unique("saga"), body)
        return lang.Try((saga,), self._body(depth)) if self._random.random() < 0.5 else saga

    def _finally(self, depth: int) -> lang.Finally:
        return lang.Finally(self._unique("final"), self._body(depth))


def _as_one_call(leaf: lang.Leaf) -> lang.Command:
    """Return a command that makes one call; a run that was started is awaited by another call."""
    if isinstance(leaf, lang.Child) and leaf.how == "start":
        return msgspec.structs.replace(leaf, how="call")
    return leaf
