"""Named workflow definitions with typed payloads.

@workflow("welcome", version=1)
async def welcome(step: Step, payload: Signup) -> str: ...
"""

import inspect
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Literal, TypeAlias, TypeVar, get_type_hints, overload

from perdure import codec
from perdure.clock import Duration
from perdure.engine.fingerprint import definition_hash
from perdure.engine.step import Step
from perdure.engine.target import P_contra, T_co, Target
from perdure.errors import (
    CodecError,
    InvalidArgument,
    InvalidPayload,
)
from perdure.limits import Queue, check_queue, queue_with_key
from perdure.result import Result
from perdure.retention import Keep, check_keep
from perdure.runtime.deadlines import check_deadline
from perdure.runtime.priorities import check_priority
from perdure.schedules import Schedule, check_name
from perdure.snapshot import UNCHECKED, Metadata, Snapshot
from perdure.validation import check_errors, check_id, check_int, check_user_id

P = TypeVar("P")
T = TypeVar("T")
E = TypeVar("E")
_PLAIN = (dict, list, str, int, float, bool, type(None))
_WANTED = "an async function of (step) or (step, payload)"
Migrate: TypeAlias = Callable[[Snapshot, int], Snapshot]


class Definition(Target[P_contra, T_co]):
    """A workflow with a name and a version; calling it calls the function itself.

    `P_contra` is the type of its payload and `T_co` the type of its output: the value of an `Ok` if
    the function returns results.
    """

    def __init__(
        self,
        name: str,
        fn: Callable[..., Awaitable[Any]],
        *,
        version: int = 1,
        errors: Sequence[type[BaseException]] = (),
        types: Sequence[type] = (),
        migrate: Migrate | None = None,
        deadline: Duration | None = None,
        queue: Queue | None = None,
        key: Callable[[Any], str] | None = None,
        priority: int = 0,
        schedule: Schedule | None = None,
        keep: Keep | Literal["result"] | None = None,
    ) -> None:
        if not inspect.iscoroutinefunction(fn):
            raise InvalidArgument("fn", fn, _WANTED, "Define it with `async def`")
        self.name = check_id(name, "workflow")
        self.fn = fn
        self.version = check_int(version, "version")
        # Computed now rather than when a run is started: by then, the file may have changed.
        self.definition_hash = definition_hash(fn)
        self.scope = codec.ErrorScope(check_errors(errors), (fn,))
        self.types = codec.DeclaredTypes(types, fn)
        self.migrate = _check_migrate(migrate)
        self.deadline = None if deadline is None else check_deadline(deadline)
        self.queue = check_queue(queue)
        self.key = check_key(key, self.queue)
        self.priority = check_priority(priority)
        parameter = _payload_parameter(fn)
        self.takes_payload = parameter is not None
        self.payload_type = None if parameter is None else _payload_type(fn, parameter.name)
        self._default = None if parameter is None else parameter.default
        self.keep = check_keep(keep)
        self.schedule = _check_schedule(schedule)
        if schedule is not None:
            self._check_default(schedule)
        self.__name__ = fn.__name__
        self.__doc__ = fn.__doc__

    def __call__(self, step: Step, payload: Any = None) -> Awaitable[Any]:
        """Call the function."""
        if isinstance(payload, InvalidPayload):
            raise payload
        if not callable(step):
            # A call with the payload alone, as of a function that starts a run by itself.
            name = self.__name__
            hint = (
                f"Start a run with runtime.trigger({name}, payload), or a child run with "
                f"step.call(id, {name}, payload)"
            )
            raise InvalidArgument("step", step, "the step of a run", hint)
        return self.fn(step, payload) if self.takes_payload else self.fn(step)

    def _check_default(self, schedule: Schedule) -> None:
        check_name(self.name)
        try:
            self.encode_payload(None)
        except InvalidPayload as error:
            expected = "no schedule, since its runs start without a payload"
            hint = f"Give the payload a default, or call runtime.schedule with one ({error})"
            raise InvalidArgument("schedule", schedule, expected, hint) from None

    @property
    def has_default(self) -> bool:
        """Whether a run can be started without a payload."""
        return not self.takes_payload or self._default is not inspect.Parameter.empty

    @property
    def identity(self) -> dict[str, Any]:
        """The metadata that ties a run to its definition."""
        return {"version": self.version, "definitionHash": self.definition_hash}

    def __repr__(self) -> str:
        return f"<workflow {self.name!r} version {self.version}>"

    def encode_payload(self, payload: object) -> Any:
        """Return the payload as JSON; raise `InvalidPayload`, naming each field, if it does
        not fit.
        """
        if not self.takes_payload:
            if payload is not None:
                raise InvalidPayload(self.name, ["the workflow takes no payload"])
            return None
        if payload is None and self.has_default:
            payload = self._default
        is_converted = self.payload_type is not None and isinstance(payload, _PLAIN)
        try:
            value = codec.convert(payload, self.payload_type) if is_converted else payload
            return codec.encode(value, self.payload_type)
        except CodecError as error:
            found = codec.find_problems(payload, self.payload_type) if is_converted else []
            problems = [*map(str, found or [codec.problem_of(error)])]
            if payload is None:
                problems = [f"none was passed; {problem}" for problem in problems]
            raise InvalidPayload(self.name, problems) from error

    def receive(self, snapshot: Snapshot) -> Any:
        """Return the payload of a stored run as the function receives it.

        A caller that does not know the definition stores an unchecked payload and marks it. Such a
        payload is checked now, and its converted form is stored in the metadata of the snapshot. If
        it is invalid, this returns the `InvalidPayload` that calling the function will raise.
        """
        metadata = snapshot.get("metadata") or {}
        if metadata.get(UNCHECKED):
            try:
                metadata = snapshot["metadata"] = self._check_input(metadata)
            except InvalidPayload as error:
                return error
        return self.decode_payload(metadata.get("input"))

    def _check_input(self, metadata: Metadata) -> Metadata:
        data, new_metadata = metadata.get("input"), dict(metadata)
        del new_metadata[UNCHECKED]
        if (fitting := self._encode_stored(data)) != data:
            # The call that triggered the run may be repeated, and must recognize its payload.
            new_metadata = {"firstInput": data, **new_metadata, "input": fitting}
        return new_metadata

    def _encode_stored(self, data: Any) -> Any:
        try:
            return self.encode_payload(codec.decode(data))
        except InvalidPayload:
            if codec.is_plain(data):
                raise
            # perdure wrote the types of the values beside them.
            return data

    def queue_for(self, data: Any) -> str:
        """Return the queue of a new run with this payload, given as JSON; "" stands for none."""
        if self.queue is None:
            return ""
        if self.key is None:
            return self.queue.name
        with_key = queue_with_key(self.queue.name, self.key(self.decode_payload(data)))
        return with_key if self.queue.has_keys else self.queue.name

    def decode_payload(self, data: Any) -> Any:
        """Return the payload as the function receives it."""
        if self.payload_type is None:
            return codec.decode(data)
        try:
            return codec.decode(data, self.payload_type, typed=True)
        except CodecError as error:
            raise CodecError(
                f"the stored payload of workflow {self.name!r} no longer fits its type: {error}. "
                "Give new fields a default and keep the old names, or raise version= and migrate it"
            ) from error


