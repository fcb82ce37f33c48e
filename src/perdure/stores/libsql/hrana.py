"""Hrana over HTTP, the protocol of libSQL servers: statements in, outcomes out.

A request is a pipeline on a stream. A stream that stays open answers with a baton, which the next
request on it must include.
"""

from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from perdure.errors import InvalidArgument, StoreError
from perdure.stores.sqlite.statements import Outcome, Statement

CLOSE = {"type": "close"}

_BEGIN = Statement("BEGIN IMMEDIATE", ())
_COMMIT = Statement("COMMIT", ())
_ROLLBACK = Statement("ROLLBACK", ())


class StatementError(StoreError):
    """The server refused a statement; `code` is SQLite's or the server's error code."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


class Answer(NamedTuple):
    """The result of each request of a pipeline, and how to continue the stream."""

    results: Sequence[Mapping[str, Any]]
    baton: str | None
    base_url: str | None


def execute_request(statement: Statement) -> dict[str, Any]:
    """Return the request that executes one statement."""
    return {"type": "execute", "stmt": _stmt(statement)}


def batch_request(statements: Sequence[Statement], *, atomic: bool) -> dict[str, Any]:
    """Return a request that executes statements until one fails; if `atomic`, all or none."""
    if not atomic:
        return _batch([_step(statement, after) for after, statement in enumerate(statements, -1)])
    steps = [_step(one, after) for after, one in enumerate([_BEGIN, *statements, _COMMIT], -1)]
    has_failed = {"type": "not", "cond": {"type": "ok", "step": len(steps) - 1}}
    # If BEGIN itself failed, a rollback would fail too and hide the reason.
    is_open = {"type": "ok", "step": 0}
    condition = {"type": "and", "conds": [is_open, has_failed]}
    return _batch([*steps, {"stmt": _stmt(_ROLLBACK), "condition": condition}])


def read_outcome(result: Mapping[str, Any]) -> Outcome:
    """Return the outcome of an executed statement, or raise `StatementError`."""
    return _outcome(_response(result)["result"])


def read_outcomes(result: Mapping[str, Any], count: int, *, atomic: bool) -> Sequence[Outcome]:
    """Return the outcomes of a batch, or raise `StatementError` for the first that failed."""
    batch = _response(result)["result"]
    for error in batch["step_errors"]:
        if error is not None:
            raise _statement_error(error)
    first = 1 if atomic else 0
    return [_outcome(step) for step in batch["step_results"][first : first + count]]


def _batch(steps: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {"type": "batch", "batch": {"steps": steps}}


def _step(statement: Statement, after: int) -> dict[str, Any]:
    if after < 0:
        return {"stmt": _stmt(statement)}
    return {"stmt": _stmt(statement), "condition": {"type": "ok", "step": after}}


def _stmt(statement: Statement) -> dict[str, Any]:
    sql, values = statement
    if isinstance(values, Mapping):
        named_args = [{"name": name, "value": _cell(value)} for name, value in values.items()]
        return {"sql": sql, "named_args": named_args}
    return {"sql": sql, "args": [_cell(value) for value in values]}


def _cell(value: object) -> dict[str, Any]:
    match value:
        case None:
            return {"type": "null"}
        case bool() | int():
            return {"type": "integer", "value": str(int(value))}
        case float():
            return {"type": "float", "value": value}
        case str():
            return {"type": "text", "value": value}
        case bytes():
            return {"type": "blob", "base64": b64encode(value).decode()}
        case _:
            raise InvalidArgument("values", value, "None, int, float, str or bytes")


def _response(result: Mapping[str, Any]) -> Mapping[str, Any]:
    if result["type"] == "error":
        raise _statement_error(result["error"])
    response: Mapping[str, Any] = result["response"]
    return response


def _statement_error(error: Mapping[str, Any]) -> StatementError:
    return StatementError(error["message"], error.get("code") or "")


def _outcome(result: Mapping[str, Any]) -> Outcome:
    rows = [tuple(_value(cell) for cell in row) for row in result["rows"]]
    return Outcome(rows, result["affected_row_count"])


def _value(cell: Mapping[str, Any]) -> Any:
    match cell["type"]:
        case "null":
            return None
        case "integer":
            return int(cell["value"])
        case "blob":
            # The server omits the padding.
            return b64decode(cell["base64"] + "==")
        case _:
            return cell["value"]
