"""The log of what happened: lines of all processes in one order, which survive `kill -9`."""

import logging
import os
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Literal, Protocol

import msgspec

from perdure import codec
from perdure.store import Entry, Grant, Store, Verdict, capabilities

Kind = Literal[
    "ask",  # a process requests leases from the store; `n` numbers the requests
    "grant",  # it was granted a run, in response to request `n`
    "durable",  # the store accepted (or a grant showed) a record with these tokens
    "activation",  # the workflow function begins
    "call",  # it calls a step, a wait or a race
    "begin",  # a step's function begins: attempt `n`, `text` is the idempotency key
    "saw",  # the call returned a value
    "failed",  # the call raised a failure of the step
    "broke",  # the call raised an error of perdure that breaks the run
    "cut",  # the call was cancelled
    "replay",  # one of these, in a replay which only shows how steps are undone
    "rollback",  # the store has it that the run is undone
    "undo",  # an undo begins: attempt `n`, `text` is the id of its step and its idempotency key
    "undone",  # the store has the record of an undo: `path` is the key of the step
    "kept",  # the block of a saga ended well
    "nested",  # a step inside a step was not refused
    "returned",  # the workflow function returned
    "raised",  # it raised
    "sent",  # an event was delivered: `path` is its name
    "answered",  # an answer with this token was accepted: `text` is the token of the question
    "refused",  # an answer with this token was refused
    "retry",  # an operator retries the run; it has these tokens from the first undone step on
    "cancel",  # an operator cancels it
    "error",  # perdure logged at ERROR
]

UNDO = "~undo:"
_RUN = re.compile(r"run '([^']+)'")
_TOKEN = re.compile(rb"<[a-z0-9]+\.[0-9]+>")


class Line(msgspec.Struct, frozen=True, omit_defaults=True):
    """One thing that happened, for some kinds under the lease with an `epoch`."""

    kind: Kind
    process: str
    run: str = ""
    activation: str = ""
    path: str = ""
    text: str = ""
    tokens: tuple[str, ...] = ()
    n: int = 0
    epoch: int = 0

    def __str__(self) -> str:
        what = " ".join(filter(None, (self.path, self.text, " ".join(self.tokens[:8]))))
        number = f" n={self.n}" if self.n else ""
        return f"{self.process:>3} {self.activation:>6} {self.kind:10} {what}{number}"


class Log(Protocol):
    """Where a process writes its lines."""

    def write(self, line: Line) -> None:
        """Append a line."""


class FileLog:
    """A log in a file that many processes append to, with one atomic write per line."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def write(self, line: Line) -> None:
        """Append a line; it survives the process as soon as this returns."""
        os.write(self._file, msgspec.json.encode(line) + b"\n")

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


def read_log(path: str) -> list[Line]:
    """Return the lines of a file, in the order in which they were written."""
    with open(path, "rb") as file:  # noqa: PTH123
        return msgspec.json.Decoder(Line).decode_lines(file.read())


def tokens_in(data: bytes) -> tuple[str, ...]:
    """Return the tokens of all executions and events that occur in stored data."""
    return tuple(dict.fromkeys(token.decode() for token in _TOKEN.findall(data)))


class Witness:
    """A store that logs requested and granted leases, and records that became durable."""

    def __init__(self, store: Store, log: Log, process: str) -> None:
        self.capabilities = capabilities(store)
        self._store = store
        self._log = log
        self._process = process
        self._questions = 0

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._store, name)
        watched = {"append": self._append, "transact": self._transact}
        if name in ("acquire", "claim"):
            return lambda *arguments, **options: self._lease(attribute, *arguments, **options)
        return watched.get(name, attribute)

    async def _append(self, entries: Sequence[Entry]) -> Sequence[Verdict]:
        verdicts: Sequence[Verdict] = await self._store.append(entries)  # type: ignore[attr-defined]
        for entry, verdict in zip(entries, verdicts, strict=True):
            if verdict is Verdict.ACCEPTED:
                self._durable(entry.id, entry.data, entry.epoch)
                if is_undone_by(entry.data):
                    self._log.write(Line("rollback", self._process, entry.id))
        return verdicts

    async def _transact(
        self, id: str, epoch: int, work: Callable[[Any], Awaitable[Entry]]
    ) -> Verdict:
        written: list[Entry] = []

        async def watched(connection: Any) -> Entry:
            entry = await work(connection)
            written.append(entry)
            return entry

        verdict: Verdict = await self._store.transact(id, epoch, watched)  # type: ignore[attr-defined]
        if verdict is Verdict.ACCEPTED:
            self._durable(id, written[-1].data, epoch)
        return verdict

    async def _lease(self, ask: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        self._questions += 1
        question = self._questions
        self._log.write(Line("ask", self._process, n=question))
        grants: Sequence[Grant | None] = await ask(*arguments, **options)
        for grant in grants:
            if isinstance(grant, Grant):
                run, epoch = grant.lease.id, grant.lease.epoch
                self._log.write(Line("grant", self._process, run, n=question, epoch=epoch))
                self._durable(run, codec.dumps(grant.snapshot), epoch)
        return grants

    def _durable(self, run: str, data: bytes, epoch: int) -> None:
        if tokens := tokens_in(data):
            self._log.write(Line("durable", self._process, run, tokens=tokens))
        if UNDO.encode() in data:
            for key in undone_in(codec.loads(data)["steps"]):
                self._log.write(Line("undone", self._process, run, path=key, epoch=epoch))


def is_undone_by(data: bytes) -> bool:
    """Return whether an entry says that the run is undone, and not that it was."""
    if b'"rollback":' not in data:
        return False
    execution = codec.loads(data)["execution"]
    return "rollback" in execution and execution["status"] == "running"


def undone_in(steps: Mapping[str, Any]) -> list[str]:
    """Return the keys of the steps whose undos are recorded."""
    undos = [key for key, record in steps.items() if key.startswith(UNDO) and record["ok"]]
    return [key.removeprefix(UNDO) for key in undos]


class ErrorLog(logging.Handler):
    """Writes what perdure logs at ERROR into the log, for `run` if the message names no run."""

    def __init__(self, log: Log, process: str, run: str) -> None:
        super().__init__(logging.ERROR)
        self._log = log
        self._process = process
        self._run = run

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line that names the run."""
        text = record.getMessage()
        named = _RUN.search(text)
        error = f" ({record.exc_info[1]!r})" if record.exc_info else ""
        run = named[1] if named else self._run
        self._log.write(Line("error", self._process, run, text=text + error))

    def __enter__(self) -> None:
        logger = logging.getLogger("perdure")
        logger.propagate = False
        logger.addHandler(self)

    def __exit__(self, *_: object) -> None:
        logger = logging.getLogger("perdure")
        logger.propagate = True
        logger.removeHandler(self)
