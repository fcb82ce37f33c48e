"""JSON as folding HTML."""

import re
from html import unescape
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from perdure.dashboard.rendering import environment
from perdure.insights.beginning import beginning
from perdure.insights.outline import MAX_SHOWN, Outline
from perdure.insights.redaction import DEFAULT_REDACTION

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


def test_the_beginning_of_a_value_says_how_much_is_left_out() -> None:
    rows = [{"id": n, "token": "x"} for n in range(100_000)]
    outline = Outline(beginning(DEFAULT_REDACTION, rows, ("payload",)))
    assert outline.is_cut
    assert (outline.root.size, outline.root.members[-1].kind) == (100_000, "cut")
    assert Outline(beginning(DEFAULT_REDACTION, rows[:2], ("payload",))).is_cut is False


def test_a_list_that_was_left_out_is_not_shown_as_empty() -> None:
    value: Any = [[[[[1]]]]] * 3000
    assert "[]" not in fold(beginning(DEFAULT_REDACTION, value, ("payload",)))
