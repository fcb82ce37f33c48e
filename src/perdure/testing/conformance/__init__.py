"""The store contract as checks: run them on a store of your own with a few lines of pytest.

    from perdure.testing.conformance import StoreConformance

    class TestMyStore(StoreConformance):
        @pytest_asyncio.fixture
        async def store(self):
            async with MyStore() as store:  # fresh and empty
                yield store

The checks keep to what the store declares; one that does not apply is skipped and says why. What
else a test class can give (a clock to move, a second instance, a URL for other processes) are the
attributes and methods of `Harness`.
"""

from pkgutil import iter_modules

import pytest

pytest.register_assert_rewrite(*(f"{__name__}.{module.name}" for module in iter_modules(__path__)))

# Only modules that are imported after this explain their failures.
from perdure.testing.conformance.harness import Harness  # noqa: E402
from perdure.testing.conformance.suite import StoreConformance  # noqa: E402

__all__ = ["Harness", "StoreConformance"]
