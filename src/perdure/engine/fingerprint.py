"""A hash of a function's definition that changes when its code changes.

Comments, formatting and docstrings do not count. If the source is not available, the compiled code
is used instead.
"""

import ast
import hashlib
import inspect
import textwrap
from collections.abc import Callable
from types import CodeType
from typing import Any

_hashes: dict[CodeType, str] = {}


def definition_hash(fn: Callable[..., Any]) -> str:
    """Return the hash of a function's definition."""
    code = getattr(inspect.unwrap(fn), "__code__", None)
    if not isinstance(code, CodeType):
        return _digest(type(fn).__qualname__)
    digest = _hashes.get(code)
    if digest is None:
        digest = _hashes[code] = _digest(_meaning(fn, code))
    return digest


def _meaning(fn: Callable[..., Any], code: CodeType) -> str:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(fn)))
    except (OSError, TypeError, SyntaxError, ValueError):
        return _compiled(code)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            _drop_docstring(node)
    return ast.dump(tree, annotate_fields=False)


def _drop_docstring(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> None:
    match node.body:
        case [ast.Expr(value=ast.Constant(value=str())), *rest]:
            node.body = rest or [ast.Pass()]
        case _:
            pass


def _compiled(code: CodeType) -> str:
    constants = [
        _compiled(item) if isinstance(item, CodeType) else repr(item) for item in code.co_consts
    ]
    return repr((code.co_code, code.co_names, code.co_varnames, constants))


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
