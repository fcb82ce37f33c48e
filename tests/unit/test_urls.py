"""Ids in URLs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.urls import decode_id, encode_id

ids = st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\0"), min_size=1)


@given(ids)
def test_every_id_comes_back_from_its_segment(id: str) -> None:
    assert decode_id(encode_id(id)) == id


@given(ids)
def test_a_segment_cannot_change_the_path(id: str) -> None:
    segment = encode_id(id)
    assert segment.isascii()
    assert not set(segment) & set("/?#%\\ ")
    assert segment.strip(".")


@pytest.mark.parametrize("id", ["order-1", "a.b:c@d", "new", "x.json", "a~b", "-"])
def test_an_ordinary_id_appears_as_it_is(id: str) -> None:
    assert encode_id(id) == id


@pytest.mark.parametrize("id", ["..", ".", "a/b", "~x", "a b", "ü", "%2e", "a#b"])
def test_any_other_id_is_encoded(id: str) -> None:
    assert encode_id(id).startswith("~")


@pytest.mark.parametrize("segment", ["~", "~%", "a/b", "..", "~b3JkZXItMQ", "~gA"])
def test_a_segment_that_belongs_to_no_id_is_refused(segment: str) -> None:
    """`~b3JkZXItMQ` would be a second address of `order-1`."""
    assert decode_id(segment) is None
