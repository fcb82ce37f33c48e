"""Any key-value store as a store of runs."""

from collections.abc import Awaitable, Callable
from typing import Literal, ParamSpec, TypeAlias, TypeVar, cast, get_args

import msgspec

from perdure.clock import Clock, SystemClock
from perdure.errors import InvalidArgument, StoreCorrupted
from perdure.keyvalue import AsyncKeyValue, KeyValueStore, MemoryKeyValue, as_keyvalue
from perdure.store import MAX_VALUE_SIZE, Capabilities
from perdure.stores._scan import Answer, EmbeddedStore
from perdure.stores.keyvalue.documents import Documents
from perdure.stores.keyvalue.leases import KeyValueDesk
from perdure.validation import check_prefix

P = ParamSpec("P")
T = TypeVar("T")
Survives: TypeAlias = Literal["nothing", "process_crash", "power_loss"]


class KeyValueRuns(EmbeddedStore):
    """Keeps runs as documents in a key-value store, which it never closes.

    Where the key-value store compares and sets (`perdure.keyvalue.CompareAndSet`), leases are
    atomic and processes may share the runs. Elsewhere the store is exact among the tasks of one
    process, and declares so: `lease="best_effort"`, `shared="process"`.
    """

    def __init__(
        self, kv: KeyValueStore, prefix: str, clock: Clock, max_value_size: int, survives: Survives
    ) -> None:
        documents = Documents(kv)
        capabilities = Capabilities(
            journal=True,
            lease="atomic" if documents.is_atomic else "best_effort",
            schedule=True,
            inbox=True,
            maintenance=True,
            shared="network" if documents.is_atomic and survives != "nothing" else "process",
            survives=survives,
            max_value_size=max_value_size,
        )
        super().__init__(KeyValueDesk(documents, prefix), clock, capabilities)

    async def close(self) -> None:
        """Refuse further calls; the key-value store stays open, it is the caller's."""
        self._closed = True

    async def _call(self, verb: Callable[P, Answer[T]], /, *args: P.args, **options: P.kwargs) -> T:
        try:
            return await cast("Awaitable[T]", verb(*args, **options))
        except msgspec.MsgspecError as error:
            raise StoreCorrupted(f"a document of the store cannot be read: {error}") from error


def keyvalue(
    store: KeyValueStore | AsyncKeyValue,
    *,
    prefix: str = "",
    clock: Clock = SystemClock(),
    max_value_size: int = MAX_VALUE_SIZE,
    survives: Survives | None = None,
) -> KeyValueRuns:
    """Give a store of runs on a `KeyValueStore` or on a driver of `py-key-value-aio`.

    `survives` is what the key-value store itself promises of an answered write; unless it is said,
    the end of the process is taken for granted, and nothing for one in memory.

        store = keyvalue(MemoryKeyValue())
    """
    kv = as_keyvalue(store)
    if survives is not None and survives not in get_args(Survives):
        raise InvalidArgument("survives", survives, f"one of {', '.join(get_args(Survives))}")
    if survives is None:
        survives = "nothing" if isinstance(kv, MemoryKeyValue) else "process_crash"
    return KeyValueRuns(kv, check_prefix(prefix), clock, max_value_size, survives)
