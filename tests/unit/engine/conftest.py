"""A clock that the test moves."""

import pytest

from perdure.testing import TestClock


@pytest.fixture
def clock() -> TestClock:
    return TestClock()
