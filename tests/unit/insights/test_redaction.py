"""Redaction by name, path and function, in values and in texts."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.insights.beginning import MEMBERS, beginning, total_of
from perdure.insights.redaction import MASK, NOTHING_REDACTED, Redact, lookup

KEYS = "password PASSWORD db_password accessToken access-token accesstoken apikey API_KEY"
MORE_KEYS = "stripeApiKey Authorization client_secret_value cardNumber passwords"


@pytest.mark.parametrize("key", [*KEYS.split(), *MORE_KEYS.split()])
def test_keys_match_however_they_are_written(key: str) -> None:
    assert Redact().value({key: "hunter2"}, ("payload",)) == {key: MASK}


@pytest.mark.parametrize("key", ["secretary", "passport", "tokenizer", "session", "dsnake"])
def test_words_that_only_share_a_prefix_are_shown(key: str) -> None:
    assert Redact().value({key: "x"}, ("payload",)) == {key: "x"}


def test_a_number_of_tokens_is_shown() -> None:
    assert Redact().value({"tokens": 512, "cvv": 123}, ("payload",)) == {"tokens": 512, "cvv": MASK}


def test_nothing_of_a_redacted_value_is_left() -> None:
    value = {"secret": {"a": [1, 2]}, "list": [{"token": None}], "~map": 1}
    assert Redact().value(value, ()) == {"secret": MASK, "list": [{"token": MASK}], "~map": 1}


def test_dicts_that_are_stored_as_pairs_are_redacted() -> None:
    stored = {"~map": [["password", "x"], [1, {"token": "y"}], ["a", 2]]}
    redacted_value = Redact().value(stored, ("payload",))
    assert redacted_value == {"~map": [["password", MASK], [1, {"token": MASK}], ["a", 2]]}


def test_paths_hide_one_place_and_a_star_stands_for_one_part() -> None:
    redact = Redact(paths=("payload.*.email", "steps.charge.note"))
    redacted_value = redact.value(
        {"a": {"email": 1}, "email": 2, "b": [{"email": 3}]}, ("payload",)
    )
    assert redacted_value == {"a": {"email": MASK}, "email": 2, "b": [{"email": 3}]}
    assert redact.value({"note": 1}, ("steps", "charge")) == {"note": MASK}


def test_a_function_decides_by_path_and_value() -> None:
    redact = Redact(names=(), function=lambda path, value: path[-1] == "x" and value == 1)
    assert redact.value({"x": 1, "y": {"x": 2}}, ("payload",)) == {"x": MASK, "y": {"x": 2}}


def test_urls_lose_their_password_everywhere() -> None:
    redacted_value = Redact().value({"url": "see postgres://ana:p@ss@db/shop?x=1"}, ("payload",))
    assert redacted_value == {"url": f"see postgres://ana:{MASK}@db/shop?x=1"}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("login failed: password=hunter2, host=db", f"login failed: password={MASK}, host=db"),
        ("got {'api_key': 'k 1', 'n': 2}", f"got {{'api_key': {MASK}, 'n': 2}}"),
        ('{"token":"abc"}', f'{{"token":{MASK}}}'),
        ("Authorization: Bearer abc.def-123", f"Authorization: Bearer {MASK}"),
        ("basic authentication failed", "basic authentication failed"),
        ("redis://:hunter2@cache/0", f"redis://:{MASK}@cache/0"),
        ("invalid token: expected a comma", "invalid token: expected a comma"),
    ],
)
def test_texts_lose_what_looks_like_a_secret(text: str, shown: str) -> None:
    assert Redact().text(text) == shown


@pytest.mark.parametrize("part", ["a", "://", "a:", "password=", "bearer ", "x://y:", "'"])
def test_long_texts_take_linear_time(part: str) -> None:
    text = part * (500_000 // len(part)) + " ://"
    assert len(Redact().text(text)) > 0


def test_nothing_is_hidden_on_request() -> None:
    value = {"password": "x", "url": "a://b:c@d"}
    assert NOTHING_REDACTED.value(value, ("payload",)) == value
    assert NOTHING_REDACTED.text("password=x") == "password=x"


def test_what_is_hidden_cannot_be_looked_up() -> None:
    payload = {"auth": {"password": {"a": 1}}, "items": [{"sku": "x"}]}
    assert lookup(payload, ["items", "0", "sku"], Redact()) == "x"
    with pytest.raises(LookupError):
        lookup(payload, ["auth", "password", "a"], Redact())


keys = st.sampled_from(
    ["pass", "word", "api", "key", "To", "ken", "_", "-", "1", "é", "s", "Kſ", "\u0663"]
)


@given(st.lists(keys, max_size=6).map("".join))
def test_excluding_most_keys_quickly_excludes_no_secret(key: str) -> None:
    redact = Redact()
    assert redact.hides((key,)) == redact._hides_name(key, None)


values = st.recursive(
    st.none() | st.integers() | st.sampled_from(["x", "redis://a:b@c"]),
    lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(["a", "token", "~map"]), inner),
    max_leaves=20,
)


@given(values)
def test_the_beginning_of_a_small_value_is_all_of_it(value: Any) -> None:
    assert beginning(Redact(), value, ("payload",)) == Redact().value(value, ("payload",))


def test_the_beginning_of_a_large_value_is_redacted_and_short() -> None:
    rows: list[Any] = [{"id": n, "token": "secret"} for n in range(100_000)]
    first: Any = beginning(Redact(), {"rows": rows, "last": 1}, ("payload",))
    assert (total_of(first), total_of(first["rows"])) == (2, 100_000)
    assert len(first["rows"]) <= MEMBERS
    assert first["rows"][0] == {"id": 0, "token": MASK}
    assert "secret" not in str(first)


def test_the_beginning_of_pairs_is_redacted() -> None:
    pairs = [[n, {"token": "secret"}] for n in range(100_000)]
    first: Any = beginning(Redact(), {"~map": pairs}, ("payload",))
    assert len(first["~map"]) <= MEMBERS
    assert "secret" not in str(first)
