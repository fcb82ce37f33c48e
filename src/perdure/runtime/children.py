"""Child runs: their ids, and what is stored with them."""

import hashlib
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

from perdure import codec
from perdure.clock import Clock
from perdure.durable.outbox import encode_run
from perdure.engine.history import History
from perdure.engine.middleware import Middleware, add_metadata
from perdure.engine.target import ChildOptions, Target
from perdure.engine.tasks import outside_runs
from perdure.errors import InvalidArgument, RunConflict, TooDeep
from perdure.runtime.deadlines import inherited_deadline
from perdure.runtime.definition import Definition
from perdure.runtime.options import Start, check_options, new_start, payload_conflict
from perdure.runtime.registry import Registry
from perdure.snapshot import OutboxItem, check_tags, system_tag, workflow_of
from perdure.snapshot.tags import PARENT
from perdure.store import Store
from perdure.validation import MAX_ID_LENGTH

_ROOM = len("~log:") + len("/1000000000")
"""How much shorter than an id the common prefix of many ids must be."""

MAX_DEPTH = 100
"""The maximum number of ancestors of a run, to stop endless recursion."""


class Children:
    """Creates the child runs of one run."""

    __slots__ = ("_around", "_clock", "_history", "_random", "_registry", "_run_id", "_store")

    def __init__(
        self,
        run_id: str,
        history: History,
        store: Store,
        registry: Registry,
        random: Random,
        clock: Clock,
        around: Sequence[Middleware] = (),
    ) -> None:
        self._run_id = run_id
        self._store = store
        self._history = history
        self._registry = registry
        self._random = random
        self._clock = clock
        self._around = around

    def target(self, workflow: object) -> Definition[Any, Any]:
        """Return the definition of a workflow, which is given as such or by its registered name."""
        if isinstance(workflow, str):
            return self._registry.newest(workflow)
        if not isinstance(workflow, Definition):
            expected = "a function decorated with @workflow, or its name"
            raise InvalidArgument("workflow", workflow, expected)
        return workflow

    def find(self, name: str) -> Definition[Any, Any] | None:
        """Return the newest definition with this name, or `None` if none is registered."""
        return self._registry.find(name)

    def child_id(self, call: str, options: ChildOptions) -> str:
        """Return the id of the run that a call of this generation starts."""
        return self._readable_id(call, MAX_ID_LENGTH) if options.run_id is None else options.run_id

    def _readable_id(self, call: str, length: int) -> str:
        generation = self._history.generation
        readable = f"{self._run_id}/{generation}/{call}"
        if len(readable) <= length:
            return readable
        identity = codec.dumps([self._run_id, generation, call])
        digest = hashlib.sha256(identity).hexdigest()
        return f"{self._run_id[: length - len(digest) - 1]}/{digest}"

    def encode(self, target: Target[Any, Any], payload: object) -> Any:
        """Return a payload as JSON; raise if it does not fit."""
        assert isinstance(target, Definition), "`target` returns definitions"
        return target.encode_payload(payload)

    def base_id(self, call: str) -> str:
        """Return the prefix of the ids of the runs that a call of `map_runs` starts."""
        return self._readable_id(call, MAX_ID_LENGTH - _ROOM)

    def new_runs(
        self,
        target: Target[Any, Any],
        payloads: Sequence[Any],
        base: str,
        first: int,
        call: str,
        options: ChildOptions,
        full: Mapping[str, Any],
    ) -> OutboxItem:
        """Return the outbox item for many runs: what they share, and their payloads."""
        assert isinstance(target, Definition), "`target` returns definitions"
        start = self._start(target, payloads[0], base, options)
        start.metadata.update(self._facts(call), **options.facts)
        shared_facts = {**encode_run(start.new_run()), "queue": ""}
        item = {"run": shared_facts, "first": first, "payloads": list(payloads), "full": full}
        if target.queue is not None:
            item["queues"] = [target.queue_for(payload) for payload in payloads]
        return {"map": item}

    def answer(self, key: str, value: object) -> OutboxItem:
        """Return the outbox item for an answer to a program."""
        return {"answer": {"key": key, "value": codec.dumps(codec.encode(value)).decode()}}

    def new_run(
        self,
        target: Target[Any, Any],
        payload: object,
        run_id: str,
        call: str,
        options: ChildOptions,
        reply_to: Mapping[str, Any] | None = None,
    ) -> OutboxItem:
        """Return the outbox item for a run to start."""
        assert isinstance(target, Definition), "`target` returns definitions"
        start = self._start(target, target.encode_payload(payload), run_id, options)
        start.metadata.update(self._facts(call), **options.facts)
        if reply_to is not None:
            start.metadata["replyTo"] = dict(reply_to)
        return {"start": encode_run(start.new_run())}

    async def conflict(self, item: OutboxItem) -> RunConflict | None:
        """Return an error if another run has the id of the run to start."""
        facts: Any = item
        new = facts["start"]
        with outside_runs():
            snapshot = await self._store.load(new["id"])
        reason = "" if snapshot is None else payload_conflict(new["snapshot"], snapshot)
        if snapshot is None or not reason:
            return None
        return RunConflict(new["id"], workflow_of(snapshot), reason)

    def _start(
        self, target: Definition[Any, Any], data: Any, run_id: str, options: ChildOptions
    ) -> Start:
        now = self._clock.now()
        plan = check_options(
            now,
            at=options.at,
            delay=options.delay,
            priority=options.priority,
            tags=options.tags,
        )
        start = new_start(target, data, run_id, plan, now, self._random)
        start.metadata.update(inherited_deadline(self._history.metadata, options.deadline))
        start.metadata["tags"] = self._tags(start, options)
        add_metadata(start.metadata, self._around, target.name, run_id)
        return start

    def _tags(self, start: Start, options: ChildOptions) -> dict[str, str]:
        own = self._history.metadata.get("tags") or {}
        inherited_tags = {name: own[name] for name in options.inherit if name in own}
        tags = check_tags({**inherited_tags, **start.metadata.get("tags", {})})
        return {**tags, PARENT: system_tag(PARENT, self._run_id)}

    def _facts(self, call: str) -> dict[str, Any]:
        depth = int(self._history.metadata.get("depth", 0)) + 1
        if depth > MAX_DEPTH:
            raise TooDeep(self._run_id, MAX_DEPTH)
        parent = {"run": self._run_id, "generation": self._history.generation, "call": call}
        # An earlier run may have had the same id as this one, and its children the same ids.
        parent["seed"] = self._history.metadata.get("seed", "")
        return {"parent": parent, "depth": depth}
