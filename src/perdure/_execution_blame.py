"""Which failures led to an error."""

from collections.abc import Mapping


def blamed(failures: Mapping[str, BaseException], error: BaseException | None) -> list[str]:
    """Give the keys of failures that led to the error; all of them, when it does not show which."""
    seen = _chain(error)
    return [key for key, failure in failures.items() if id(failure) in seen] or list(failures)


def _chain(error: BaseException | None) -> set[int]:
    seen: set[int] = set()
    todo = [error]
    while todo:
        error = todo.pop()
        if error is not None and id(error) not in seen:
            seen.add(id(error))
            todo += [error.__cause__, error.__context__]
            if isinstance(error, BaseExceptionGroup):
                todo += error.exceptions
    return seen
