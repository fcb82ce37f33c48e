"""Failures: how exceptions are stored, what the function sees, and how they are restored."""

from perdure.codec.exceptions import (
    SerializedCause,
    bare_cause,
    cause_of,
    recorded_cause,
    restore,
    thrown_of,
)
from perdure.codec.reader import untag
from perdure.codec.scope import NOWHERE, ErrorScope
from perdure.codec.tags import JSONValue, is_shallow
from perdure.codec.values import TOO_DEEP, check_shallow
from perdure.codec.writer import Form, Loss, Writer
from perdure.errors import CodecError

EXCEPTION = "exception"
"""The first part of the paths of losses in an exception."""


def encode_cause(error: object, scope: ErrorScope = NOWHERE) -> SerializedCause:
    """Encode an exception, or any other value that stands for a failure. Never raises.

    If the class of an exception is found in `scope`, its full name is stored.
    """
    writer = Writer(Form.LOST)

    def write(value: object) -> tuple[JSONValue, bool]:
        loss_count = writer.loss_count
        return writer.write_root(value, "cause"), writer.loss_count == loss_count

    try:
        cause = (
            cause_of(error, write, scope)
            if isinstance(error, BaseException)
            else thrown_of(error, write)
        )
    except Exception:  # noqa: BLE001 - a failure must be recorded, whatever it contains
        return bare_cause(error)
    return cause if is_shallow(cause) else bare_cause(error)


def decode_cause(cause: SerializedCause, scope: ErrorScope = NOWHERE) -> object:
    """Decode the exception or value of a stored cause.

    An exception is restored with its class if the class is built into Python, belongs to perdure or
    is found in `scope`; otherwise it becomes a `StepError` with its name, message and traceback.
    Its causes, its notes and the members of a group are restored as well.
    """
    try:
        return restore(check_shallow(cause), scope, lambda data: untag(data, "cause"))
    except RecursionError:
        raise CodecError(TOO_DEEP, "cause") from None


def prepare_error(
    error: BaseException, scope: ErrorScope
) -> tuple[SerializedCause, BaseException, tuple[Loss, ...]]:
    """Return an exception as it is stored, as the workflow function sees it, and its losses.

    The function sees the original object if a replay can raise an equal one. Otherwise it sees what
    a replay will raise: a `StepError`, or an exception of the same class without the lost parts.
    """
    cause = encode_cause(error, scope)
    visible = decode_cause(cause, scope)
    if not isinstance(visible, BaseException):
        raise CodecError("the stored exception was not restored as an exception", "cause")
    losses = _losses(error, visible)
    if not losses:
        return cause, error, ()
    visible.__traceback__ = error.__traceback__
    visible.__context__ = error
    return cause, visible, tuple(loss for loss in losses if loss.path)


def _losses(error: BaseException, visible: BaseException) -> list[Loss]:
    """Return what distinguishes a restored exception from the original.

    A class that was not found is not listed: the `StepError` that the function sees shows it.
    """
    cause = recorded_cause(visible)
    if type(visible) is not type(error) or cause is None:
        return [Loss("", "non-json")]
    losses = [Loss(f"{EXCEPTION}.{name}", "non-json") for name in cause.get("lost", ())]
    if isinstance(error, BaseExceptionGroup) and isinstance(visible, BaseExceptionGroup):
        for pair in zip(error.exceptions, visible.exceptions, strict=True):
            losses += _losses(*pair)
    return losses
