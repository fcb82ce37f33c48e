"""The services that the sample shop calls: they take a while, and some of them fail at times."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from random import Random


class HttpError(Exception):
    """An HTTP response that is not a success."""


class CarrierDown(Exception):
    """The carrier does not accept parcels at the moment."""


class SupplierBusy(Exception):
    """The supplier asks to be called again later."""


class OutOfStock(Exception):
    """An article cannot be delivered."""


class ReportFailed(Exception):
    """A report cannot be created."""


FAILURE_RATES = {"carrier": 0.3, "supplier": 0.4, "mail": 0.05}
"""How often a call of each service fails; services that are not listed never fail."""


@dataclass
class Services:
    """The services of the shop; `pause` makes a call take some seconds.

    Calls of the services in `outages` always fail.
    """

    pause: Callable[[float], Awaitable[None]]
    random: Random
    outages: set[str] = field(default_factory=set)

    async def call(self, service: str, seconds: float) -> None:
        """Take about `seconds` seconds, and fail as often as the service does."""
        await self.pause(round(seconds * (0.5 + self.random.random()), 3))
        fails = self.random.random() < FAILURE_RATES.get(service, 0)
        if fails or service in self.outages:
            raise HttpError(f"503 Service Unavailable: https://{service}.example/v2")

    def number(self, prefix: str) -> str:
        """Return an id as such services assign them."""
        return f"{prefix}_{self.random.getrandbits(32):08x}"
