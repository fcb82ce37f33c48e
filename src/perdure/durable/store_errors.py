"""Errors of stores that are not perdure's own."""

from perdure.errors import PerdureError, StoreError
from perdure.store import Store


class store_errors:  # noqa: N801  # a context manager, like contextlib.suppress
    """Turns exceptions of a user's own store into a `StoreError` that says what failed."""

    __slots__ = ("_action", "_store")

    def __init__(self, store: Store, action: str) -> None:
        self._store = store
        self._action = action

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, Exception) and not isinstance(error, PerdureError):
            text = f"{type(self._store).__name__} could not {self._action}: {error}"
            raise StoreError(text) from error
