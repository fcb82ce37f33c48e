"""Look up the class of a stored exception among the classes that the code already uses.

A class is found if it is built into Python, perdure's own, declared by the user, or bound in the
module or the closure of a function that could name it in an `except` clause: the step's function or
the workflow's. Nothing is imported, and no attribute is read that could run code: namespaces are
searched for a class with the stored name.
"""

import builtins
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any, TypeAlias, cast

from perdure import errors
from perdure.errors import PerdureError

ErrorClass: TypeAlias = type[BaseException]
Namespace: TypeAlias = Mapping[str, object]

_MOST_WRAPPERS = 100

# Raised in a coroutine, these turn into a RuntimeError.
_UNSAFE = (StopIteration, StopAsyncIteration)


def _is_safe_exception(value: object) -> bool:
    # `isinstance(value, type)` would read `__class__` of a lazy proxy.
    is_class = issubclass(type(value), type)
    return is_class and issubclass(value, Exception) and not issubclass(value, _UNSAFE)  # type: ignore[arg-type]  # a class, by is_class


def _exceptions(objects: Iterable[object], base: type[Exception]) -> dict[str, ErrorClass]:
    classes = (cast(ErrorClass, value) for value in objects if _is_safe_exception(value))
    return {cls.__name__: cls for cls in classes if issubclass(cls, base)}


_BUILT_IN = _exceptions(vars(builtins).values(), Exception)
_OWN = _exceptions(vars(errors).values(), PerdureError)
KNOWN: Mapping[str, ErrorClass] = _BUILT_IN | _OWN
"""The classes that are restored without being declared or bound, by name."""


def _own_attribute(cls: type, name: str) -> str:
    # Through the descriptor of `type`, because a metaclass may define an attribute of this name.
    value = type.__dict__[name].__get__(cls)
    return value if type(value) is str else "?"


def class_name(cls: type) -> str:
    """Return the name of a class, whatever its metaclass does."""
    return _own_attribute(cls, "__name__")


def full_name(cls: type) -> str:
    """Return the module and qualified name of a class, whatever its metaclass does."""
    return f"{_own_attribute(cls, '__module__')}.{_own_attribute(cls, '__qualname__')}"


def is_known(cls: type) -> bool:
    """Return whether an exception class is restored without being declared or bound."""
    return KNOWN.get(class_name(cls)) is cls


def name_of(cls: type) -> str:
    """Return the name to store for an exception class, distinct from those of known classes."""
    name = class_name(cls)
    return name if KNOWN.get(name, cls) is cls else full_name(cls)


class ErrorScope:
    """Declared exception classes, and the functions whose modules and closures are searched."""

    __slots__ = ("_classes", "_functions")

    def __init__(
        self, classes: Sequence[ErrorClass] = (), functions: Sequence[object] = ()
    ) -> None:
        self._classes = classes
        self._functions = functions

    def inside(self, classes: Sequence[ErrorClass], *functions: object) -> "ErrorScope":
        """Return the scope of a call, whose own declarations and functions come first."""
        return ErrorScope((*classes, *self._classes), (*functions, *self._functions))

    def contains(self, cls: ErrorClass) -> bool:
        """Return whether exactly this class is declared or bound here, not another of its name."""
        is_declared = any(each is cls for each in self._classes)
        return is_declared or self._find_bound(full_name(cls)) is cls

    def find(self, full: str) -> ErrorClass | None:
        """Return the class with this full name, or else the only class with this short name.

        So a class is still found after it was moved to another module.
        """
        matching = (cls for cls in self._classes if full_name(cls) == full)
        return (
            next(matching, None)
            or self._find_bound(full)
            or self._find_moved(full.rpartition(".")[2])
        )

    def find_declared(self, name: str) -> ErrorClass | None:
        """Return the declared class that is stored under this name."""
        return next((cls for cls in self._classes if name_of(cls) == name), None)

    def _find_bound(self, full: str) -> ErrorClass | None:
        classes = (_search(namespace, full) for namespace in self._namespaces())
        return next((cls for cls in classes if cls is not None), None)

    def _find_moved(self, name: str) -> ErrorClass | None:
        values = (value for namespace in self._namespaces() for value in _values(namespace))
        return _only(self._classes, name) or _only(filter(_is_safe_exception, values), name)

    def _namespaces(self) -> Iterator[Namespace]:
        for function in self._functions:
            if (innermost := _unwrapped(function)) is not None:
                yield _closure(innermost)
                yield innermost.__globals__


