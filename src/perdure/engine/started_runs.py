"""The runs that a run started and that end with it."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple


class Start(NamedTuple):
    """Runs that one call started; `branch` is the one that called."""

    run_ids: Sequence[str]
    branch: str


class StartedRuns:
    """The runs that are cancelled when this one ends, by what their ids begin with.

    They are known from the records of the calls that started them. Some of them may have ended.
    """

    __slots__ = ("_starts",)

    def __init__(self) -> None:
        self._starts: dict[str, dict[int, Start]] = {}

    def __bool__(self) -> bool:
        """Return whether there are any."""
        return bool(self._starts)

    def load(self, record: Mapping[str, Any]) -> None:
        """Add the runs of a record, or forget those that it says have ended."""
        if record["kind"] == "start":
            self.add(record.get("value"), record.get("branch", ""))
        else:
            # The last record of a map: its runs have ended.
            self.forget(record["run"])

    def add(self, facts: Any, branch: str) -> None:
        """Add runs; `facts` is what their start recorded."""
        if facts.get("cancels"):
            base, first = facts.get("base") or facts["id"], facts.get("first", 0)
            run_ids = [base]
            if "base" in facts:
                run_ids = [f"{base}/{first + n}" for n in range(facts["count"])]
            self._starts.setdefault(base, {})[first] = Start(run_ids, branch)

    def forget(self, base: str) -> list[str]:
        """Forget the runs that a call started; return their ids."""
        starts = self._starts.pop(base, {}).values()
        return [run_id for start in starts for run_id in start.run_ids]

    def __iter__(self) -> Iterator[Start]:
        """Yield what was started, in the order of the calls."""
        return (start for starts in self._starts.values() for start in starts.values())
