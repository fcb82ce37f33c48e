"""Record the arguments of steps, for people who look at the run.

The engine never reads them: a fingerprint decides whether a step is called with the same arguments
as before.
"""

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias, get_args

from perdure import codec
from perdure.errors import CodecError, InvalidArgument

Arguments: TypeAlias = Literal["off", "preview", "full"]

PREVIEW = 256
"""The approximate size of the preview of a step's arguments, in bytes of JSON."""


def check_arguments(value: object, parameter: str) -> Arguments:
    """Check how much of the arguments is recorded, or raise `InvalidArgument`."""
    choices: tuple[Arguments, ...] = get_args(Arguments)
    for choice in choices:
        if value == choice:
            return choice
    raise InvalidArgument(parameter, value, "'off', 'preview' or 'full'")


def record_of(args: Sequence[Any], arguments: Arguments) -> list[Any]:
    """Return the arguments as JSON; in a preview, values that do not fit become their size."""
    recorded_args: list[Any] = []
    room = PREVIEW if arguments == "preview" else None
    for value in args:
        try:
            data = codec.prepare(value, lambda: None).data
            size = len(codec.dumps(data))
        except CodecError:
            # They are only for display, so they must not make a step fail.
            data, size = f"… {type(value).__name__}", 0
        if room is not None and size > room:
            data, size = f"… {size:,} bytes", 0
        elif room is not None:
            room -= size
        recorded_args.append(data)
    return recorded_args
