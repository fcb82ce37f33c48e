"""Refuse data that a newer version of perdure has written."""

from perdure.errors import StoreError


def check_layout(
    where: str, stored: int, known: int, *, unit: str = "layout", alternative: str
) -> None:
    """Raise `StoreError` if the stored number of the layout, or another unit, is unknown."""
    if stored > known:
        raise StoreError(
            f"{where} was written by a newer version of perdure ({unit} {stored}; this version "
            f"knows {unit}s up to {known}): upgrade perdure, or choose another {alternative}"
        )
