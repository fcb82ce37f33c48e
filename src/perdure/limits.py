"""Queues and limits: how many runs or steps may be under way at once, or begin per period.

emails = Queue("emails", concurrency=50, per_key=Limits(rate=Rate(10, per="1m")))
tokens = Limit("openai-tokens", 2_000_000, per="1m")
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal, TypeAlias
from urllib.parse import unquote

from perdure.clock import Duration, parse_duration
from perdure.errors import InvalidArgument, InvalidDuration
from perdure.validation import check_flag, check_int, check_text, check_user_id, is_encodable

MAX_PERMITS = 1000
"""The maximum number of permits of a limit. A larger limit has permits of several units each."""

LimitOf: TypeAlias = Literal["concurrency", "rate", "key_concurrency", "key_rate", "steps"]
"""What a limit applies to: runs of a queue, runs of each of its keys, or steps."""

_MAX_NAME, _MAX_KEY = 100, 200
# The separator of queue and key, and characters with which one key could imitate another.
_ESCAPED = str.maketrans({"%": "%25", "~": "%7E", "\0": "%00"})


def _check_period(per: Duration) -> timedelta:
    period = parse_duration(per, "per")
    if not period:
        raise InvalidDuration("per", per, "a positive duration")
    return period


def _check_concurrency(concurrency: int | None) -> int | None:
    return None if concurrency is None else check_int(concurrency, "concurrency")


def _check_rate(rate: object) -> "Rate | None":
    if rate is not None and not isinstance(rate, Rate):
        raise InvalidArgument("rate", rate, 'Rate(n, per="1m")')
    return rate


@dataclass(frozen=True, slots=True, init=False)
class Rate:
    """At most `n` in any period of length `per`, by the store's clock."""

    n: int
    per: timedelta

    def __init__(self, n: int, *, per: Duration) -> None:
        object.__setattr__(self, "n", check_int(n, "n"))
        object.__setattr__(self, "per", _check_period(per))


@dataclass(frozen=True, slots=True, init=False)
class Limits:
    """How many runs may be executed at once, and how often a run may start."""

    concurrency: int | None
    rate: Rate | None

    def __init__(self, *, concurrency: int | None = None, rate: Rate | None = None) -> None:
        object.__setattr__(self, "concurrency", _check_concurrency(concurrency))
        object.__setattr__(self, "rate", _check_rate(rate))

    def __bool__(self) -> bool:
        return self.concurrency is not None or self.rate is not None


NO_LIMITS = Limits()


@dataclass(frozen=True, slots=True, init=False)
class Queue:
    """Runs that share an order and limits, over all workers of a store.

    ```python
    emails = Queue("emails", concurrency=50, rate=Rate(100, per="1m"))
    ```

    `concurrency` and `rate` apply to all runs of the queue, `per_key` to the runs of each key. Runs
    of one key start in the order in which they were enqueued. The keys take turns; with
    `fair=False` the run that was enqueued first starts first, whatever its key, unless the limits
    of its key make it wait.
    """

    name: str
    concurrency: int | None
    rate: Rate | None
    per_key: Limits
    fair: bool

    def __init__(
        self,
        name: str,
        *,
        concurrency: int | None = None,
        rate: Rate | None = None,
        per_key: Limits = NO_LIMITS,
        fair: bool = True,
    ) -> None:
        if not isinstance(per_key, Limits):
            raise InvalidArgument("per_key", per_key, "Limits(concurrency=…, rate=…)")
        set_field = object.__setattr__
        set_field(self, "name", check_name(name))
        set_field(self, "concurrency", _check_concurrency(concurrency))
        set_field(self, "rate", _check_rate(rate))
        set_field(self, "per_key", per_key)
        set_field(self, "fair", check_flag(fair, "fair"))

    @property
    def has_keys(self) -> bool:
        """Whether the runs of each key are in a separate queue.

        A worker looks at a limited number of keys, so it could not find the earliest run over all
        keys.
        """
        return self.fair or bool(self.per_key)


@dataclass(frozen=True, slots=True, init=False)
class Limit:
    """A limit on steps, over all workers of a store.

    At most `n` units are in use at once or, with `per`, in any period of that length. An attempt of
    a step costs one unit, or the units of `limit.cost(units)`.
    """

    name: str
    n: int
    per: timedelta | None

    def __init__(self, name: str, n: int, *, per: Duration | None = None) -> None:
        object.__setattr__(self, "name", check_name(name))
        object.__setattr__(self, "n", check_int(n, "n"))
        object.__setattr__(self, "per", None if per is None else _check_period(per))

    def cost(self, units: int) -> "Cost":
        """Return the limit with the cost of one attempt."""
        return Cost(self, units)


@dataclass(frozen=True, slots=True, init=False)
class Cost:
    """How many units of a limit an attempt of a step costs."""

    limit: Limit
    units: int

    def __init__(self, limit: Limit, units: int) -> None:
        if check_int(units, "units") > limit.n:
            expected = f"at most {limit.n:,}, the limit {limit.name!r}"
            raise InvalidArgument("units", units, expected, "It would wait forever")
        object.__setattr__(self, "limit", limit)
        object.__setattr__(self, "units", units)


def as_cost(value: Limit | Cost | None) -> Cost | None:
    """Return the cost for a step's `limit` option; a plain `Limit` costs one unit."""
    if value is None or isinstance(value, Cost):
        return value
    if not isinstance(value, Limit):
        raise InvalidArgument("limit", value, "a Limit, or limit.cost(units)")
    return Cost(value, 1)


