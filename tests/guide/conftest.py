"""Fixtures that the pages of the guide share."""

import pytest

from perdure.testing import TestClock
from tests.guide.shop import Shop


@pytest.fixture
def shop() -> Shop:
    return Shop()


@pytest.fixture
def clock() -> TestClock:
    return TestClock()
