"""The scales of charts. The templates draw them as SVG."""

import math
from datetime import timedelta

_SHORTEST, _LONGEST = 0.001, 86_400.0


def nice_top(value: float) -> float:
    """Return a round number that is not below the value, to end an axis with."""
    if value <= 4:
        return 4
    power = 10 ** math.floor(math.log10(value))
    return next(float(n * power) for n in (1, 1.5, 2, 3, 4, 5, 6, 8, 10) if n * power >= value)


def log_position(span: timedelta) -> float:
    """Return where a duration is on a log scale from 1 ms to 1 day, in percent."""
    seconds = min(max(span.total_seconds(), _SHORTEST), _LONGEST)
    return 1 + 98 * math.log(seconds / _SHORTEST) / math.log(_LONGEST / _SHORTEST)
