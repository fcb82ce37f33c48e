"""Resume states in a key-value store."""

from typing import Any

from perdure.errors import InvalidArgument
from perdure.keyvalue import AsyncKeyValue, KeyValueStore, as_keyvalue
from perdure.resume.serialization import parse_document, parse_state, stringify_state
from perdure.resume.state import ResumeState


class StatePersistence:
    """Stores the resume states of runs in a key-value store, under `prefix` + run id.

    `kv` is a `KeyValueStore` or a `py-key-value-aio` driver. A stored string that is not a resume
    state raises `StateFormatError`. It is never treated as missing, because the run would then
    start over and repeat all its steps.
    """

    def __init__(self, kv: KeyValueStore | AsyncKeyValue, prefix: str = "workflow:state:") -> None:
        self._kv = as_keyvalue(kv, "kv")
        if not isinstance(prefix, str):
            raise InvalidArgument("prefix", prefix, "a string")
        self._prefix = prefix

    async def save(self, run_id: str, state: ResumeState, /, **metadata: Any) -> None:
        """Store the state, replacing any earlier one."""
        await self._kv.set(self._key(run_id), stringify_state(state, **metadata))

    async def load(self, run_id: str, /) -> ResumeState | None:
        """Return the state, or `None` if there is none."""
        text = await self._kv.get(self._key(run_id))
        return None if text is None else parse_state(text)

    async def load_raw(self, run_id: str, /) -> dict[str, Any] | None:
        """Return the stored document with `version`, `entries` and `metadata`, or `None`."""
        text = await self._kv.get(self._key(run_id))
        return None if text is None else parse_document(text)

    async def delete(self, run_id: str, /) -> bool:
        """Delete the state; return whether there was one."""
        return await self._kv.delete(self._key(run_id))

    async def list(self) -> list[str]:
        """Return the ids of all runs that have a state."""
        keys = await self._kv.keys(self._prefix + "*")
        # A `*` in the prefix is a wildcard, and matches keys with other prefixes.
        return [key.removeprefix(self._prefix) for key in keys if key.startswith(self._prefix)]

    def _key(self, run_id: object) -> str:
        if not isinstance(run_id, str) or not run_id:
            raise InvalidArgument("run_id", run_id, "a non-empty string")
        return self._prefix + run_id