def check_name(name: object, parameter: str = "name") -> str:
    """Check the name of a queue or limit."""
    text = check_user_id(name, parameter)
    if "/" in text or "~" in text or len(text) > _MAX_NAME:
        expected = f"a name of at most {_MAX_NAME} characters without '/' and '~'"
        raise InvalidArgument(parameter, name, expected, "What differs by run belongs in key=")
    return text


def queue_with_key(name: str, key: object) -> str:
    """Return the full name of a queue for the runs of one key: "emails/customer-42".

    A long key is replaced by its beginning and its hash.
    """
    if not isinstance(key, str) or not is_encodable(key):
        hint = "The function that is passed as key= must return a string"
        raise InvalidArgument("key", key, "a string", hint)
    escaped_key = key.translate(_ESCAPED)
    if len(escaped_key) > _MAX_KEY:
        digest = hashlib.sha256(key.encode()).hexdigest()
        escaped_key = f"{escaped_key[: _MAX_KEY - 80]}~{digest}"
    return f"{name}/{escaped_key}"


def split_queue(full_name: str) -> tuple[str, str | None]:
    """Return the name of a queue and the key, or `None` if there is no key."""
    name, slash, key = full_name.partition("/")
    return name, unquote(key) if slash else None


@dataclass(frozen=True, slots=True)
class PermitLimit:
    """A limit, represented by permits in a store: `count` permits of `unit` units each."""

    name: str
    n: int
    per: timedelta | None = None

    @property
    def queue(self) -> str:
        """The queue that contains the permits."""
        return f"~permit:{self.name}"

    @property
    def unit(self) -> int:
        """How many units a permit has."""
        return -(-self.n // MAX_PERMITS)

    @property
    def count(self) -> int:
        """How many permits there are; together they have at most `n` units."""
        return self.n // self.unit

    def ids(self) -> list[str]:
        """Return the ids of the permits."""
        return [f"{self.queue}#{self.unit}.{number}" for number in range(self.count)]

    def units_of(self, permit_id: str) -> int:
        """Return the units of a permit; 0 if it no longer belongs to this limit."""
        unit, _, number = permit_id.rpartition("#")[2].partition(".")
        is_own = int(unit) == self.unit and int(number) < self.count
        return self.unit if is_own else 0


def queue_limits(queue: Queue, full_name: str) -> list[PermitLimit]:
    """Return the limits from which a run of this queue and key needs permits."""
    limits = _limits_of(queue.name, Limits(concurrency=queue.concurrency, rate=queue.rate))
    if full_name != queue.name:
        limits += _limits_of(full_name, queue.per_key)
    return limits


def declared_limits(queue: Queue) -> list[PermitLimit]:
    """Return the limits of a queue; the names of limits per key end in "/*"."""
    return queue_limits(queue, f"{queue.name}/*")


def with_numbers(queue: Queue, numbers: Mapping[str, int]) -> Queue:
    """Return a queue with other numbers in its limits, by the names of `declared_limits`."""
    return Queue(
        queue.name,
        concurrency=numbers.get(f"queue:{queue.name}", queue.concurrency),
        rate=_with_number(queue.rate, numbers.get(f"rate:{queue.name}")),
        per_key=Limits(
            concurrency=numbers.get(f"queue:{queue.name}/*", queue.per_key.concurrency),
            rate=_with_number(queue.per_key.rate, numbers.get(f"rate:{queue.name}/*")),
        ),
        fair=queue.fair,
    )


def _with_number(rate: Rate | None, n: int | None) -> Rate | None:
    # Without a rate there is no period for the number.
    return rate if rate is None or n is None else Rate(n, per=rate.per)


def limit_name(name: str, of: "LimitOf") -> str:
    """Return the name of a limit of a queue, or of steps, among all limits of a store."""
    kinds = {
        "concurrency": f"queue:{name}",
        "rate": f"rate:{name}",
        "key_concurrency": f"queue:{name}/*",
        "key_rate": f"rate:{name}/*",
        "steps": f"limit:{name}",
    }
    if of not in kinds:
        raise InvalidArgument("of", of, " or ".join(map(repr, kinds)))
    return kinds[of]


def step_limit(limit: Limit) -> PermitLimit:
    """Return the limit of steps as permits."""
    return PermitLimit(f"limit:{limit.name}", limit.n, limit.per)


def _limits_of(name: str, limits: Limits) -> list[PermitLimit]:
    permit_limits: list[PermitLimit] = []
    if limits.concurrency is not None:
        permit_limits.append(PermitLimit(f"queue:{name}", limits.concurrency))
    if limits.rate is not None:
        permit_limits.append(PermitLimit(f"rate:{name}", limits.rate.n, limits.rate.per))
    return permit_limits


def check_queue(queue: object) -> Queue | None:
    """Check the `queue` of a workflow."""
    if queue is not None and not isinstance(queue, Queue):
        hint = f"Write Queue({queue!r})" if isinstance(queue, str) else ""
        raise InvalidArgument("queue", queue, "a Queue", hint)
    return queue


def check_queue_names(names: object) -> tuple[str, ...]:
    """Check the names of queues that a worker is to serve; "" stands for runs in no queue."""
    if isinstance(names, str) or not isinstance(names, (list, tuple, set, frozenset)):
        raise InvalidArgument("queues", names, 'a list of names of queues, such as ["emails"]')
    if not names:
        hint = "A worker without queues would do nothing; leave it out to serve all"
        raise InvalidArgument("queues", names, 'names of queues, or "" for runs in none', hint)
    for name in names:
        if name != "":
            check_name(check_text(name, "queues", "names of queues"), "queues")
    return tuple(dict.fromkeys(names))
