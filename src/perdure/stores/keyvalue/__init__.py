"""A store of runs on any key-value store."""

from typing import Literal, TypeAlias, get_args

from perdure.clock import Clock, SystemClock
from perdure.errors import InvalidArgument
from perdure.keyvalue import AsyncKeyValue, KeyValueStore, MemoryKeyValue, as_keyvalue
from perdure.store import MAX_VALUE_SIZE, Capabilities
from perdure.stores._documents.backend import DocumentBackend
from perdure.stores._keyvalue import scope_of
from perdure.stores._shell import StoreShell
from perdure.stores.keyvalue.documents import Documents
from perdure.stores.keyvalue.layout import KeyValueHead
from perdure.stores.keyvalue.storage import KeyValueStorage
from perdure.stores.keyvalue.user_documents import UserDocuments
from perdure.validation import check_prefix

Survives: TypeAlias = Literal["nothing", "process_crash", "power_loss"]


class KeyValueRuns(StoreShell[DocumentBackend[KeyValueHead]]):
    """Keeps runs as documents in a key-value store, which it never closes.

    If the key-value store has compare-and-set (`perdure.keyvalue.CompareAndSet`), leases are atomic
    and processes may share the runs. Otherwise the guarantees hold only between the tasks of one
    process, and the store declares `lease="best_effort"` and `shared="process"`. The same is true
    of `replace` in its `documents`, which expire as the key-value store implements it.
    """

    def __init__(
        self, kv: KeyValueStore, prefix: str, clock: Clock, max_value_size: int, survives: Survives
    ) -> None:
        documents = Documents(kv)
        capabilities = Capabilities(
            journal=True,
            lease="atomic" if documents.is_atomic else "best_effort",
            schedule=True,
            queues=True,
            inbox=True,
            maintenance=True,
            search=True,
            shared="network" if documents.is_atomic and survives != "nothing" else "process",
            survives=survives,
            max_value_size=max_value_size,
        )
        user_documents = UserDocuments(kv, documents, scope_of(prefix))
        backend = DocumentBackend(KeyValueStorage(documents), user_documents, prefix, clock)
        super().__init__(backend, "key-value", capabilities, any_loop=True)


def keyvalue(
    store: KeyValueStore | AsyncKeyValue,
    *,
    prefix: str = "",
    clock: Clock = SystemClock(),
    max_value_size: int = MAX_VALUE_SIZE,
    survives: Survives | None = None,
) -> KeyValueRuns:
    """Return a store of runs on a `KeyValueStore` or on a driver of `py-key-value-aio`.

    `survives` is what an acknowledged write survives in the key-value store itself. The default is
    `"process_crash"`, or `"nothing"` for a `MemoryKeyValue`.

        store = keyvalue(MemoryKeyValue())
    """
    kv = as_keyvalue(store)
    if survives is not None and survives not in get_args(Survives):
        raise InvalidArgument("survives", survives, f"one of {', '.join(get_args(Survives))}")
    if survives is None:
        survives = "nothing" if isinstance(kv, MemoryKeyValue) else "process_crash"
    return KeyValueRuns(kv, check_prefix(prefix), clock, max_value_size, survives)
