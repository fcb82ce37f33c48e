"""What the function of a run is given, and how its values are recorded."""

from collections.abc import Callable
from typing import Any

import msgspec

from perdure import codec
from perdure.engine.arguments import Arguments
from perdure.engine.target import ChildRuns


class Environment(msgspec.Struct, frozen=True, kw_only=True):
    """What an execution has from outside the run.

    `errors` is where the classes of stored exceptions are looked for, `types` has the classes of
    values. `encode_input` checks and encodes the payload with which the run continues as new,
    `children` makes the runs that it starts. `arguments` says what is recorded of the arguments of
    steps. `callback_url` is where answers are taken.
    """

    errors: codec.ErrorScope = codec.NOWHERE
    types: codec.DeclaredTypes = codec.NO_TYPES
    payload: object = None
    deps: Any = None
    encode_input: Callable[[Any], Any] | None = None
    children: ChildRuns | None = None
    arguments: Arguments = "off"
    callback_url: str = ""
