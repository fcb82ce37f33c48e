"""The checker reads the log of one run and reports every law that it violates."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cached_property

import msgspec

from tests.durability.verifier import language as lang
from tests.durability.verifier.log import Line
from tests.durability.verifier.model import Model
from tests.durability.verifier.undos import Undos


class End(msgspec.Struct, frozen=True):
    """A run as it was read; `records` are the (branch, call) of its history, `tokens` those it
    contains.

    `marked` are the keys and tokens of steps that can be undone. By their keys, `undone` were,
    `tried` have a record of their undo, `reported` are those that the error of the run names, and
    `scopes` those that sagas undid.
    """

    status: str
    output: str = ""
    error: str = ""
    history: str = ""
    records: tuple[tuple[str, str], ...] = ()
    tokens: frozenset[str] = frozenset()
    marked: tuple[tuple[str, str], ...] = ()
    undone: frozenset[str] = frozenset()
    tried: frozenset[str] = frozenset()
    reported: frozenset[str] = frozenset()
    scopes: frozenset[str] = frozenset()


class Evidence(msgspec.Struct, frozen=True):
    """Everything that is known about one run.

    `ends` are the readings of the run since it was first seen over, or the last one if it never
    was. `rows` are the committed effects of transactions, path and token; `None` if the store has
    no transactions, which are then plain steps. `children` are the child runs that are not over.
    """

    run: str
    program: lang.Body
    lines: Sequence[Line]
    ends: Sequence[End]
    rows: Sequence[tuple[str, str]] | None = None
    children: Sequence[str] = ()


class Violation(msgspec.Struct, frozen=True):
    """A violated law: its name, what happened, and the lines that show it."""

    law: str
    text: str
    lines: tuple[Line, ...] = ()


def check(evidence: Evidence) -> list[Violation]:
    """Return every violation, the worst first."""
    return list(_Checker(evidence).violations())


OVER = ("completed", "failed", "cancelled")


class _Checker:
    def __init__(self, evidence: Evidence) -> None:
        self.run = evidence.run
        self.lines = evidence.lines
        self.ends = evidence.ends
        self.rows = evidence.rows
        self.children = evidence.children
        self.model = Model(evidence.program)
        self.at = _positions(evidence.run, evidence.lines)

    def violations(self) -> Iterator[Violation]:
        yield from self.transactions()
        yield from self.durable_before_seen()
        yield from self.same_values()
        yield from self.same_order()
        yield from self.executions()
        yield from self.idempotency_keys()
        yield from self.events()
        yield from self.answers()
        yield from self.undos()
        yield from self.broken_runs()
        yield from self.expected_failures()
        yield from self.leaves()
        yield from self.stays_over()
        yield from self.end()
        yield from self.errors()
        yield from self.children_end()

    @cached_property
    def begun(self) -> dict[str, int]:
        """Return where each execution began, by its token."""
        return {self.lines[at].tokens[0]: at for at in self.at["begin"]}

    @cached_property
    def observations(self) -> list[int]:
        """Return where the function saw a value or a failure."""
        failed = [at for at in self.at["failed"] if not self._is_echo(at)]
        return sorted(self.at["saw"] + failed)

    def _is_echo(self, at: int) -> bool:
        """Return whether a call raised what ended the saga around it.

        A call that has no record does so if its scope began to be undone before a crash.
        """
        line = self.lines[at]
        command = self.model.commands.get(line.path)
        if not self.model.sagas(line.path) or isinstance(command, _GROUPS):
            return False
        identity = self.model.identity(line.path)
        own = [token for token in line.tokens if self._owner(token) == identity]
        timeout = command.timeout if isinstance(command, lang.Step | lang.Ask) else None
        return not own and not (timeout and line.text.startswith("StepTimeout"))

    def _owner(self, token: str) -> str | None:
        begun = self.begun.get(token)
        return None if begun is None else self.model.identity(self.lines[begun].path)

    def same_values(self) -> Iterator[Violation]:
        """Every call of one identity returns the same value or raises the same failure."""
        before: dict[str, int] = {}
        for at in self.observations:
            line = self.lines[at]
            identity = self.model.identity(line.path)
            earlier = before.setdefault(identity, at)
            known = self.lines[earlier]
            if (known.kind, known.text) != (line.kind, line.text) and not self._outdated(at):
                if not self._run_again(earlier, at):
                    yield self._violation("same value", f"{identity} gave two values", earlier, at)
                before[identity] = at
            for token in line.tokens:
                yield from self._own_value(at, identity, token)

    def same_order(self) -> Iterator[Violation]:
        """Recorded steps are seen again in the order in which they were first seen."""
        first: dict[str, int] = {}
        latest: dict[tuple[str, str], int] = {}
        for at in self.observations:
            line = self.lines[at]
            if not line.tokens or not self.model.has_place(line.path):
                continue
            token = line.tokens[-1]
            seen = first.setdefault(token, at)
            place = line.activation, self.lines[seen].activation
            before = latest.get(place, seen)
            if seen < before and not self._ended_earlier(seen, before):
                text = f"{line.path} was seen before {self.lines[before].path} the first time"
                yield self._violation("same order", text, seen, before, at)
            latest[place] = max(seen, before)

    def _ended_earlier(self, seen: int, before: int) -> bool:
        """Return whether a step was seen before another whose record is older, but nested deeper.

        The event loop needs some iterations to end each branch around a step, and another step may
        be recorded in the meantime: in the same write, or in one that takes no time. A replay
        shows both in the order of their records.
        """
        known, nested = self.lines[seen], self.lines[before]
        records = [self.durable.get(line.tokens[-1], 0) for line in (nested, known)]
        is_nested = self.model.depth(nested.path) > self.model.depth(known.path)
        return is_nested and records[0] <= records[1] < before

    def _own_value(self, at: int, identity: str, token: str) -> Iterator[Violation]:
        owner = self._owner(token)
        if owner is None or isinstance(self.model.commands.get(identity), _GROUPS):
            return
        if owner != identity:
            text = f"{identity} was given the record of {owner}"
            yield self._violation("same value", text, self.begun[token], at)

    def _outdated(self, at: int) -> bool:
        """Return whether a line is of an owner that was paused while another retried the run."""
        asked = self.asked.get(self.lines[at].activation, at)
        return any(asked < retry < at for retry in self.at["retry"])

    def _run_again(self, failure: int, at: int) -> bool:
        """Return whether a retry before a line may have run a failure again that was seen in
        another.
        """
        line = self.lines[failure]
        if self._is_dropped(failure, at):
            return True
        retried = any(self._known(failure) < retry < at for retry in self.at["retry"])
        return line.kind == "failed" and retried and not self.model.handled(line.path)

    def _known(self, seen: int) -> int:
        """Return where the outcome that was seen in a line was durable.

        A paused owner may see it only after another process has retried the run.
        """
        tokens = self.lines[seen].tokens
        return min(seen, *(self.durable.get(token, seen) for token in tokens), seen)

    @cached_property
    def cuts(self) -> list[int]:
        """Return where a run was retried that had been undone.

        What it had recorded from the first step that was undone, or from a later one, is dropped.
        """
        return [at for at in self.at["retry"] if self.lines[at].tokens]

    def _is_dropped(self, seen: int, at: int) -> bool:
        """Return whether a retry before a line may have dropped what was seen in another."""
        line = self.lines[seen]
        is_group = isinstance(self.model.commands.get(line.path), _GROUPS)
        own = () if is_group else line.tokens
        known = self._known(seen) if own else seen
        for retry in (retry for retry in self.cuts if known < retry < at):
            tokens = self.lines[retry].tokens
            first = min(map(self._numbered, tokens))
            if not {*tokens}.isdisjoint(own) if own else first <= seen:
                return True
        return False

    def _numbered(self, token: str) -> int:
        """Return where the record with a token had its place among the others, or earlier."""
        begun = self.begun.get(token)
        command = None if begun is None else self.model.commands.get(self.lines[begun].path)
        if begun is not None and isinstance(command, lang.Transaction):
            # Before the commit: what was recorded during that comes after it.
            return begun
        return self.durable.get(token, 0)

    def executions(self) -> Iterator[Violation]:
        """A step whose value was seen is not executed again, and no attempt is made twice."""
        seen: dict[str, list[int]] = defaultdict(list)
        for at in self.observations:
            for token in self.lines[at].tokens:
                if token in self.begun:
                    path = self.lines[self.begun[token]].path
                    seen[self.model.identity(path)].append(at)
        made: dict[tuple[str, str], list[int]] = defaultdict(list)
        for at in self.at["begin"]:
            line = self.lines[at]
            identity = self.model.identity(line.path)
            for observed in seen[identity]:
                if self._knew(at, observed) and not self._run_again(observed, at):
                    text = f"{identity} was executed again after its outcome was seen"
                    yield self._violation("executed again", text, observed, at)
                    break
            made[line.activation, line.path].append(at)
            if len(made[line.activation, line.path]) > self.model.attempts(line.path):
                text = f"{identity} was executed twice in one activation"
                yield self._violation("executed again", text, *made[line.activation, line.path])

    def _knew(self, at: int, observed: int) -> bool:
        """Return whether the activation of a line must know what was seen in an earlier one."""
        activation = self.lines[at].activation
        if observed < at and self.lines[observed].activation == activation:
            return True
        # A process that was paused may not know yet that another one continued the run.
        return observed < self.asked.get(activation, 0)

    @cached_property
    def asked(self) -> dict[str, int]:
        """Return where each activation's process requested the lease that it runs under."""
        asks = {(self.lines[at].process, self.lines[at].n): at for at in self.at["ask"]}
        granted: dict[tuple[str, int], int] = {}
        found: dict[str, int] = {}
        for at in sorted(self.at["grant"] + self.at["activation"]):
            line = self.lines[at]
            lease = line.process, line.epoch
            if line.kind == "grant":
                granted[lease] = asks[line.process, line.n]
            elif lease in granted:
                found[line.activation] = granted[lease]
        return found

    def durable_before_seen(self) -> Iterator[Violation]:
        """A value reaches the function only after its record is durable."""
        for at in self.observations:
            for token in self.lines[at].tokens:
                if self.durable.get(token, len(self.lines)) > at:
                    text = f"{self.lines[at].path} was seen before its record was durable"
                    yield self._violation("durable first", text, at)

    @cached_property
    def durable(self) -> dict[str, int]:
        """Return where each token was first known to be stored."""
        first: dict[str, int] = {}
        for at in self.at["durable"]:
            for token in self.lines[at].tokens:
                first.setdefault(token, at)
        return first

    def transactions(self) -> Iterator[Violation]:
        """A transaction has one row if it completed, and none if it failed."""
        if self.rows is None:
            return
        rows: dict[str, list[str]] = defaultdict(list)
        for path, token in self.rows:
            rows[path].append(token)
        for path, command in self.model.commands.items():
            if not isinstance(command, lang.Transaction):
                continue
            seen = [at for at in self.observations if self.lines[at].path == path]
            saw = {self.lines[at].tokens[0] for at in seen if self.lines[at].kind == "saw"}
            committed = set(rows[path])
            # What was undone stays: its undo is a step of its own, without a transaction.
            dropped = {token for at in self.cuts for token in self.lines[at].tokens}
            end = self.ends[-1]
            valid = [each for each in rows[path] if each in end.tokens or each not in dropped]
            if len(valid) > 1 or not saw <= committed or (command.fails and committed):
                text = f"{path} committed {rows[path]}, and the function saw {sorted(saw)}"
                yield self._violation("exactly once", text, *seen)
            elif end.status in OVER and not set(valid) <= end.tokens:
                text = f"{path} committed {rows[path]} without a record"
                yield self._violation("exactly once", text)

    def idempotency_keys(self) -> Iterator[Violation]:
        """One idempotency key per identity, and one identity per key."""
        keys: dict[tuple[str, int], int] = {}
        owners: dict[str, int] = {}
        for at in self.at["begin"]:
            line = self.lines[at]
            identity = self.model.identity(line.path)
            generation = self._generation(at)
            first = at if self._outdated(at) else keys.setdefault((identity, generation), at)
            is_child = isinstance(self.model.commands.get(line.path), lang.Child)
            # The child of a generation that was dropped may be under way, and a lease that was
            # requested before the retry may have been granted after it.
            is_unclear = bool(self.cuts) and (is_child or self._outdated(at))
            if self.lines[first].text != line.text and not is_unclear:
                text = f"{identity} ran under two idempotency keys"
                yield self._violation("identity", text, first, at)
            owner = owners.setdefault(line.text, at)
            if self.model.identity(self.lines[owner].path) != identity:
                text = f"two steps share an idempotency key: {self.lines[owner].path}, {line.path}"
                yield self._violation("identity", text, owner, at)

    def _generation(self, at: int) -> int:
        asked = self.asked.get(self.lines[at].activation, at)
        return sum(retry < asked for retry in self.cuts)

    def answers(self) -> Iterator[Violation]:
        """Of several answers the first is accepted and recorded; no other one is."""
        accepted: dict[str, int] = {}
        end = self.ends[-1]
        for at in self.at["answered"]:
            line = self.lines[at]
            first = accepted.setdefault(line.text, at)
            if first != at:
                yield self._violation("answers", "two answers were accepted", first, at)
            if end.status in OVER and not end.tokens & {*line.tokens} and not self.cuts:
                yield self._violation("answers", "an accepted answer was not recorded", at)
        for at in self.at["refused"]:
            if end.tokens & {*self.lines[at].tokens}:
                yield self._violation("answers", "an answer that was refused is recorded", at)

    def undos(self) -> Iterator[Violation]:
        """What a run that did not succeed has recorded is undone, once, in order, or reported."""
        facts = (self.lines, self.at, self.model, self.begun, self.durable, self.asked)
        undos = Undos(*facts)
        for text, at in undos.violations():
            yield self._violation("undo", text, *at)
        end = self.ends[-1]
        marked = dict(end.marked)
        if end.status in ("failed", "cancelled"):
            if left := marked.keys() - end.undone - end.reported:
                yield self._violation("undo", f"neither undone nor reported: {sorted(left)}")
        elif end.status == "completed":
            if wrong := end.undone - end.scopes:
                yield self._violation("undo", f"undone although the run succeeded: {sorted(wrong)}")
            if rest := end.scopes - end.tried:
                yield self._violation("undo", f"left by a saga: {sorted(rest)}")
            kept = {self.lines[at].path for at in self.at["kept"]}
            handled = [key for key in end.scopes if undos.sagas(marked[key]) <= kept]
            if handled and not self.cuts:
                yield self._violation("undo", f"undone by no saga that failed: {sorted(handled)}")

    def events(self) -> Iterator[Violation]:
        """An event is seen by one wait only, and by the first that waits for it."""
        seen: dict[str, int] = {}
        for at in self.observations:
            line = self.lines[at]
            if not isinstance(self.model.commands.get(line.path), lang.Wait):
                continue
            for token in line.tokens:
                first = seen.setdefault(token, at)
                if self.lines[first].path != line.path and not self._race_is_dropped(first, at):
                    text = f"{line.path} and {self.lines[first].path} saw one event"
                    yield self._violation("events", text, first, at)
            if line.text == "None":
                yield from self._timed_out(at)
        yield from self._lost_events(seen)

    def _race_is_dropped(self, seen: int, at: int) -> bool:
        """Return whether a retry dropped the verdict of a race in which a value was seen.

        The record of a wait in it may be older and stay. If another branch wins then, the event is
        for the next wait.
        """
        around = {path for path, _ in lang.ancestors(self.lines[seen].path)}
        races = {path for path in around if isinstance(self.model.commands[path], lang.Race)}
        verdicts = (n for n in self.at["saw"] if self.lines[n].path in races)
        return any(self._is_dropped(verdict, at) for verdict in verdicts)

    def _timed_out(self, at: int) -> Iterator[Violation]:
        path = self.lines[at].path
        wait = self.model.commands[path]
        assert isinstance(wait, lang.Wait)
        for sent in self.at["sent"]:
            token = self.lines[sent].tokens[0]
            if self.lines[sent].path != wait.event or sent > self._first_call(path):
                continue
            consumed = self.durable.get(token)
            if consumed is None or (consumed > at and self._taken_later(token, at)):
                text = f"{path} timed out over an event that had been delivered before"
                yield self._violation("events", text, sent, self._first_call(path), at)
                return

    def _taken_later(self, token: str, at: int) -> bool:
        """Return whether the wait that received this event began only after the given line."""
        takers = [n for n in self.at["saw"] if token in self.lines[n].tokens]
        return any(self._first_call(self.lines[n].path) > at for n in takers[:1])

    def _first_call(self, path: str) -> int:
        return next(at for at in self.at["call"] if self.lines[at].path == path)

    def _lost_events(self, seen: dict[str, int]) -> Iterator[Violation]:
        """An event that was consumed by a wait which a race cancelled is available to the next
        wait.
        """
        if self.model.interrupts or self.at["cancel"]:
            return
        for sent in self.at["sent"]:
            token = self.lines[sent].tokens[0]
            consumed = self.durable.get(token)
            if consumed is None or token in seen:
                continue
            for at in self._passed_over(sent, consumed):
                text = f"{token} was consumed and never seen, and {self.lines[at].path} wanted it"
                yield self._violation("events", text, sent, consumed, at)
                break

    def _passed_over(self, sent: int, consumed: int) -> Iterator[int]:
        """Yield where a wait that began later received no event, or one that was sent later."""
        for at in self.at["saw"]:
            wait, tokens = self.model.commands.get(self.lines[at].path), self.lines[at].tokens
            if not isinstance(wait, lang.Wait) or wait.event != self.lines[sent].path:
                continue
            later = [n for n in self.at["sent"] if n > sent and self.lines[n].tokens == tokens]
            if self._first_call(self.lines[at].path) > consumed and (later or not tokens):
                yield at

    def broken_runs(self) -> Iterator[Violation]:
        """After a run was broken, every call that begins raises."""
        broken: dict[str, int] = {}
        for at in self.at["broke"]:
            broken.setdefault(self.lines[at].activation, at)
        called: dict[tuple[str, str], int] = {}
        for at in self.at["call"]:
            called[self.lines[at].activation, self.lines[at].path] = at
        for at in self.observations:
            line = self.lines[at]
            broke = broken.get(line.activation)
            if broke is not None and broke < called[line.activation, line.path]:
                text = f"{line.path} gave an outcome although the run was broken"
                yield self._violation("broken runs", text, broke, at)

    def expected_failures(self) -> Iterator[Violation]:
        """A call fails only when the program planned it."""
        for at in self.at["failed"]:
            line = self.lines[at]
            is_in_saga = bool(self.model.sagas(line.path)) and isinstance(
                self.model.commands.get(line.path), _GROUPS
            )
            # A race in a saga that began to be undone raises what ended that.
            if not self.model.may_fail(line.path) and not self._is_echo(at) and not is_in_saga:
                text = f"{self.lines[at].path} failed, which the program did not plan"
                yield self._violation("unplanned failure", text, at)
                return

    def leaves(self) -> Iterator[Violation]:
        """A step inside a step is refused."""
        for at in self.at["nested"]:
            yield self._violation("steps are leaves", "a step ran inside a step", at)

    def end(self) -> Iterator[Violation]:
        """The run ends, in a way that the program allows, with what the function returned."""
        end = self.ends[-1]
        healed = bool(self.at["retry"])
        allowed = {"completed" if ok else "failed" for ok in self.model.outcomes(healed=healed)}
        allowed |= {"cancelled"} if self.at["cancel"] else set()
        if end.status not in OVER:
            yield self._violation("every run ends", f"the run is still {end.status}")
        elif end.status not in allowed:
            text = f"it is {end.status} ({end.error}), and may be {' or '.join(sorted(allowed))}"
            yield self._violation("outcome", text)
        elif end.status != "cancelled":
            yield from self._result(end)

    def _result(self, end: End) -> Iterator[Violation]:
        kind = "returned" if end.status == "completed" else "raised"
        texts = {self.lines[at].text for at in self.at[kind]}
        if end.status == "completed" and texts != {end.output}:
            text = f"the function returned {sorted(texts)}, and the run's output is {end.output}"
            yield self._violation("outcome", text, *self.at[kind])
        if end.status == "failed" and not any(text in end.error for text in texts):
            text = f"the function raised {sorted(texts)}, and the run's error is {end.error}"
            yield self._violation("outcome", text, *self.at[kind])

    def stays_over(self) -> Iterator[Violation]:
        """A run that is over does not change, and each call has one record."""
        for before, after in zip(self.ends, self.ends[1:], strict=False):
            if before != after:
                yield Violation("stays over", f"the run was {before}, and is {after}")
        records = self.ends[-1].records
        if len(set(records)) < len(records):
            yield Violation("one record", f"two records for one call: {sorted(records)}")

    def errors(self) -> Iterator[Violation]:
        """Nothing is logged at ERROR except a run that failed, or an undo of a cancelled saga."""
        end = self.ends[-1]
        failed = end.status == "failed" or bool(self.at["retry"])
        for at in self.at["error"]:
            is_undo = "was rolled back after CancelledError" in self.lines[at].text
            is_expected = failed or (is_undo and bool(end.scopes - end.undone))
            if not (is_expected and self.run in self.lines[at].text):
                yield self._violation("quiet", "perdure logged an error", at)

    def children_end(self) -> Iterator[Violation]:
        """A child run ends with its parent."""
        if self.children:
            yield self._violation("children end", f"still open: {', '.join(self.children)}")

    def _violation(self, law: str, text: str, *at: int) -> Violation:
        return Violation(law, text, tuple(self.lines[n] for n in at))


_GROUPS = lang.Race | lang.Parallel


def _positions(run: str, lines: Sequence[Line]) -> dict[str, list[int]]:
    """Return where the lines of each kind are that concern a run."""
    found: dict[str, list[int]] = defaultdict(list)
    for at, line in enumerate(lines):
        if line.run == run or line.kind == "ask":
            found[line.kind].append(at)
    return found
