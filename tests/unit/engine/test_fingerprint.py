"""The hash of a function: which changes of its source it reflects."""

import linecache
from typing import Any

import pytest

from perdure.engine.fingerprint import definition_hash


def hash_of(source: str) -> str:
    """Return the hash of the function `body` that this source defines."""
    space: dict[str, Any] = {}
    name = f"<source {hash(source)}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    exec(compile(source, name, "exec"), space)
    return definition_hash(space["body"])


PLAIN = "async def body(step):\n    return await step('a', work, 1)\n"


@pytest.mark.parametrize(
    "source",
    [
        "async def body(step):\n    # why\n    return await step('a', work, 1)  # because\n",
        "async def body(step):\n    'What it does.'\n    return await step('a', work, 1)\n",
        "async def body(\n  step,\n):\n\n  return await step(\n    'a', work, 1,\n  )\n",
        'async def body(step):\n  return (await step("a", work, 1))\n',
    ],
    ids=["comments", "docstring", "layout", "quotes"],
)
def test_comments_docstrings_and_layout_do_not_change_the_hash(source: str) -> None:
    """Neither do quotes."""
    assert hash_of(source) == hash_of(PLAIN)


@pytest.mark.parametrize(
    "source",
    [
        "async def body(step):\n    return await step('b', work, 1)\n",
        "async def body(step):\n    return await step('a', work, 2)\n",
        "async def body(step):\n    await step('a', work, 1)\n",
    ],
)
def test_code_changes_the_hash(source: str) -> None:
    """Any change of the code counts."""
    assert hash_of(source) != hash_of(PLAIN)


def test_a_function_without_source_is_hashed_by_its_compiled_code() -> None:
    """Two functions with the same code have the same hash."""
    spaces: list[dict[str, Any]] = [{}, {}, {}]
    for space, value in zip(spaces, (1, 1, 2), strict=True):
        exec(f"async def body(step): return {value}", space)
    one, same, other = (definition_hash(space["body"]) for space in spaces)
    assert (one == same, one == other) == (True, False)
