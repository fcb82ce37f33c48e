"""Names of the engine's own records, as people see them."""

import pytest

from perdure.snapshot.labels import label_of


@pytest.mark.parametrize(
    ("key", "label"),
    [
        ("charge", "charge"),
        ("~undo:charge", "undo of charge"),
        ("~saga:booking", "saga booking"),
        ("~approve:wire", "approval of wire"),
        ("~signal:af00", "signal af00"),
        ("~notify@2.1:ship", "notification of ship"),
        ("~notify:~approve:wire", "notification of approval of wire"),
    ],
)
def test_a_record_has_a_name_for_people(key: str, label: str) -> None:
    assert label_of(key) == label
