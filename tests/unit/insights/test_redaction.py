"""Redaction by name, path and function, in values and in texts."""

import pytest

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
