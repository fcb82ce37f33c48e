"""Find the recorded failures that led to an error."""

from collections.abc import Container, Iterator, Mapping
from typing import Any

from perdure.errors import StepFailed
from perdure.result import Err


def leading_to(
    failures: Mapping[str, BaseException], end: BaseException | Err[Any] | None
) -> list[str]:
    """Return the keys of the failures that caused an exception, or a returned `Err`.

    A failure counts if it is the exception itself, a cause or context of it, or a member of a
    group; or if its error was returned. A failure that the function caught and handled does not
    count, even if a step that was called in the handler failed later.
    """
    keys_of_failures = {id(failure): key for key, failure in failures.items()}
    keys_of_errors = {id(f.error): key for key, f in failures.items() if isinstance(f, StepFailed)}
    links = _links(end, stop_at=keys_of_failures)
    keys = (keys_of_failures.get(id(link)) or keys_of_errors.get(id(link)) for link in links)
    return list(dict.fromkeys(key for key in keys if key is not None))


def passing_through(
    sagas: Mapping[str, BaseException],
    failures: Mapping[str, BaseException],
    end: BaseException | Err[Any] | None,
) -> list[str]:
    """Return the keys of the sagas that an exception, or a returned `Err`, passed through."""
    failure_ids = {id(failure) for failure in failures.values()}
    links = {id(link) for link in _links(end, stop_at=failure_ids)}
    return [
        key
        for key, error in sagas.items()
        if id(error) in links or (isinstance(error, StepFailed) and id(error.error) in links)
    ]


def _links(end: BaseException | Err[Any] | None, stop_at: Container[int]) -> Iterator[object]:
    visited_ids: set[int] = set()
    todo: list[object] = [end.error, end.cause] if isinstance(end, Err) else [end]
    while todo:
        link = todo.pop()
        if link is None or id(link) in visited_ids:
            continue
        visited_ids.add(id(link))
        yield link
        if id(link) in stop_at or not isinstance(link, BaseException):
            # The context of a step's failure only shows where the step was called.
            continue
        todo += [link.__cause__, link.__context__]
        if isinstance(link, BaseExceptionGroup):
            todo += link.exceptions
