"""What a program allows: how it may end, and which of its commands share an identity."""

from functools import cached_property
from typing import TypeAlias

from tests.durability.verifier import language as lang

Outcomes: TypeAlias = frozenset[bool]
"""Whether a command may succeed (True), fail (False), or both."""

OK: Outcomes = frozenset({True})
FAILS: Outcomes = frozenset({False})
EITHER: Outcomes = OK | FAILS


class Model:
    """The facts about a program that do not depend on its execution."""

    def __init__(self, program: lang.Body) -> None:
        self.program = program
        self.commands = dict(lang.walk(program))

    def identity(self, path: str) -> str:
        """Return what perdure must treat as one step: a key, or a command of the program."""
        command = self.commands.get(path)
        if isinstance(command, lang.Step) and command.key:
            return f"key {command.key}"
        return path

    def handled(self, path: str) -> bool:
        """Return whether the program itself handles a failure of this command."""
        return any(
            isinstance(self.commands[around], lang.Scope)
            or (isinstance(self.commands[around], lang.Try) and body == 0)
            for around, body in lang.ancestors(path)
        )

    def sagas(self, path: str) -> frozenset[str]:
        """Return the scopes around a command."""
        around = (each for each, _ in lang.ancestors(path))
        return frozenset(each for each in around if isinstance(self.commands[each], lang.Saga))

    def has_place(self, path: str) -> bool:
        """Return whether a step is always seen in the place of its record among the others.

        A key is one step, wherever it is called. The value of a race is seen after its verdict. A
        timeout of the program's own may cut off branches earlier or later than before. Calls that
        are awaited together are seen when the last one has returned, and a transaction has its
        place before it commits.
        """
        if any(isinstance(each, lang.Scope) for each in self.commands.values()):
            return False
        command = self.commands.get(path)
        around = [self.commands[each] for each, _ in lang.ancestors(path)]
        is_alone = not any(isinstance(each, lang.Race) or _awaits_commit(each) for each in around)
        return isinstance(command, lang.Step) and not command.key and is_alone

    def depth(self, path: str) -> int:
        """Return in how many branches a call is nested."""
        around = (self.commands[each] for each, _ in lang.ancestors(path))
        return sum(isinstance(each, lang.Parallel | lang.Race) for each in around)

    def may_fail(self, path: str) -> bool:
        """Return whether a failure of this call can be what the program planned."""
        command = self.commands.get(path)
        if command is None:
            return False
        if isinstance(command, lang.Step | lang.Transaction | lang.Child | lang.Ask):
            return self._leaf(path, command, healed=False) != OK
        # A race, step.all or step.map fails when a call inside of it fails.
        return any(False in self._of(path, command, healed=False) for _ in lang.bodies(command))

    def _may_be_cut(self, path: str) -> bool:
        """Return whether the program itself may cancel this call, apart from the end of the run."""
        around = [self.commands[each] for each, _ in lang.ancestors(path)]
        return any(
            isinstance(command, lang.Race | lang.Scope | lang.Saga)
            or (isinstance(command, lang.Parallel) and command.how in lang.CANCELLING)
            for command in around
        )

    def attempts(self, path: str) -> int:
        """Return how often one activation may run the function of a step."""
        command = self.commands.get(path)
        return command.retry if isinstance(command, lang.Step) else 1

    @cached_property
    def interrupts(self) -> bool:
        """Return whether a call may be cancelled by something other than a race."""
        return any(
            isinstance(command, lang.Scope | lang.Fail)
            or (
                isinstance(command, lang.Step | lang.Transaction | lang.Child | lang.Ask)
                and self.may_fail(path)
            )
            for path, command in self.commands.items()
        )

    def outcomes(self, *, healed: bool) -> Outcomes:
        """Return how the whole program may end."""
        return self._sequence("", self.program, healed)

    def _sequence(self, prefix: str, body: lang.Body, healed: bool) -> Outcomes:
        outcome = OK
        for index, command in enumerate(body):
            next_one = self._of(f"{prefix}{index}", command, healed)
            # It is reached only if everything before it succeeded.
            outcome = (outcome - OK) | next_one
            if outcome == FAILS:
                break
        return outcome

    def _inside(self, path: str, healed: bool) -> list[Outcomes]:
        return [
            self._sequence(f"{path}.{number}.", body, healed)
            for number, body in enumerate(lang.bodies(self.commands[path]))
        ]

    def _of(self, path: str, command: lang.Command, healed: bool) -> Outcomes:
        match command:
            case lang.Fail():
                return FAILS
            case lang.Scope():
                return OK
            case lang.Parallel():
                branches = self._inside(path, healed)
                if FAILS in branches:
                    return FAILS
                return frozenset().union(*branches)
            case lang.Race():
                return frozenset().union(*self._inside(path, healed))
            case lang.Try():
                body, handler = self._inside(path, healed)
                return body if body == OK else (body - FAILS) | handler
            case lang.Saga() | lang.Finally():
                return self._inside(path, healed)[0]
            case _:
                return self._leaf(path, command, healed=healed)

    def _leaf(self, path: str, command: lang.Leaf, *, healed: bool) -> Outcomes:
        match command:
            case lang.Transaction():
                return FAILS if command.fails else OK
            case lang.Child() if self._may_be_cut(path):
                # If the call is made again after a crash, it finds that its run was cancelled.
                return EITHER
            case lang.Child():
                if not command.fails:
                    return OK
                if not healed:
                    return FAILS
                return EITHER if self.handled(path) else OK
            case lang.Ask():
                # A callback that expires raises.
                return EITHER if command.callback and command.timeout is not None else OK
            case lang.Step(wraps=True):
                return EITHER if self._may_be_cut(path) else OK
            case lang.Step() if 0 < command.timeout < command.ms:
                return FAILS
            case lang.Step() if command.fails >= command.retry:
                if not (healed and command.heals):
                    return FAILS
                # A failure that was handled before the run was healed stays recorded.
                return EITHER if self.handled(path) else OK
            case _:
                return OK


def _awaits_commit(command: lang.Command) -> bool:
    """Return whether calls are awaited together, and one of them is a transaction."""
    if not isinstance(command, lang.Parallel) or command.how != "calls":
        return False
    return any(isinstance(each, lang.Transaction) for body in command.branches for each in body)
