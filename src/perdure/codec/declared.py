"""Classes that the user declared, for values whose classes no return type names.

The full names of these classes are stored in the value. They are only looked up here, never
imported.
"""

from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from functools import cached_property
from typing import Any, get_args, get_origin, is_typeddict

from perdure.codec.annotations import annotations_of, strip_annotation
from perdure.codec.classes import class_info, hints_of
from perdure.codec.scope import full_name
from perdure.errors import CodecError, InvalidArgument


class DeclaredTypes:
    """Declared classes, classes in the annotations of a function, and the classes of their fields.

    They are collected on first use: only when a value contains an object whose class no return type
    names.
    """

    def __init__(
        self, classes: Sequence[type] = (), fn: Callable[..., object] | None = None
    ) -> None:
        self._classes = check_types(classes)
        self._fn = fn

    def __contains__(self, cls: type) -> bool:
        return self._by_name.get(full_name(cls)) is cls

    def __bool__(self) -> bool:
        return bool(self._by_name)

    def find(self, name: str, path: str) -> type:
        """Return the class with this full name, or else the only class with this short name.

        So a class is still found after it was moved to another module.
        """
        if (cls := self._by_name.get(name)) is not None:
            return cls
        short = name.rpartition(".")[2]
        candidates = [cls for cls in self._by_name.values() if cls.__name__ == short]
        if len(candidates) == 1:
            return candidates[0]
        problem = "is not declared" if not candidates else "is not the only one with its name"
        raise CodecError(
            f"the class {name} {problem}; declare it with types=[{short}] of the workflow", path
        )

    @cached_property
    def _by_name(self) -> dict[str, type]:
        annotations = () if self._fn is None else annotations_of(self._fn)
        # Declared classes last, so that they win over classes of the same name in annotations.
        return {full_name(cls): cls for cls in _classes_in([*annotations, *self._classes])}


def is_restorable(cls: type) -> bool:
    """Return whether an instance of a class can be restored once the class is known."""
    return issubclass(cls, Enum) or is_typeddict(cls) or class_info(cls) is not None


def check_types(types: object) -> tuple[type, ...]:
    """Check for an iterable of restorable classes; return it as a tuple."""
    # A tuple is recognized first, because checking for an abstract class takes ten times as long.
    if not isinstance(types, (tuple, Iterable)) or isinstance(types, str):
        raise InvalidArgument("types", types, "a list of classes")
    classes = tuple(types)
    for cls in classes:
        if not isinstance(cls, type) or not is_restorable(cls):
            expected = "classes with fields (dataclasses, models, named tuples …) or enums"
            hint = "Exceptions are declared with errors=" if _is_exception(cls) else ""
            raise InvalidArgument("types", cls, expected, hint)
    return classes


def _is_exception(cls: object) -> bool:
    return isinstance(cls, type) and issubclass(cls, BaseException)


def _classes_in(annotations: Iterable[Any]) -> Iterable[type]:
    """Yield the classes that annotations name, and the classes of their fields."""
    classes: dict[type, None] = {}
    pending = [*annotations]
    for annotation in pending:
        meaning = strip_annotation(annotation)
        pending += get_args(meaning)
        cls = get_origin(meaning) or meaning
        if not isinstance(cls, type) or cls in classes or not is_restorable(cls):
            continue
        classes[cls] = None
        info = class_info(cls)
        pending += (hints_of(cls) if info is None else info.types).values()
    return classes


NO_TYPES = DeclaredTypes()
