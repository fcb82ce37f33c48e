"""Which recorded failures led to an error."""

from collections.abc import Iterator, Mapping
from typing import Any

from perdure.errors import StepFailed
from perdure.result import Err


def leading_to(
    failures: Mapping[str, BaseException], end: BaseException | Err[Any] | None
) -> list[str]:
    """Return the keys of the failures that an exception, or a returned `Err`, comes from.

    A failure counts when it is the exception itself, a cause or context of it, or a member of a
    group; or when its error was returned. One that the function caught and handled is none of
    these.
    """
    chain = {id(link) for link in _links(end)}
    return [
        key
        for key, failure in failures.items()
        if id(failure) in chain or (isinstance(failure, StepFailed) and id(failure.error) in chain)
    ]


def _links(end: BaseException | Err[Any] | None) -> Iterator[object]:
    seen: set[int] = set()
    todo: list[object] = [end.error, end.cause] if isinstance(end, Err) else [end]
    while todo:
        link = todo.pop()
        if link is None or id(link) in seen:
            continue
        seen.add(id(link))
        yield link
        if isinstance(link, BaseException):
            todo += [link.__cause__, link.__context__]
        if isinstance(link, BaseExceptionGroup):
            todo += link.exceptions
