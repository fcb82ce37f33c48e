"""The store contract as pytest checks, to run on any store.

    from perdure.testing.conformance import StoreConformance

    class TestMyStore(StoreConformance):
        @pytest_asyncio.fixture
        async def store(self):
            async with MyStore() as store:  # new and empty
                yield store

Checks of abilities that the store does not declare are skipped with the reason. The attributes and
methods of `Harness` show what else a test class can provide: a clock to advance, a second instance,
a URL for other processes.
"""

from pkgutil import iter_modules

import pytest

pytest.register_assert_rewrite(*(f"{__name__}.{module.name}" for module in iter_modules(__path__)))

# pytest rewrites assertions only in modules that are imported after this.
from perdure.testing.conformance.harness import Harness  # noqa: E402
from perdure.testing.conformance.suite import StoreConformance  # noqa: E402

__all__ = ["Harness", "StoreConformance"]
