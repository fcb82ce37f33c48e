"""Which records a run keeps when it is rewound to a step."""

from collections.abc import Iterable, Mapping
from typing import Any


def kept_before(steps: Mapping[str, Any], at: str) -> list[str]:
    """Return the keys of the records before that of a step.

    The starts and results of `step.map_runs` belong together: once they are recorded, the runs do
    not report their ends again. If `at` is between them, none of them is kept.
    """
    keys = list(steps)
    earlier_keys, later_keys = keys[: keys.index(at)], keys[keys.index(at) :]
    split = _maps_in(steps, earlier_keys) & _maps_in(steps, later_keys)
    return [key for key in earlier_keys if steps[key].get("branch") not in split]


def _maps_in(steps: Mapping[str, Any], keys: Iterable[str]) -> set[str]:
    """Return the branches of the maps that these records are part of."""
    return {steps[key]["branch"] for key in keys if _is_part(key, steps[key])}


def _is_part(key: str, record: Any) -> bool:
    kind, facts = record.get("kind"), record.get("value")
    is_start = kind == "start" and isinstance(facts, dict) and "base" in facts
    is_result = kind == "map" and record.get("call", key).startswith("results[")
    return "branch" in record and (is_start or is_result)
