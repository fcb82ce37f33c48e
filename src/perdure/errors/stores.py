"""Errors of stores."""

from perdure.errors.error import PerdureError


class StoreError(PerdureError):
    """An operation of the store failed; the driver's exception is the cause."""


class StoreUnavailable(StoreError):
    """The store is currently unreachable; the message says where, and how long it was retried."""


class StoreNotOpened(StoreUnavailable):
    """The store could not be reached on its first use; its address may be wrong."""


class StoreCorrupted(StoreError):
    """Stored data cannot be read."""


class StoreClosed(StoreError):
    """The store, or the committer that writes to it, is closed."""


class PermitLost(StoreError):
    """A permit expired while a run used it; the run continues once it has a new one."""

    def __init__(self, run_id: str, limit: str) -> None:
        super().__init__(
            f"run {run_id!r} was stopped: its permit of limit {limit!r} expired, and another "
            "process may use it now; the run continues from its records"
        )
        self.run_id = run_id
        self.limit = limit


class MissingAbility(StoreError):
    """The store does not declare a capability that an operation needs."""

    def __init__(self, store: object, ability: str, needed_for: str = "") -> None:
        name = store if isinstance(store, str) else type(store).__name__
        text = f"{name} has no {ability!r} ability"
        if needed_for:
            text += f", which {needed_for} needs"
        super().__init__(f"{text}; choose a store that declares it (docs/stores)")
        self.ability = ability


class ValueTooLarge(StoreError):
    """A value is larger than the store accepts."""

    def __init__(self, subject: str, size: int, limit: int) -> None:
        super().__init__(
            f"{subject} is {size:,} bytes, more than the {limit:,} the store accepts; "
            "store large data elsewhere and record a reference, or raise max_value_size"
        )
        self.size = size
        self.limit = limit
