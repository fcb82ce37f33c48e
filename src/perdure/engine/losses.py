"""Warn about parts of a value that could not be recorded, once, when the record is made."""

import logging
from collections.abc import Sequence

from perdure import codec

logger = logging.getLogger(__name__)


def warnings_of(
    key: str, losses: Sequence[codec.Loss], visible: object
) -> tuple[dict[str, str], ...]:
    """Log and return a warning for each part of a value that could not be recorded exactly.

    `visible` is what the function sees instead of the value.
    """
    for loss in losses:
        logger.warning("step %r: %s", key, _explain(loss, visible))
    return tuple(
        {"type": "lossy_value", "stepId": key, "path": loss.path, "reason": loss.reason}
        for loss in losses
    )


def _explain(loss: codec.Loss, visible: object) -> str:
    """Explain what cannot be restored, and how to fix it if only its class is missing."""
    class_name = "" if loss.cls is None else f" ({loss.cls.__name__})"
    is_lost = loss.path == "value" and visible is None
    seen = "None" if is_lost else "what was recorded"
    text = (
        f"{loss.path}{class_name} cannot be restored exactly after a crash ({loss.reason}), so the "
        f"function sees {seen}."
    )
    if loss.path.startswith(f"{codec.EXCEPTION}."):
        return f"{text} Raise an exception in the step whose attributes are plain data"
    if loss.cls is None or loss.reason != "non-json" or not codec.is_restorable(loss.cls):
        return f"{text} Return plain data, or objects with fields, from the step"
    name = loss.cls.__name__
    # A part of a value is restored by the type of the whole value, which is unknown here.
    hint = name if loss.path.isidentifier() else f"…{name}…"
    return (
        f"{text} Write returns={hint}, or pass a function with that return annotation instead of "
        f"a lambda, or declare types=[{name}] for the workflow"
    )
