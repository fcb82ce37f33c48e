"""The workflows of the sample shop: small ones that show everything a dashboard displays."""

from dataclasses import dataclass, field
from functools import partial

from perdure.demo.services import (
    CarrierDown,
    HttpError,
    OutOfStock,
    ReportFailed,
    Services,
    SupplierBusy,
)
from perdure.engine.step import Step
from perdure.limits import Limits, Queue, Rate
from perdure.retry import Retry
from perdure.runtime.definition import workflow
from perdure.schedules import Schedule


@dataclass
class Item:
    """One line of an order; the price is in cents."""

    article: str
    quantity: int
    price: int


@dataclass
class Card:
    """A credit card; a dashboard does not show its number."""

    card_number: str
    expires: str


@dataclass
class Order:
    """What a customer ordered."""

    customer: str
    country: str
    items: list[Item]
    card: Card
    coupon: str | None = None

    @property
    def total(self) -> int:
        """The price of all items, in cents."""
        return sum(item.quantity * item.price for item in self.items)


@dataclass
class Receipt:
    """The bank's confirmation of a payment."""

    id: str
    amount: int
    currency: str = "EUR"


@dataclass
class Payment:
    """What to charge a customer, in cents."""

    customer: str
    amount: int


@dataclass
class Email:
    """An email to one customer."""

    to: str
    template: str


@dataclass
class Newsletter:
    """The same email to many customers."""

    topic: str
    customers: list[str]


@dataclass
class Signup:
    """A new customer."""

    name: str
    email: str
    newsletter: bool = True


@dataclass
class Restock:
    """An order at a supplier, with the key of its interface."""

    article: str
    quantity: int
    supplier: str
    api_key: str = field(repr=False)


@dataclass
class Catalogue:
    """A catalogue to import, page by page."""

    supplier: str
    pages: int


@dataclass
class Day:
    """A day of the shop, and how many orders it had."""

    date: str
    orders: int


APPROVED_ABOVE = 50_000
"""Orders of more than this many cents need an approval."""

EMAILS = Queue("emails", concurrency=4, rate=Rate(120, per="1m"), per_key=Limits(concurrency=1))
"""Emails are sent a few at a time, one after another to each customer."""

CARRIER_RETRIES = Retry(5, delay=2, max_delay=10)
SUPPLIER_RETRIES = Retry(6, delay="5m", max_delay="2h")


async def reserve(step: Step[Services], item: Item) -> str:
    """Reserve one item in the warehouse."""
    if item.article == "sold-out":
        raise OutOfStock(f"article {item.article!r}: 0 left, {item.quantity} ordered")
    await step.deps.call("warehouse", 0.08)
    return step.deps.number("res")


async def authorize(step: Step[Services], payment: Payment) -> str:
    """Let the bank reserve an amount."""
    await step.deps.call("bank", 0.2)
    return step.deps.number("auth")


async def capture(step: Step[Services], payment: Payment) -> Receipt:
    """Charge the customer's card."""
    await step.deps.call("bank", 0.3)
    return Receipt(step.deps.number("ch"), payment.amount)


@workflow("payment")
async def pay(step: Step[Services], payload: Payment) -> Receipt:
    """Charge a customer, as a run that an order calls."""
    await step("authorize", authorize, step, payload)
    return await step("capture", capture, step, payload)


async def ship(step: Step[Services], order: Order) -> dict[str, str]:
    """Hand the parcel to the carrier."""
    try:
        await step.deps.call("carrier", 0.6)
    except HttpError as error:
        raise CarrierDown(f"no pickup in {order.country}") from error
    return {"tracking": step.deps.number("trk"), "carrier": f"{order.country} Post"}


async def send_email(step: Step[Services], to: str, template: str) -> str:
    """Send an email from a template."""
    await step.deps.call("mail", 0.1)
    return step.deps.number(template)


@workflow("order", version=2, errors=[CarrierDown, OutOfStock])
async def order(step: Step[Services], payload: Order) -> str:
    """Reserve, approve if it is large, charge, wait until the payment settled, and ship."""
    step.tag(customer=payload.customer, country=payload.country)
    step.report(progress=0.1, note="reserving")
    await step.map("reserve", payload.items, partial(reserve, step), concurrency=4)
    if payload.total > APPROVED_ABOVE:
        step.report(progress=0.2, note="waiting for an approval")
        question = f"Ship goods for €{payload.total / 100:,.2f} to {payload.customer}?"
        decision = await step.approval("approval", question, to="sales", timeout="2d")
        if not decision.approved:
            return "not approved"
    payment = Payment(payload.customer, payload.total)
    receipt = await step.call("charge", pay, payment, inherit=["customer"])
    step.report(progress=0.6, note="payment settles")
    await step.sleep("settle", "30s")
    step.report(progress=0.8, note="shipping")
    parcel = await step("ship", ship, step, payload, retry=CARRIER_RETRIES)
    await step("notify", send_email, step, payload.customer, "shipped", retry=3)
    return f"{receipt.id}: {parcel['tracking']}"