def _payload_parameter(fn: Callable[..., Any]) -> inspect.Parameter | None:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    match list(inspect.signature(fn).parameters.values()):
        case [step] if step.kind in kinds:
            return None
        case [step, payload] if step.kind in kinds and payload.kind in kinds:
            return payload
        case []:
            hint = "Let its first parameter be the step: async def order(step: Step) -> str"
            raise InvalidArgument("fn", fn, _WANTED, hint)
        case _:
            hint = "Put several values into one payload, such as a dataclass"
            raise InvalidArgument("fn", fn, _WANTED, hint)


def _payload_type(fn: Callable[..., Any], parameter: str) -> Any:
    try:
        hints = get_type_hints(fn)
    except (NameError, TypeError):
        return None
    hint = hints.get(parameter)
    return None if hint is Any or hint is object else hint


def workflow(
    name: str,
    /,
    *,
    version: int = 1,
    errors: Sequence[type[BaseException]] = (),
    types: Sequence[type] = (),
    migrate: Migrate | None = None,
    deadline: Duration | None = None,
    queue: Queue | None = None,
    key: Callable[[Any], str] | None = None,
    priority: int = 0,
    schedule: Schedule | None = None,
    keep: Keep | Literal["result"] | None = None,
) -> "Decorator":
    """Turn an async function of `(step)` or `(step, payload)` into a workflow.

    ```python
    @workflow("order")
    async def order(step: Step, cents: int) -> str:
        return await step("charge", charge, cents)
    ```

    Exceptions of the classes in `errors` and values of the classes in `types` are restored even
    where no annotation names their class. `migrate` is called with the snapshot of a run that
    another version began and that version, and returns the snapshot from which this version
    continues. A run that has not ended when `deadline` has passed since it first executed fails
    with `DeadlinePassed`.

    With `queue`, workers start the runs in turn and within the queue's limits; `key` is a function
    of the payload that returns the run's key in the queue. `priority` is the default for runs that
    are triggered without one: each level puts a run a day ahead of others that are due.

    A starting worker creates the `schedule` under the workflow's name; a worker with a higher
    version of the workflow updates it. `keep` is how long workers keep finished runs; the default
    is the runtime's `keep`. `"result"` drops the steps of a completed run.
    """
    return Decorator(
        _check_name(name),
        version=check_int(version, "version"),
        errors=check_errors(errors),
        types=codec.check_types(types),
        migrate=_check_migrate(migrate),
        deadline=None if deadline is None else check_deadline(deadline),
        queue=check_queue(queue),
        key=check_key(key, queue),
        priority=check_priority(priority),
        schedule=_check_schedule(schedule),
        keep=check_keep(keep),
    )


