"""Encode Python values as JSON, and decode them: how the values of steps are stored.

Types that JSON lacks are written with a tag: `{"~datetime": "2024-05-01T09:30:00"}`. Objects with
fields are written as their fields and rebuilt from the step's return type. A part that cannot be
restored is reported as a `Loss` with its path. Nothing is pickled, and nothing is imported because
its name is stored.
"""

from perdure.codec.annotations import error_type, return_type, returns_result
from perdure.codec.causes import EXCEPTION, decode_cause, encode_cause, prepare_error
from perdure.codec.declared import NO_TYPES, DeclaredTypes, check_types, is_restorable
from perdure.codec.exceptions import (
    ErrorCause,
    SerializedCause,
    ThrownCause,
    members_of,
    recorded_cause,
    traceback_of,
)
from perdure.codec.fingerprints import fingerprint
from perdure.codec.problems import find_problems, problem_of
from perdure.codec.scope import NOWHERE, ErrorScope, class_name
from perdure.codec.tags import MAX_DEPTH, JSONValue, is_plain, is_shallow
from perdure.codec.text import dumps, loads
from perdure.codec.values import Prepared, convert, decode, encode, prepare
from perdure.codec.writer import Loss

__all__ = [
    "EXCEPTION",
    "MAX_DEPTH",
    "NOWHERE",
    "NO_TYPES",
    "DeclaredTypes",
    "ErrorCause",
    "ErrorScope",
    "JSONValue",
    "Loss",
    "Prepared",
    "SerializedCause",
    "ThrownCause",
    "check_types",
    "class_name",
    "convert",
    "decode",
    "decode_cause",
    "dumps",
    "encode",
    "encode_cause",
    "error_type",
    "find_problems",
    "fingerprint",
    "is_plain",
    "is_restorable",
    "is_shallow",
    "loads",
    "members_of",
    "prepare",
    "prepare_error",
    "problem_of",
    "recorded_cause",
    "return_type",
    "returns_result",
    "traceback_of",
]
