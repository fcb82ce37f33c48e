"""Error messages that are safe to show outside the application."""

from perdure.errors import PerdureError, RunConflict, RunNotFound, StoreUnavailable


def public_message(error: PerdureError) -> str:
    """Return the message of an error, without other callers' data.

    This leaves out the payload of another caller's run, which a conflict contains, and the address
    of the store.
    """
    match error:
        case RunNotFound():
            return f"There is no run {error.run_id!r}."
        case RunConflict():
            return (
                f"Run {error.run_id!r} already exists, with another workflow or payload. "
                "Choose another id."
            )
        case StoreUnavailable():
            return "The store is unavailable. Try again."
        case _:
            return str(error)
