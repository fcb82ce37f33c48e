"""Refuse data that a newer version of perdure has written."""

from perdure.errors import StoreError


def check_layout(
    location: str, number: int, newest: int, *, unit: str = "layout", alternative: str
) -> None:
    """Raise `StoreError` if the stored number of a layout, or another unit, is above `newest`."""
    if number > newest:
        raise StoreError(
            f"{location} was written by a newer version of perdure ({unit} {number}; this version "
            f"supports {unit}s up to {newest}): upgrade perdure, or choose another {alternative}"
        )
