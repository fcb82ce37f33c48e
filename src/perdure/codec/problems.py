"""Every problem of JSON from another source, where a conversion reports only the first."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from types import NoneType
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    NotRequired,
    Required,
    get_args,
    get_origin,
    is_typeddict,
)

import msgspec

from perdure.codec.annotations import substitute, union_members, unwrap, variables_of
from perdure.codec.classes import class_info, hints_of
from perdure.codec.conversion import is_model, length_problem, model_problems
from perdure.codec.values import TOO_DEEP, convert
from perdure.errors import CodecError

MAX_PROBLEMS = 100
"""How many problems of one value are listed."""

_SIMPLE = re.compile(r"[\w-]+")


class Problem(NamedTuple):
    """What is wrong with a part of a value; the `path` of the whole value is empty."""

    path: str
    text: str

    def __str__(self) -> str:
        return f"{self.path}: {self.text}" if self.path else self.text


class _Fields(NamedTuple):
    """The members of a JSON object: their types, and which of them must or may be there."""

    types: Mapping[str, Any]
    required: Iterable[str]
    is_closed: bool = False


def find_problems(data: object, annotation: object) -> list[Problem]:
    """Return why `convert` does not accept the data as the type; empty if it does.

    The parts of an object or array are converted one by one, so that each reports its own problem.
    """
    try:
        problems = [*islice(_problems(data, annotation, ""), MAX_PROBLEMS + 1)]
    except RecursionError:
        return [Problem("", TOO_DEEP)]
    if len(problems) > MAX_PROBLEMS:
        problems[-1] = Problem("", "there are more problems")
    return problems


def problem_of(error: CodecError, path: str = "") -> Problem:
    """Return the problem that a conversion reports; `path` is that of the converted part."""
    place = error.path.removeprefix("value")
    text = str(error).removesuffix(f" (at {error.path})")
    return Problem(path + place if path else place.removeprefix("."), text)


def _problems(data: Any, annotation: Any, path: str) -> Iterator[Problem]:
    try:
        convert(data, annotation)
    except CodecError as error:
        if isinstance(error.__cause__, NameError):
            # The type has an annotation that cannot be resolved, so its parts are not known.
            yield problem_of(error, path)
            return
        meaning, metadata = unwrap(annotation)
        problems = _parts_problems(data, meaning, metadata, path, error)
        # All parts may fit, but not together.
        yield next(problems, problem_of(error, path))
        yield from problems


def _parts_problems(
    data: Any, meaning: Any, metadata: Sequence[Any], path: str, error: CodecError
) -> Iterator[Problem]:
    cls, members = get_origin(meaning) or meaning, union_members(meaning)
    if len(members) > 1:
        # It is not known which of several members was meant.
        others = [each for each in members if each not in (None, NoneType)]
        if len(others) == 1:
            yield from _problems(data, _annotated(others[0], metadata), path)
    elif is_model(meaning):
        for location, text in model_problems(error.__cause__):
            place = path
            for part in location:
                place = _member(place, part)
            yield Problem(place, text)
    elif isinstance(data, dict):
        yield from _own_problem(data, cls, meaning, metadata, path)
        yield from _object_problems(data, cls, meaning, path)
    elif isinstance(data, list):
        yield from _own_problem(data, cls, meaning, metadata, path)
        types = _item_types(meaning, len(data))
        for n, (item, annotation) in enumerate(zip(data, types, strict=False)):
            yield from _problems(item, annotation, _member(path, n))


def _own_problem(
    data: Any, cls: Any, meaning: Any, metadata: Sequence[Any], path: str
) -> Iterator[Problem]:
    """Yield what is wrong with a dict or an array whatever its values are: its length or a key."""
    if isinstance(cls, type) and issubclass(cls, tuple) and (info := class_info(cls)):
        if isinstance(data, list) and (text := length_problem(data, info)):
            yield Problem(path, text)
    elif (open_type := _with_any_values(data, cls, get_args(meaning))) is not None:
        try:
            convert(data, _annotated(open_type, metadata))
        except CodecError as error:
            yield problem_of(error, path)


def _with_any_values(data: Any, cls: Any, arguments: tuple[Any, ...]) -> Any:
    """Return the type of a dict or an array with values of any type, if the data is such a one."""
    if not arguments or not isinstance(cls, type):
        return None
    if issubclass(cls, Mapping):
        return dict[arguments[0], Any] if isinstance(data, dict) else None  # type: ignore[valid-type]  # known only at run time
    if not isinstance(data, list) or not issubclass(cls, Iterable):
        return None
    has_length = issubclass(cls, tuple) and Ellipsis not in arguments
    return tuple[(Any,) * len(arguments)] if has_length else list[Any]  # type: ignore[misc]  # as above


def _annotated(annotation: Any, metadata: Sequence[Any]) -> Any:
    return Annotated[annotation, *metadata] if metadata else annotation


def _object_problems(data: Any, cls: Any, meaning: Any, path: str) -> Iterator[Problem]:
    arguments = get_args(meaning)
    if (fields := _fields_of(cls, meaning)) is not None:
        for name in fields.required:
            if name not in data:
                yield Problem(_member(path, name), "missing")
        for name, item in data.items():
            if name in fields.types:
                yield from _problems(item, fields.types[name], _member(path, name))
            elif fields.is_closed:
                yield Problem(_member(path, name), "unknown field")
    elif isinstance(cls, type) and issubclass(cls, Mapping) and len(arguments) == 2:
        for name, item in data.items():
            yield from _problems(item, arguments[1], _member(path, name))


def _fields_of(cls: Any, meaning: Any) -> _Fields | None:
    """Return the fields of a class that JSON represents as an object."""
    if not isinstance(cls, type) or issubclass(cls, tuple):
        return None
    if issubclass(cls, msgspec.Struct):
        return _struct_fields(cls, meaning)
    if is_typeddict(cls):
        hints = hints_of(cls)
        required = [name for name, hint in hints.items() if _is_required(cls, name, hint)]
        types = {name: _without_mark(hint) for name, hint in hints.items()}
    elif info := class_info(cls):
        types = {name: info.types.get(name, Any) for name in info.names}
        required = [name for name in info.names if name in info.required]
    else:
        return None
    variables = variables_of(meaning)
    return _Fields({name: substitute(hint, variables) for name, hint in types.items()}, required)


def _struct_fields(cls: type[msgspec.Struct], meaning: Any) -> _Fields | None:
    config, fields = cls.__struct_config__, msgspec.structs.fields(meaning)
    if config.array_like:
        return None
    types = {field.encode_name: field.type for field in fields}
    if config.tag_field is not None:
        types[config.tag_field] = Literal[config.tag]
    required = [field.encode_name for field in fields if field.required]
    return _Fields(types, required, config.forbid_unknown_fields)


def _is_required(cls: Any, name: str, hint: Any) -> bool:
    # Annotations that are strings may say otherwise than the keys of the class.
    kind = get_origin(hint)
    return kind is Required or (kind is not NotRequired and name in cls.__required_keys__)


def _without_mark(hint: Any) -> Any:
    return get_args(hint)[0] if get_origin(hint) in (Required, NotRequired) else hint


def _item_types(meaning: Any, count: int) -> Iterable[Any]:
    """Return the types of the items of an array, as far as they are known."""
    cls, arguments = get_origin(meaning) or meaning, get_args(meaning)
    if not isinstance(cls, type) or not issubclass(cls, Iterable) or issubclass(cls, Mapping):
        return ()
    if issubclass(cls, tuple) and (info := class_info(cls)):
        return [info.types.get(name, Any) for name in info.names]
    if issubclass(cls, tuple) and Ellipsis not in arguments:
        return arguments
    return [arguments[0]] * count if arguments else ()


def _member(path: str, part: object) -> str:
    """Return the path of a member; unusual names are quoted, since they may contain dots."""
    # A payload that comes from Python and not from JSON may have keys of any type.
    if not isinstance(part, str):
        return f"{path}[{part!r}]"
    if not _SIMPLE.fullmatch(part):
        return f"{path}[{json.dumps(part, ensure_ascii=False)}]"
    return f"{path}.{part}" if path else part
