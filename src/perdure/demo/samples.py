"""Customers, orders and other payloads of the sample shop, drawn at random."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from perdure.demo.shop import (
    Card,
    Catalogue,
    Day,
    Item,
    Newsletter,
    Order,
    Restock,
    Signup,
    import_catalogue,
    newsletter,
    nightly_report,
    order,
    print_labels,
    restock,
    welcome,
)
from perdure.runtime.definition import Definition

CUSTOMERS = ("acme", "globex", "initech", "umbrella", "hooli", "stark", "wayne", "wonka")
COUNTRIES = ("AT", "CH", "DE", "FR", "IT", "NL")
SUPPLIERS = ("northwind", "contoso", "fabrikam")
ARTICLES = (
    ("city-bicycle", 38_900),
    ("helmet", 5_950),
    ("bell", 890),
    ("basket", 2_490),
    ("lock", 3_450),
    ("front-light", 1_990),
)
NAMES = ("Ada", "Grace", "Edsger", "Barbara", "Tony", "Radia", "Leslie", "Margaret")


@dataclass(frozen=True)
class Sample:
    """A workflow of the shop, how often it is started, and a function that draws its payload."""

    workflow: Definition[Any, Any]
    share: int
    draw: Callable[[Random], Any]


def new_order(random: Random, items: Sequence[Item] = ()) -> Order:
    """Return an order of these items, or of random ones."""
    return Order(
        random.choice(CUSTOMERS),
        random.choice(COUNTRIES),
        list(items) or _items(random),
        Card(f"4111 1111 1111 {random.randrange(10_000):04d}", "11/31"),
        "SPRING10" if random.random() < 0.2 else None,
    )


def _items(random: Random) -> list[Item]:
    articles = random.sample(ARTICLES, random.randint(1, 4))
    return [Item(article, random.randint(1, 2), price) for article, price in articles]


def new_signup(random: Random) -> Signup:
    """Return a new customer."""
    name = random.choice(NAMES)
    return Signup(name, f"{name.lower()}@{random.choice(CUSTOMERS)}.example", random.random() < 0.7)


def new_restock(random: Random) -> Restock:
    """Return an order at a supplier."""
    article, _ = random.choice(ARTICLES)
    key = f"sk_live_{random.getrandbits(64):016x}"
    return Restock(article, random.randint(10, 80), random.choice(SUPPLIERS), key)


def new_day(random: Random) -> Day:
    """Return a day to report about; every other one has no orders."""
    return Day(f"2030-03-{random.randint(1, 28):02d}", random.choice((0, 137)))


def new_newsletter(random: Random) -> Newsletter:
    """Return a newsletter; some customers get it at several addresses."""
    return Newsletter("spring sale", random.choices(CUSTOMERS, k=random.randint(8, 24)))


SAMPLES = (
    Sample(order, 60, new_order),
    Sample(welcome, 12, new_signup),
    Sample(restock, 10, new_restock),
    Sample(import_catalogue, 6, lambda random: Catalogue(random.choice(SUPPLIERS), 30)),
    Sample(print_labels, 8, lambda random: random.randint(5, 40)),
    Sample(nightly_report, 4, new_day),
    Sample(newsletter, 4, new_newsletter),
)


def draw_sample(random: Random) -> Sample:
    """Draw a workflow to start, orders most often."""
    [sample] = random.choices(SAMPLES, [each.share for each in SAMPLES])
    return sample
