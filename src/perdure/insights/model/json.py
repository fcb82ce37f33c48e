"""The type of stored values."""

from typing import Any, TypeAlias

Json: TypeAlias = Any
"""A value as it is stored, after redaction."""
