"""The shrinker reduces a failing program while it keeps failing."""

import time
from collections.abc import Callable, Iterator

import msgspec

from tests.durability.verifier import language as lang


def shrink(
    program: lang.Body, fails: Callable[[lang.Body], bool], seconds: float = 20
) -> lang.Body:
    """Return the smallest program found in the given time for which `fails` still holds."""
    until = time.monotonic() + seconds
    smaller = True
    while smaller:
        smaller = False
        for candidate in _smaller(program):
            if time.monotonic() > until:
                return program
            if candidate and fails(candidate):
                program, smaller = candidate, True
                break
    return program


def _smaller(body: lang.Body) -> Iterator[lang.Body]:
    """Yield programs that are one change simpler, the largest changes first."""
    for index, command in enumerate(body):
        before, after = body[:index], body[index + 1 :]
        yield before + after
        if not isinstance(command, lang.Scope):
            for inner in lang.bodies(command):
                yield (*before, *inner, *after)
    for index, command in enumerate(body):
        before, after = body[:index], body[index + 1 :]
        for simpler in _simpler(command):
            yield (*before, simpler, *after)


def _simpler(command: lang.Command) -> Iterator[lang.Command]:
    replace = msgspec.structs.replace
    match command:
        case lang.Parallel() | lang.Race():
            yield from _fewer_branches(command)
            if isinstance(command, lang.Race):
                if command.calls:
                    yield replace(command, calls=False)
            elif command.how != "gather" and not lang.has_only_leaves(command):
                yield replace(command, how="gather")
        case lang.Try():
            for body in _smaller(command.body):
                yield replace(command, body=body)
            for handler in _smaller(command.handler):
                yield replace(command, handler=handler)
        case lang.Saga() | lang.Finally():
            for body in _smaller(command.body):
                yield replace(command, body=body)
        case lang.Scope(inner=lang.Parallel() as inner):
            for branch in inner.branches:
                yield replace(command, inner=branch[0])
        case lang.Step():
            for name in (
                "undo",
                "thread",
                "wraps",
                "value",
                "timeout",
                "declared",
                "retry",
                "fails",
            ):
                plain = lang.Step(command.id)
                if getattr(command, name) != getattr(plain, name):
                    yield replace(command, **{name: getattr(plain, name)})
        case _:
            return


def _fewer_branches(command: lang.Parallel | lang.Race) -> Iterator[lang.Command]:
    leaves = lang.has_only_leaves(command)
    branches = command.branches
    for index, branch in enumerate(branches):
        before, after = branches[:index], branches[index + 1 :]
        if len(branches) > 1:
            yield msgspec.structs.replace(command, branches=before + after)
        for body in _smaller(branch):
            if body or not leaves:
                yield msgspec.structs.replace(command, branches=(*before, body, *after))
