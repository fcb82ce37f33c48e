"""JSON from elsewhere, without tags, as a type: work of msgspec and pydantic, with one error."""

import collections.abc
from collections.abc import Callable
from pathlib import PurePath
from typing import Any, get_args, get_origin

import msgspec

from perdure._codec_records import Record, record_of
from perdure._codec_types import bare, filled, union_members, variables_of
from perdure.errors import CodecError

_AT = " - at `$"


def convert_foreign(data: Any, annotation: Any, path: str) -> Any:
    """Give data as the type, validated; `CodecError` names the field that does not fit."""
    meaning = bare(annotation)
    if _is_model(meaning):
        return _by_pydantic(data, meaning, path)
    try:
        return msgspec.convert(data, annotation, dec_hook=_hook)
    except msgspec.ValidationError as error:
        message, _, place = str(error).partition(_AT)
        raise CodecError(message, path + place.rstrip("`")) from error
    except TypeError as error:
        # msgspec refuses types in which JSON does not say which class is meant: try them out.
        parts = _parts_converter(meaning)
        if parts is None:
            raise CodecError(f"cannot convert to {annotation!r}: {error}", path) from error
        return parts(data, path)
    except Exception as error:
        raise CodecError(f"does not fit {annotation!r}: {error!r}", path) from error


def _is_model(meaning: Any) -> bool:
    record = record_of(meaning) if isinstance(meaning, type) else None
    return record is not None and record.model


def _hook(wanted: Any, data: Any) -> Any:
    if isinstance(data, wanted):
        return data
    if _is_model(wanted):
        return wanted.model_validate(data)
    if issubclass(wanted, PurePath) and isinstance(data, str):
        return wanted(data)
    raise TypeError(f"Expected `{wanted.__name__}`, got `{type(data).__name__}`")


def _by_pydantic(data: Any, model: Any, path: str) -> Any:
    try:
        return model.model_validate(data)
    except Exception as error:
        problems = getattr(error, "errors", list[Any])()
        if not problems:
            raise CodecError(f"does not fit {model.__name__}: {error!r}", path) from error
        place = "".join(_step(step) for step in problems[0]["loc"])
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise CodecError(problems[0]["msg"] + more, path + place) from error


def _step(place: object) -> str:
    return f"[{place}]" if isinstance(place, int) else f".{place}"


Converter = Callable[[Any, str], Any]


def _parts_converter(meaning: Any) -> Converter | None:
    """Give a converter that takes a type apart and converts part by part, if it has parts."""
    members, arguments = union_members(meaning), get_args(meaning)
    cls = get_origin(meaning) or meaning
    if len(members) > 1:
        return lambda data, path: _first_that_fits(data, members, path)
    if not isinstance(cls, type):
        return None
    if record := record_of(cls):
        types = {name: filled(hint, variables_of(meaning)) for name, hint in record.types.items()}
        return lambda data, path: _fields(data, cls, record, types, path)
    if issubclass(cls, collections.abc.Mapping) and len(arguments) == 2:
        return lambda data, path: {
            key: convert_foreign(item, arguments[1], f"{path}.{key}")
            for key, item in _of(dict, data, path).items()
        }
    if issubclass(cls, collections.abc.Iterable) and len(set(arguments) - {Ellipsis}) == 1:
        gather = cls if cls in (set, frozenset, tuple) else list
        return lambda data, path: gather(
            convert_foreign(item, arguments[0], f"{path}[{place}]")
            for place, item in enumerate(_of(list, data, path))
        )
    return None


def _of(kind: type, data: Any, path: str) -> Any:
    if not isinstance(data, kind):
        wanted = "object" if kind is dict else "array"
        raise CodecError(f"Expected `{wanted}`, got `{type(data).__name__}`", path)
    return data


def _first_that_fits(data: Any, members: tuple[Any, ...], path: str) -> Any:
    problems: list[str] = []
    for member in members:
        try:
            return convert_foreign(data, member, path)
        except CodecError as error:
            problems.append(f"{getattr(member, '__name__', member)}: {error}")
    raise CodecError("fits no member of the union: " + "; ".join(problems), path)


def _fields(data: Any, cls: Any, record: Record, types: dict[str, Any], path: str) -> Any:
    held = _of(dict, data, path)
    if missing := record.required - set(held):
        raise CodecError(f"Object missing required field `{min(missing)}`", path)
    values = {
        name: convert_foreign(held[name], types.get(name, Any), f"{path}.{name}")
        for name in record.names
        if name in held
    }
    try:
        return cls(**values)
    except Exception as error:
        raise CodecError(f"does not fit {cls.__name__}: {error}", path) from error