NOWHERE = ErrorScope()
"""The scope in which only known classes are found."""


def _only(classes: Iterable[Any], name: str) -> ErrorClass | None:
    """Return the only class with this name, or `None` if there are none or several."""
    distinct = {id(cls): cls for cls in classes if class_name(cls) == name}
    return distinct.popitem()[1] if len(distinct) == 1 else None


def _unwrapped(function: object) -> FunctionType | None:
    """Return the Python function inside partials, bound methods, decorators and callables."""
    try:
        # Bounded, because a user's `__wrapped__` may be circular.
        for _ in range(_MOST_WRAPPERS):
            inner = _inner_function(function)
            if inner is None:
                break
            function = inner
    except Exception:  # noqa: BLE001 - attributes of a callable may be the user's code
        return None
    return function if isinstance(function, FunctionType) else None


def _inner_function(function: Any) -> object:
    if isinstance(function, partial):
        return function.func
    if isinstance(function, MethodType):
        return function.__func__
    if (inner := getattr(function, "__wrapped__", None)) is not None:
        return cast(object, inner)
    if isinstance(function, FunctionType):
        return None
    maker = "__init__" if isinstance(function, type) else "__call__"
    return cast(object, getattr(function, maker))


def _closure(function: FunctionType) -> Namespace:
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return {name: cell.cell_contents for name, cell in cells if _is_filled(cell)}


def _is_filled(cell: CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def _search(namespace: Namespace, full: str, holder: str = "") -> ErrorClass | None:
    """Return the class of this full name in a namespace, or in a module or class bound there.

    `holder` is the name of the module or class whose namespace this is. A module bound in a
    function's own namespace may define the class or re-export it, as `httpx` does. Below that, only
    the path that the full name describes is followed: `sqlalchemy.exc.IntegrityError`.
    """
    holders: list[tuple[str, object]] = []
    for value in _values(namespace):
        name = _name(value, full)
        if name == full and _is_safe_exception(value):
            return cast(ErrorClass, value)
        # The name must get longer at each level, so that modules that bind each other end the
        # search.
        is_below = not holder or name.startswith(f"{holder}.")
        is_bound_module = not holder and issubclass(type(value), ModuleType)
        if name and is_below and (is_bound_module or full.startswith(f"{name}.")):
            holders.append((name, value))
    classes = (_search(_attributes(value), full, name) for name, value in holders)
    return next((cls for cls in classes if cls is not None), None)


def _values(namespace: Namespace) -> Sequence[object]:
    # A copy: another thread may bind a name during the search.
    return tuple(namespace.values())


def _name(value: object, full: str) -> str:
    """Return the name of a module, or of a class that may be on the path `full`, or ""."""
    kind = type(value)
    if issubclass(kind, type):
        # Most classes are not on the path; this avoids building their full names.
        return full_name(value) if class_name(value) in full else ""  # type: ignore[arg-type]  # a class, by its kind
    name = _attributes(value).get("__name__") if issubclass(kind, ModuleType) else ""
    return name if type(name) is str else ""


def _attributes(value: object) -> Namespace:
    # Not `vars`: it would load a lazy module, and a metaclass may define `__dict__`.
    if issubclass(type(value), type):
        return cast(Namespace, type.__dict__["__dict__"].__get__(value))
    return cast(Namespace, object.__getattribute__(value, "__dict__"))
