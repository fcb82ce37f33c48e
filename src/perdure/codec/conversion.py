"""Convert untagged JSON from another source to a type, using msgspec and pydantic."""

import collections.abc
from collections.abc import Sequence
from pathlib import PurePath
from typing import Any, get_args, get_origin

import msgspec

from perdure.codec.annotations import strip_annotation, substitute, union_members, variables_of
from perdure.codec.classes import ClassInfo, class_info
from perdure.errors import CodecError

_AT = " - at `$"

# Nested unions multiply the alternatives: without a limit, hostile data could take forever.
_MAX_GUESSES = 1000

_JSON_NAMES = {dict: "object", list: "array", type(None): "null"}


def convert_foreign(data: Any, annotation: Any, path: str) -> Any:
    """Validate data as the type, or raise `CodecError` with the path of the first problem."""
    return _Conversion().convert(data, annotation, path)


class _Conversion:
    """Converts one value, part by part where msgspec does not support its type."""

    def __init__(self) -> None:
        self._guesses = 0

    def convert(self, data: Any, annotation: Any, path: str) -> Any:
        meaning = strip_annotation(annotation)
        if is_model(meaning):
            return _by_pydantic(data, meaning, path)
        try:
            return msgspec.convert(data, annotation, dec_hook=_hook)
        except msgspec.ValidationError as error:
            message, _, place = str(error).partition(_AT)
            if not place and isinstance(meaning, type) and class_info(meaning):
                # "object" is the name of JSON's type.
                named = f"an object with the fields of {meaning.__name__}"
                message = message.replace("Expected `object`", f"Expected {named}")
            raise CodecError(message, path + place.rstrip("`")) from error
        except TypeError as error:
            type_error = error
        except Exception as error:
            raise CodecError(f"does not fit {annotation!r}: {error!r}", path) from error
        # msgspec rejects unions whose members it cannot distinguish by their JSON, so try each
        # member.
        members = union_members(meaning)
        if len(members) > 1:
            return self._first_that_fits(data, members, path)
        return self._by_parts(data, meaning, path, type_error)

    def _first_that_fits(self, data: Any, members: tuple[Any, ...], path: str) -> Any:
        problems: list[str] = []
        for member in members:
            try:
                return self.convert(data, member, path)
            except CodecError as error:
                problems.append(f"{getattr(member, '__name__', member)}: {error}")
                self._guesses += 1
                if self._guesses > _MAX_GUESSES:
                    raise
        raise CodecError(
            "does not fit any member of the union: " + "; ".join(problems)[:1000], path
        )

    def _by_parts(self, data: Any, meaning: Any, path: str, first_error: TypeError) -> Any:
        cls, arguments = get_origin(meaning) or meaning, get_args(meaning)
        if isinstance(cls, type) and (info := class_info(cls)):
            return self._fields(data, meaning, info, path)
        if _is_subclass(cls, collections.abc.Mapping) and len(arguments) == 2:
            items = _of(dict, data, path).items()
            return {key: self.convert(item, arguments[1], f"{path}.{key}") for key, item in items}
        if _is_subclass(cls, collections.abc.Iterable) and len(set(arguments) - {Ellipsis}) == 1:
            kind = cls if cls in (set, frozenset, tuple) else list
            items = enumerate(_of(list, data, path))
            return kind(self.convert(item, arguments[0], f"{path}[{i}]") for i, item in items)
        raise CodecError(f"cannot convert to {meaning!r}: {first_error}", path) from first_error

    def _fields(self, data: Any, meaning: Any, info: ClassInfo, path: str) -> Any:
        cls, variables = get_origin(meaning) or meaning, variables_of(meaning)
        is_array = issubclass(cls, tuple)
        items = _fields_of_array(data, info, path) if is_array else _of(dict, data, path)
        if missing := info.required - set(items):
            raise CodecError(f"Object missing required field `{min(missing)}`", path)
        values: dict[str, Any] = {}
        for n, name in enumerate(name for name in info.names if name in items):
            annotation = substitute(info.types.get(name, Any), variables)
            place = f"[{n}]" if is_array else f".{name}"
            values[name] = self.convert(items[name], annotation, path + place)
        try:
            return cls(**values)
        except Exception as error:
            raise CodecError(f"does not fit {cls.__name__}: {error}", path) from error


def _is_subclass(cls: Any, base: type) -> bool:
    return isinstance(cls, type) and issubclass(cls, base)


def _of(kind: type, data: Any, path: str) -> Any:
    if not isinstance(data, kind):
        expected, name = _JSON_NAMES[kind], type(data).__name__
        actual = _JSON_NAMES.get(type(data), name)
        raise CodecError(f"Expected `{expected}`, got `{actual}`", path)
    return data


def _fields_of_array(data: Any, info: ClassInfo, path: str) -> dict[str, Any]:
    """Return the fields of a NamedTuple, which is an array in JSON."""
    items = _of(list, data, path)
    if problem := length_problem(items, info):
        raise CodecError(problem, path)
    return dict(zip(info.names, items, strict=False))


def length_problem(items: Sequence[object], info: ClassInfo) -> str:
    """Return why a NamedTuple cannot have these items, in msgspec's words, or an empty string."""
    least, most = len(info.required), len(info.names)
    if least <= len(items) <= most:
        return ""
    expected = f"{most}" if least == most else f"{least} to {most}"
    return f"Expected `array` of length {expected}, got {len(items)}"


def is_model(meaning: Any) -> bool:
    """Return whether a type is a pydantic model."""
    info = class_info(meaning) if isinstance(meaning, type) else None
    return info is not None and info.model


def _hook(expected: Any, data: Any) -> Any:
    if isinstance(data, expected):
        return data
    if is_model(expected):
        return expected.model_validate(data)
    if issubclass(expected, PurePath) and isinstance(data, str):
        return expected(data)
    raise TypeError(f"Expected `{expected.__name__}`, got `{type(data).__name__}`")


def _by_pydantic(data: Any, model: Any, path: str) -> Any:
    try:
        return model.model_validate(data)
    except Exception as error:
        problems = model_problems(error)
        if not problems:
            raise CodecError(f"does not fit {model.__name__}: {error!r}", path) from error
        location, text = problems[0]
        place = "".join(_path_part(part) for part in location)
        suffix = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise CodecError(text + suffix, path + place) from error


def model_problems(error: BaseException | None) -> list[tuple[tuple[str | int, ...], str]]:
    """Return the place and the text of each problem in an error that pydantic raised."""
    return [(each["loc"], each["msg"]) for each in getattr(error, "errors", list[Any])()]


def _path_part(part: object) -> str:
    return f"[{part}]" if isinstance(part, int) else f".{part}"
