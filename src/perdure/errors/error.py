"""The base class of perdure's errors."""


class PerdureError(Exception):
    """The base class of perdure's errors."""