def _check_name(name: object) -> str:
    if not isinstance(name, str):
        hint = 'Write @workflow("name") with the parentheses'
        raise InvalidArgument("name", name, "the workflow's name", hint)
    return check_user_id(name, "name")


def _check_schedule(schedule: Schedule | None) -> Schedule | None:
    if schedule is not None and not isinstance(schedule, Schedule):
        raise InvalidArgument("schedule", schedule, 'a Schedule, such as Schedule(every="1h")')
    return schedule


def _check_migrate(migrate: Migrate | None) -> Migrate | None:
    if migrate is not None and not callable(migrate):
        raise InvalidArgument("migrate", migrate, "a function of a snapshot and its version")
    return migrate


def check_key(key: Callable[[Any], str] | None, queue: Queue | None) -> Any:
    """Check the function that returns the key of a run."""
    if key is not None and not callable(key):
        hint = "Write key=lambda payload: payload.tenant"
        raise InvalidArgument("key", key, "a function of the payload that returns a string", hint)
    if key is not None and queue is None:
        raise InvalidArgument("key", key, "no key without queue=", "A key belongs to a queue")
    return key


class Decorator:
    """Turns the decorated function into a `Definition`, with options that were already checked."""

    def __init__(self, name: str, **options: Any) -> None:
        self._name = name
        self._options = options

    @overload
    def __call__(self, fn: Callable[[Step, P], Awaitable[Result[T, E]]]) -> Definition[P, T]: ...
    @overload
    def __call__(self, fn: Callable[[Step, P], Awaitable[T]]) -> Definition[P, T]: ...
    @overload
    def __call__(self, fn: Callable[[Step], Awaitable[Result[T, E]]]) -> Definition[None, T]: ...
    @overload
    def __call__(self, fn: Callable[[Step], Awaitable[T]]) -> Definition[None, T]: ...
    def __call__(self, fn: Callable[..., Awaitable[Any]]) -> Definition[Any, Any]:
        return Definition(self._name, fn, **self._options)
