"""The laws of undos, as the log of a run shows them."""

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

from tests.durability.verifier.log import UNDO, Line
from tests.durability.verifier.model import Model

Found = tuple[str, tuple[int, ...]]
"""What is wrong, and the positions of the lines that show it."""


class Undos:
    """The undos of one run: when each began, and what it undid."""

    def __init__(
        self,
        lines: Sequence[Line],
        at: Mapping[str, list[int]],
        model: Model,
        begun: Mapping[str, int],
        durable: Mapping[str, int],
        asked: Mapping[str, int],
    ) -> None:
        self._lines = lines
        self._at = at
        self._model = model
        self._begun = begun
        self._durable = durable
        self._asked = asked

    def violations(self) -> Iterator[Found]:
        """Yield what the log says against the laws."""
        yield from self._durable_first()
        yield from self._once()
        yield from self._last_one_first()
        yield from self._nothing_begins()

    def _token(self, at: int) -> str:
        return self._lines[at].tokens[0]

    def sagas(self, token: str) -> frozenset[str]:
        """Return the scopes around the step that made a token."""
        return self._model.sagas(self._lines[self._begun[token]].path)

    def _is_retried(self, first: int, last: int) -> bool:
        return any(first < retry < last for retry in self._at["retry"])

    def _durable_first(self) -> Iterator[Found]:
        """What is undone is recorded."""
        for at in self._at["undo"]:
            if self._durable.get(self._token(at), at) >= at:
                yield f"{self._token(at)} was undone before its record was durable", (at,)

    def _once(self) -> Iterator[Found]:
        """An undo has one idempotency key, and does not begin again once it is recorded."""
        keys: dict[str, int] = {}
        attempts: dict[tuple[str, str, int], int] = {}
        for at in self._at["undo"]:
            line, token = self._lines[at], self._token(at)
            first = keys.setdefault(token, at)
            if self._lines[first].text != line.text:
                yield f"{token} was undone under two idempotency keys", (first, at)
            key = line.text.split()[0].removeprefix(UNDO)
            for undone in self._at["undone"]:
                is_its_own = self._lines[undone].path == key and self._begun[token] < undone
                if is_its_own and self._knew(at, undone):
                    yield f"{token} was undone again", (undone, at)
                    break
            before = attempts.setdefault((line.activation, token, line.n), at)
            if before != at and not self._is_retried(before, at):
                yield f"{token} was undone twice in one activation", (before, at)

    def _knew(self, at: int, undone: int) -> bool:
        """Return whether the activation of a line must know that an undo is recorded."""
        line, record = self._lines[at], self._lines[undone]
        # An owner that was paused does not know what another one in its process has recorded.
        lease, own = (record.process, record.epoch), self._leases.get(line.activation)
        is_known = undone < self._asked.get(line.activation, 0) or (undone < at and lease == own)
        return is_known and not self._is_retried(undone, at)

    @cached_property
    def _leases(self) -> dict[str, tuple[str, int]]:
        """Return process and epoch of each activation."""
        lines = [self._lines[at] for at in self._at["activation"]]
        return {line.activation: (line.process, line.epoch) for line in lines}

    @cached_property
    def _first(self) -> dict[str, int]:
        first: dict[str, int] = {}
        for at in self._at["undo"]:
            first.setdefault(self._token(at), at)
        return first

    def _last_one_first(self) -> Iterator[Found]:
        """Of two steps that are undone together, the one that was recorded last comes first."""
        undone = sorted(self._first.items(), key=lambda each: each[1])
        for number, (earlier, at) in enumerate(undone):
            for later, other in undone[number + 1 :]:
                if self._is_after(later, earlier, at) and not self._is_retried(at, other):
                    yield f"{earlier} was undone before {later}", (at, other)

    def _is_after(self, later: str, earlier: str, at: int) -> bool:
        """Return whether a step that was to be undone at a line began after another was recorded.

        Scopes are undone one by one: what undid the other must have included this one.
        """
        is_later = self._begun[later] > self._durable[earlier]
        return is_later and self._durable[later] < at and self.sagas(earlier) <= self.sagas(later)

    def _nothing_begins(self) -> Iterator[Found]:
        """When it is stored that the run is undone, no more steps begin."""
        for at in self._at["begin"]:
            asked = self._asked.get(self._lines[at].activation, 0)
            for rollback in self._at["rollback"]:
                if rollback < asked and not self._is_retried(rollback, at):
                    yield "a step began after the rollback", (rollback, at)
                    return
