"""What users' own tests can use: a clock that moves when told."""

from perdure.testing.clock import TestClock

__all__ = ["TestClock"]
