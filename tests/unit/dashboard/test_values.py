"""JSON as folding HTML."""

import re
from html import unescape
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from perdure.dashboard.rendering import environment
from perdure.dashboard.values import MAX_SHOWN, Outline, visible

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


def fold(value: Any) -> str:
    """Return a value as pages show it."""
    module: Any = environment().get_template("ui.html").module
    return str(module.value(value))


@given(json_values)
def test_nothing_in_a_value_becomes_markup(value: Any) -> None:
    tags = set(re.findall(r"</?(\w+)", fold(value)))
    assert tags <= {"div", "span", "details", "summary", "ul", "li"}


def test_a_script_in_a_value_is_text() -> None:
    html = fold({"<script>": "</script><img src=x onerror=alert(1)>"})
    assert "<script>" not in html
    assert "<img" not in html


def test_numbers_keep_every_digit() -> None:
    assert "12345678901234567890123" in fold(12345678901234567890123)
    assert "0.1" in fold(0.1)


def test_keys_keep_their_order() -> None:
    text = unescape(re.sub("<[^>]*>", "", fold({"b": 1, "a": 2})))
    assert text == '{"b": 1, "a": 2}'


def test_a_large_value_is_cut() -> None:
    value = ["x" * 100] * 100_000
    assert len(fold(value)) < 4 * MAX_SHOWN
    assert Outline(value).is_cut
    assert "99," in fold(value)


def test_a_deep_value_is_cut() -> None:
    value: Any = 1
    for _ in range(500):
        value = [[value], 1]
    assert "more" in fold(value)


def test_invisible_characters_are_shown() -> None:
    assert visible("a\u202eb\x1b[31m") == "a\\u202eb\\u001b[31m"
    assert visible("line\n\ttab ü 🎉") == "line\n\ttab ü 🎉"