@workflow("send-email", queue=EMAILS, key=lambda email: email.to)
async def send_one(step: Step[Services], payload: Email) -> str:
    """Send one email, when its queue has room."""
    return await step("send", send_email, step, payload.to, payload.template, retry=3)


@workflow("newsletter")
async def newsletter(step: Step[Services], payload: Newsletter) -> int:
    """Send the same email to many customers, each in its own run."""
    emails = [Email(customer, payload.topic) for customer in payload.customers]
    return len(await step.map_runs("send", send_one, emails))


@workflow("welcome")
async def welcome(step: Step[Services], payload: Signup) -> int:
    """Send three emails to a new customer, some days apart."""
    step.tag(plan="newsletter" if payload.newsletter else "plain")
    await step("hello", send_email, step, payload.email, "hello", retry=3)
    await step.sleep("a day later", "1d")
    await step("tips", send_email, step, payload.email, "tips", retry=3)
    await step.sleep("three days later", "3d")
    await step("offer", send_email, step, payload.email, "offer", retry=3)
    return 3


async def order_at_supplier(step: Step[Services], restock: Restock) -> str:
    """Order an article at its supplier."""
    try:
        await step.deps.call("supplier", 0.5)
    except HttpError as error:
        raise SupplierBusy(f"{restock.supplier}: try again later") from error
    return step.deps.number("po")


@workflow("restock", errors=[SupplierBusy])
async def restock(step: Step[Services], payload: Restock) -> str:
    """Order at a supplier that is often busy, and wait for the delivery."""
    step.tag(supplier=payload.supplier)
    number = await step("order", order_at_supplier, step, payload, retry=SUPPLIER_RETRIES)
    delivered = await step.wait_for_event("delivery", "delivered", timeout="7d")
    return f"{number}: {'delivered' if delivered else 'lost'}"


async def import_page(step: Step[Services], page: int) -> int:
    """Import one page of a catalogue; return how many articles it had."""
    await step.deps.call("catalogue", 0.2)
    return 10 + page % 7


@workflow("import-catalogue")
async def import_catalogue(step: Step[Services], payload: Catalogue) -> dict[str, int]:
    """Import the pages of a catalogue, and report the progress."""
    step.tag(supplier=payload.supplier)
    articles = 0
    for first in range(0, payload.pages, 10):
        pages = range(first, min(first + 10, payload.pages))
        articles += sum(await step.map("page", pages, partial(import_page, step), concurrency=3))
        step.report(progress=pages.stop / payload.pages, note=f"{pages.stop} pages")
    return {"pages": payload.pages, "articles": articles}


async def read_revenue(step: Step[Services], day: Day) -> int:
    """Return the revenue of a day."""
    await step.deps.call("warehouse", 0.4)
    return day.orders * 4_250


async def average_basket(step: Step[Services], day: Day, revenue: int) -> float:
    """Return the average basket. On a day without orders, this fails."""
    await step.deps.call("warehouse", 0.2)
    try:
        return revenue / day.orders
    except ZeroDivisionError as error:
        raise ReportFailed(f"average basket of {day.date}") from error


@workflow("nightly-report", errors=[ReportFailed])
async def nightly_report(step: Step[Services], payload: Day) -> str:
    """Report the revenue of a day."""
    revenue = await step("revenue", read_revenue, step, payload)
    average = await step("average", average_basket, step, payload, revenue)
    return f"{payload.date}: {average / 100:.2f} EUR per order"


async def label_parcels(step: Step[Services], count: int) -> int:
    """Print labels: one long step that reports its progress."""
    for label in range(count):
        await step.deps.call("printer", 1)
        step.report(progress=(label + 1) / count, note=f"label {label + 1} of {count}")
    return count


async def count_articles(step: Step[Services]) -> int:
    """Return how many articles the warehouse has."""
    await step.deps.call("warehouse", 0.5)
    return 400 + step.deps.random.randrange(100)


@workflow("stock-check", schedule=Schedule(every="1m"))
async def check_stock(step: Step[Services]) -> int:
    """Count what is in the warehouse; a schedule starts it."""
    return await step("count", count_articles, step)


@workflow("print-labels")
async def print_labels(step: Step[Services], payload: int) -> int:
    """Print the labels of a shipment."""
    return await step("print", label_parcels, step, payload)


WORKFLOWS = (
    *(order, pay, welcome, newsletter, send_one, restock),
    *(import_catalogue, nightly_report, check_stock, print_labels),
)
