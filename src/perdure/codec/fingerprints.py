"""The fingerprint of a step's arguments, by which a replay notices that they have changed."""

from types import CoroutineType
from typing import Any
from zlib import crc32

from perdure.codec.scope import full_name
from perdure.codec.tags import JSONValue, is_plain
from perdure.codec.writer import Form, Writer, sorted_json
from perdure.errors import CodecError, InvalidArgument

_NO_ARGUMENTS = f"{crc32(b'[]'):08x}"


def fingerprint(args: tuple[object, ...]) -> str:
    """Return a short string that is the same for equal arguments in every process.

    An argument that is not data is represented by the name of its class. A coroutine is refused.
    """
    if not args:
        return _NO_ARGUMENTS
    data: Any = args
    for arg in args:
        if type(arg) is not str or not arg.isascii():
            data = [_fingerprint_data(arg) for arg in args]
            break
    return f"{crc32(sorted_json(data)):08x}"


def _fingerprint_data(arg: object) -> JSONValue:
    if type(arg) is CoroutineType:
        # Closed, so that Python does not complain a second time.
        arg.close()
        raise InvalidArgument("args", arg, "the value of a call", "An `await` is missing before it")
    try:
        return arg if is_plain(arg) else Writer(Form.FINGERPRINT).write_root(arg, "")
    except (CodecError, RecursionError):
        return {"~type": full_name(type(arg))}
