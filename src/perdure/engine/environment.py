"""What an execution gets from outside the run."""

from collections.abc import Callable
from typing import Any

import msgspec

from perdure import codec
from perdure.engine.arguments import Arguments
from perdure.engine.target import ChildRuns


class Environment(msgspec.Struct, frozen=True, kw_only=True):
    """What an execution gets from outside the run.

    `errors` is where the classes of stored exceptions are looked up, `types` has the classes of
    values. `encode_input` checks and encodes the payload with which the run continues as new,
    `children` creates its child runs. `arguments` is how much of the arguments of steps is
    recorded. `callback_url` is where answers are received.
    """

    errors: codec.ErrorScope = codec.NOWHERE
    types: codec.DeclaredTypes = codec.NO_TYPES
    payload: object = None
    deps: Any = None
    encode_input: Callable[[Any], Any] | None = None
    children: ChildRuns | None = None
    arguments: Arguments = "off"
    callback_url: str = ""
